"""Of all groups that stand still, the one that the others stand still for.

A rank that is missed in one group may itself wait in another: then the other comes first. What
remains is the root; several are told apart by who waited first, and a circle is one of its own.
Who waits in Outlast's own group has left the step in which others wait for it: it left theirs out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outlast.fleet.trace.groups import OWN_CALLED
from outlast.fleet.trace.stuck import Stuck


class Ordered(NamedTuple):
    """`found`: roots first, each kind by time. `circle`: everybody waits for somebody who waits."""

    found: list[Stuck]
    circle: bool


def ordered(found: Sequence[Stuck]) -> Ordered:
    """The root first."""
    waits = {
        at: {
            other
            for other, elsewhere in enumerate(found)
            if other != at and _behind(stuck, elsewhere)
        }
        for at, stuck in enumerate(found)
    }
    roots = [at for at, behind in waits.items() if not behind]
    circle = bool(found) and not roots
    if circle:  # those who only lead to it are not of it
        roots = [at for at in waits if at in _reached(at, waits)]
    first = sorted(roots, key=lambda at: _when(found[at]))
    rest = sorted(set(waits) - set(roots), key=lambda at: _when(found[at]))
    return Ordered([found[at] for at in first + rest], circle)


def _behind(stuck: Stuck, other: Stuck) -> bool:
    """Whether the ranks that `stuck` is about may only be held up by `other`."""
    step_was_left = other.group == OWN_CALLED != stuck.group
    return not step_was_left and bool(set(stuck.ranks) & set(other.waiting))


def _when(stuck: Stuck) -> tuple[bool, int]:
    """What only perhaps stands still comes last, and what nobody knows the time of."""
    return stuck.confidence == "unsure", stuck.since_ns if stuck.since_ns is not None else 1 << 63


def _reached(start: int, waits: dict[int, set[int]]) -> set[int]:
    seen: set[int] = set()
    open_ = [start]
    while open_:
        new = waits[open_.pop()] - seen
        seen |= new
        open_ += new
    return seen
