"""How parts are cut for the parity of a group of ranks, as RAID 5 does it. Pure arithmetic.

Each member's part is cut into as many strips as there are other members, in their order: one for
each other's keeper. What that keeper holds is the XOR of the strips that it gets, as if all were as
long as the longest. So of the strips of a lost member each is the XOR of one keeper's parity and
that keeper's strips of all members who are left.
"""

from __future__ import annotations

from typing import NamedTuple

BLOCK_BYTES = 4096


class Strip(NamedTuple):
    """Bytes of a part, from `begin` to `end` (exclusive); none, where the part is short."""

    begin: int
    end: int


def strip_bytes(size_bytes: int, members: int) -> int:
    """How long the strips of a part are; the last ones of it may be shorter."""
    blocks = -(-size_bytes // BLOCK_BYTES)
    return -(-blocks // (members - 1)) * BLOCK_BYTES


def others(group: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The members who hold parity of `rank`'s strips: the i-th of them, of its i-th strip."""
    return tuple(member for member in group if member != rank)


def cut(group: tuple[int, ...], rank: int, holder: int, size_bytes: int) -> Strip:
    """The strip of `rank`'s part of `size_bytes` that goes to the keeper of `holder`."""
    each = strip_bytes(size_bytes, len(group))
    begin = min(size_bytes, others(group, rank).index(holder) * each)
    return Strip(begin, min(size_bytes, begin + each))
