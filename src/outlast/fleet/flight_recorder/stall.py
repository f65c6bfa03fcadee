"""Stalls: operations of a group that do not complete, and the ranks to look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

StallKind = Literal[
    "absent",  # some ranks entered it, others did not
    "mismatch",  # all entered, not all the same thing
    "unfinished",  # all entered the same, and it did not end
    "no-dump",  # whoever has a dump entered; a rank without one may not have
    "undecided",  # what would tell has been written over
]
Confidence = Literal["sure", "likely", "unsure"]
_SHOWN = 16


class Stall(Struct, frozen=True, kw_only=True):
    """One operation of one group that did not go on. `waiting`: ranks inside of it."""

    kind: StallKind
    group: str
    members: tuple[int, ...]
    op: str
    seq: int
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    since_ns: int | None  # the first of those who wait entered it then; None: its record is gone
    confidence: Confidence
    said: str
    where: str = ""  # the script's line at which the others wait


def format_ranges(ranks: Iterable[int]) -> str:
    """0-3, 7, 9-11; the first sixteen runs of them."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [f"{a}-{b}" if b > a else f"{a}" for a, b in runs[:_SHOWN]]
    if left := runs[_SHOWN:]:
        shown.append(f"and {sum(b - a + 1 for a, b in left)} more")
    return ", ".join(shown)


def format_ranks(ranks: Iterable[int]) -> str:
    """rank 2, ranks 0-3."""
    known = sorted(ranks)
    return f"rank{'s' if len(known) != 1 else ''} {format_ranges(known)}"
