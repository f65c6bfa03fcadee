"""Stalls: operations of a group that do not complete, and the ranks to look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct, field

StallKind = Literal[
    "absent",  # some ranks entered it, others did not
    "mismatch",  # all entered, with different operations
    "unfinished",  # all entered the same, and it did not complete
    "no-dump",  # all ranks with a dump entered; a rank without one may not have
    "undecided",  # the decisive records have been overwritten
]
Confidence = Literal["sure", "likely", "unsure"]
_SHOWN = 16


class Stall(Struct, frozen=True, kw_only=True):
    """Operation of a group that did not complete.

    `waiting`: ranks inside of it.
    """

    kind: StallKind
    group: str
    members: tuple[int, ...]
    op: str
    seq: int
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    since_ns: int | None  # time that the first waiting rank entered it; None: not recorded
    confidence: Confidence
    description: str = field(name="said")
    where: str = ""  # the script's line at which the others wait


def format_ranges(ranks: Iterable[int]) -> str:
    """Return 0-3, 7, 9-11: at most sixteen ranges."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [f"{a}-{b}" if b > a else f"{a}" for a, b in runs[:_SHOWN]]
    if rest := runs[_SHOWN:]:
        shown.append(f"and {sum(b - a + 1 for a, b in rest)} more")
    return ", ".join(shown)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 2` or `ranks 0-3`."""
    known = sorted(ranks)
    return f"rank{'s' if len(known) != 1 else ''} {format_ranges(known)}"
