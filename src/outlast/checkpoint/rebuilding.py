"""A part that was lost with its keeper, computed from its group's parity and the others' parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from outlast.checkpoint import xor
from outlast.checkpoint.keeper.protocol import Parity
from outlast.checkpoint.record import Manifest
from outlast.checkpoint.storage import Held
from outlast.checkpoint.strips import cut, others, strip_bytes


class Part(NamedTuple):
    """One rank's part of a version, and where it lies."""

    manifest: Manifest
    memory: Held


class HeldParity(NamedTuple):
    """What one keeper has of its group's parity of that version, and where it lies."""

    parity: Parity
    memory: Held


class Rebuilt:
    """The part of `rank`, computed wherever it is read: it is right where all that it is made of
    is, and whoever reads it compares digests. Never in memory as a whole."""

    def __init__(
        self,
        group: tuple[int, ...],
        rank: int,
        size_bytes: int,
        parts: Mapping[int, Part],
        parities: Mapping[int, Held],
    ) -> None:
        """`parts` and `parities` of all others in the group, by rank and by their keeper's."""
        self._group, self._rank = group, rank
        self._holders = others(group, rank)
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
        """Bytes of the strip that is in this holder's parity."""
        self._parities[holder].read(offset, into)
        scratch = memoryview(bytearray(len(into)))
        for rank in others(self._group, holder):
            if rank == self._rank:
                continue
            manifest, memory = self._parts[rank]
            strip = cut(self._group, rank, holder, manifest.size_bytes)
            begin = min(strip.begin + offset, strip.end)
            piece = scratch[: min(len(into), strip.end - begin)]
            memory.read(begin, piece)
            xor.fold(into, piece)


def rebuild(parts: Mapping[int, Part], parities: Iterable[HeldParity]) -> dict[int, Part]:
    """By rank, every part that parity of this version gives: of those that are lost, and once more
    of those that are not, should they be damaged."""
    held: dict[tuple[int, ...], dict[int, HeldParity]] = {}
    for each in parities:
        held.setdefault(each.parity.group, {})[each.parity.rank] = each
    rebuilt: dict[int, Part] = {}
    for group, found in held.items():
        for rank in group:
            left = others(group, rank)
            if not all(other in parts and other in found for other in left):
                continue
            manifests = found[left[0]].parity.manifests
            manifest = next(each for each in manifests if each.rank == rank)
            memories = {other: found[other].memory for other in left}
            memory = Rebuilt(group, rank, manifest.size_bytes, parts, memories)
            rebuilt[rank] = Part(manifest, memory)
    return rebuilt
