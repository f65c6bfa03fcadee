"""Parity arithmetic: strips of parts, their XOR, and the rebuilding of a lost part.

Each member's part is cut into as many strips as there are other members, in their order: one for
each other's keeper. That keeper holds the XOR of the strips that it gets, padded to the longest. So
each strip of a lost member is the XOR of one keeper's parity and that keeper's strips of all
remaining members.

XOR runs at the memory's speed with NumPy, which is imported on first use: a keeper without parity
starts without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from outlast.checkpoint.format.manifests import Manifest
from outlast.checkpoint.keeper.keeper_frames import VersionParity
from outlast.checkpoint.stores.store_interfaces import MemoryFile

BLOCK_BYTES = 4096


class Strip(NamedTuple):
    """Bytes of a part, from `begin` to `end` (exclusive); empty, where the part is short."""

    begin: int
    end: int


def strip_bytes(size_bytes: int, members: int) -> int:
    """Return the length of a part's strips; the last ones may be shorter."""
    blocks = -(-size_bytes // BLOCK_BYTES)
    return -(-blocks // (members - 1)) * BLOCK_BYTES


def other_members(group: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the members that hold parity of `rank`'s strips, in the order of strips."""
    return tuple(member for member in group if member != rank)


def cut_strip(group: tuple[int, ...], rank: int, holder: int, size_bytes: int) -> Strip:
    """Return the strip of `rank`'s part of `size_bytes` for the keeper of `holder`."""
    each = strip_bytes(size_bytes, len(group))
    begin = min(size_bytes, other_members(group, rank).index(holder) * each)
    return Strip(begin, min(size_bytes, begin + each))


def xor_into(into: memoryview, piece: memoryview) -> None:
    """XOR `piece` into the first bytes of `into`. Other threads run meanwhile."""
    import numpy as np

    there = np.frombuffer(into, np.uint8, len(piece))
    np.bitwise_xor(there, np.frombuffer(piece, np.uint8), out=there)


def clear_memory(memory: memoryview) -> None:
    """Set all bytes to zero."""
    import numpy as np

    np.frombuffer(memory, np.uint8).fill(0)


class HeldPart(NamedTuple):
    """One rank's part of a version, with its memory."""

    manifest: Manifest
    memory: MemoryFile


class HeldParity(NamedTuple):
    """One keeper's parity of a version, with its memory."""

    parity: VersionParity
    memory: MemoryFile


class RebuiltPart:
    """The part of `rank`, computed on read, never in memory as a whole.

    It is right where all its sources are, and the reader compares digests.
    """

    def __init__(
        self,
        group: tuple[int, ...],
        rank: int,
        size_bytes: int,
        parts: Mapping[int, HeldPart],
        parities: Mapping[int, MemoryFile],
    ) -> None:
        """Combine `parts` and `parities` of all others in the group, by rank of their keeper."""
        self._group, self._rank = group, rank
        self._holders = other_members(group, rank)
        self._strip_bytes = strip_bytes(size_bytes, len(group))
        self._parts, self._parities = parts, parities

    def read(self, at: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `at` on. Raises CorruptionError where a source ends."""
        while into:
            number, offset = divmod(at, self._strip_bytes)
            length = min(len(into), self._strip_bytes - offset)
            self._compute(self._holders[number], offset, into[:length])
            at, into = at + length, into[length:]

    def _compute(self, holder: int, offset: int, into: memoryview) -> None:
        """Compute bytes of the strip in this holder's parity."""
        self._parities[holder].read(offset, into)
        scratch = memoryview(bytearray(len(into)))
        for rank in other_members(self._group, holder):
            if rank == self._rank:
                continue
            manifest, memory = self._parts[rank]
            strip = cut_strip(self._group, rank, holder, manifest.size_bytes)
            begin = min(strip.begin + offset, strip.end)
            piece = scratch[: min(len(into), strip.end - begin)]
            memory.read(begin, piece)
            xor_into(into, piece)


def rebuild_part(
    parts: Mapping[int, HeldPart], parities: Iterable[HeldParity]
) -> dict[int, HeldPart]:
    """Return every part that parity of this version can rebuild, by rank.

    These are lost parts, and present ones as well, in case they are damaged.
    """
    by_group: dict[tuple[int, ...], dict[int, HeldParity]] = {}
    for each in parities:
        by_group.setdefault(each.parity.group, {})[each.parity.rank] = each
    rebuilt: dict[int, HeldPart] = {}
    for group, found in by_group.items():
        for rank in group:
            others = other_members(group, rank)
            if not all(other in parts and other in found for other in others):
                continue
            manifests = found[others[0]].parity.manifests
            manifest = next(each for each in manifests if each.rank == rank)
            memories = {other: found[other].memory for other in others}
            memory = RebuiltPart(group, rank, manifest.size_bytes, parts, memories)
            rebuilt[rank] = HeldPart(manifest, memory)
    return rebuilt
