"""Groups in which ranks vote, gather and copy state, for worlds of any size.

gloo connects every rank of a group with every other. Above FAN_OUT ranks the control group is
therefore a tree of groups: blocks of FAN_OUT ranks, blocks of their first ranks, and so on. A value
is reduced or gathered from the blocks up, and broadcast from the first ranks down. State is copied
in groups of two.

    level 1        0            32            64         first ranks of the blocks
    level 0    0 1 .. 31    32 33 .. 63    64 65 .. 95
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from outlast.worker.groups.inner_group import InnerGroup

FAN_OUT = 32


class ControlBlocks(NamedTuple):
    """The blocks of the control tree in which a rank is, from its leaf up."""

    blocks: tuple[tuple[int, ...], ...]
    has_top: bool  # the last one is the root of the tree


def control_blocks(place: int, size: int) -> ControlBlocks:
    """Return the blocks of a place among `size` ranks; those of one rank are left out if there are
    more."""
    blocks: list[tuple[int, ...]] = []
    stride = 1
    while True:
        width = stride * FAN_OUT
        first = place - place % width
        block = tuple(range(first, min(size, first + width), stride))
        if len(block) > 1 or size == 1:
            blocks.append(block)
        if width >= size or place != first:
            return ControlBlocks(tuple(blocks), width >= size)
        stride = width


def _name(ranks: tuple[int, ...], world: int) -> str:
    """Return the name of a block, "control" for one of all ranks."""
    return "control" if len(ranks) == world else f"control {ranks[0]}-{ranks[-1]} of {len(ranks)}"


def control_members(rank: int, present: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of a rank's blocks among those that are present, by name."""
    blocks = control_blocks(present.index(rank), len(present)).blocks
    members = (tuple(present[place] for place in block) for block in blocks)
    return {_name(ranks, len(present)): ranks for ranks in members}


class ControlTree(NamedTuple):
    """The groups of one rank. `levels`: of its blocks. `pairs`: seat -> group of two for copies;
    none where one block has all ranks. `below`: how many levels are below the root. `present`: all
    ranks of the generation. `partners`: those with which it exchanges its own state, if any."""

    levels: tuple[InnerGroup, ...]
    pairs: Mapping[int, InnerGroup]
    below: int
    present: tuple[int, ...] = ()
    partners: InnerGroup | None = None

    def with_seat(self, seat: int) -> InnerGroup:
        """Return the group for copies to or from a seat; callers must not bind it, see
        ControlGroup."""
        return self.pairs.get(seat, self.levels[0])

    def place_of(self, seat: int) -> int:
        """Return the place of a seat in the group for copies to or from it."""
        return 1 - self.pairs[seat].group.rank() if seat in self.pairs else self.present.index(seat)

    @classmethod
    def connect(
        cls,
        build: Callable[[str, tuple[int, ...]], InnerGroup],
        rank: int,
        present: tuple[int, ...],
        copies: Sequence[tuple[int, int]],
        partners: tuple[int, ...] = (),
    ) -> ControlTree:
        """Build the groups, those for copies in their order, which is the same on all ranks."""
        members = control_members(rank, present)
        has_top = control_blocks(present.index(rank), len(present)).has_top
        levels = tuple(build(name, ranks) for name, ranks in members.items())
        pairs: dict[int, InnerGroup] = {}
        for pair in copies if len(present) > FAN_OUT else ():
            if rank in pair:
                low, high = sorted(pair)
                pairs[low + high - rank] = build(f"copies {low}-{high}", (low, high))
        name = "partners " + "-".join(map(str, partners))
        together = build(name, partners) if partners else None
        return cls(levels, pairs, len(levels) - has_top, present, together)
