"""Whether one more node may be drained: never more than a share of the fleet within a window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

PREFIX = "outlast: "
REASON_MAX = 200  # characters


class Drained(NamedTuple):
    """A node with a reason that begins with ours. `since_ns`: None where Slurm does not say."""

    node: str
    since_ns: int | None


def allowance(nodes: int, percent: float) -> int:
    """How many may be drained within the window: the share, rounded down, but always one, or a
    fleet of twenty nodes could never lose its bad one."""
    return max(1, int(nodes * percent / 100))


def recent(drained: Iterable[Drained], now_ns: int, window_s: float) -> set[str]:
    """Nodes drained by us within the window. One of which it is not known when counts."""
    begin_ns = now_ns - round(window_s * 1e9)
    return {one.node for one in drained if one.since_ns is None or one.since_ns > begin_ns}


def reason(said: str) -> str:
    """What Slurm keeps: one line, without what a shell or sinfo's columns would trip over."""
    plain = "".join(c if c.isalnum() or c in " .,:;/()%+-_=" else " " for c in said)
    return (PREFIX + " ".join(plain.split()))[:REASON_MAX]


def is_ours(text: str) -> bool:
    return text.startswith(PREFIX)
