"""Parity of a group's parts in keepers' memory: strips, XOR, rebuilding of a lost part.

Two arenas: the previous version stays complete until the next one is.

Each member's part is cut into as many strips as there are other members, in their order: one for
each other's keeper. That keeper holds the XOR of the strips that it gets, padded to the longest.
Each strip of a lost member is therefore the XOR of one keeper's parity and that keeper's strips of
all remaining members.

    part of    keeper 0   keeper 1   keeper 2
    rank 0                strip a    strip b
    rank 1     strip c               strip d        keeper 0 holds c ^ e, keeper 1 a ^ f,
    rank 2     strip e    strip f                   keeper 2 b ^ d

NumPy does the XOR at the memory's speed. It is imported on first use: a keeper without parity
starts without it.

Order of locks: `HeldParities.change`, then `GroupParity._making`, then `GroupParity._folding`.
`_making` is held while memory is allocated; pieces are folded in meanwhile under `_folding` alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from outlast.checkpoint.format.manifests import Manifest, SavePoint
from outlast.checkpoint.keeper import keeper_frames
from outlast.checkpoint.keeper.arena import Arena, as_size, check_memory
from outlast.checkpoint.keeper.keeper_frames import VersionParity
from outlast.checkpoint.replicas.keeper_links import COPY_S, SLICE_BYTES, STALL_S, Offer
from outlast.checkpoint.stores.store_interfaces import MemoryFile
from outlast.errors import StorageError, WireError

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

    It is correct where all its sources are; the reader compares digests.
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
    for group, by_rank in by_group.items():
        for rank in group:
            peers = other_members(group, rank)
            if not all(other in parts and other in by_rank for other in peers):
                continue
            manifests = by_rank[peers[0]].parity.manifests
            manifest = next(each for each in manifests if each.rank == rank)
            memories = {other: by_rank[other].memory for other in peers}
            memory = RebuiltPart(group, rank, manifest.size_bytes, parts, memories)
            rebuilt[rank] = HeldPart(manifest, memory)
    return rebuilt


TURN_S = COPY_S - STALL_S  # a sender waits so long for the previous version to be complete


class GroupParity:
    """Parity of one version.

    `manifests`: of the parts whose strips are folded in, by rank; `begun`: ranks whose strips have
    arrived or are arriving; `error`: why it will never be complete, or "".
    """

    def __init__(self, number: int, place: SavePoint, arena: Arena | None) -> None:
        self.number, self.place, self.arena = number, place, arena
        self.manifests: dict[int, Manifest] = {}
        self.begun: set[int] = set()
        self.error = ""
        self._used = arena is not None
        self._folding, self._making = threading.Lock(), threading.Lock()

    def make_room(self, size_bytes: int) -> None:
        """Allocate memory for strips of this size.

        Raises StorageError when there is none, WireError as `fold` does.
        """
        with self._making:
            with self._folding:
                self._check()
                if self.arena and self._used:
                    self._used = False
                    if self.arena.size_bytes >= size_bytes:
                        clear_memory(self.arena.view)
                    else:
                        self.arena.close()
                        self.arena = None
                if self.arena and self.arena.size_bytes >= size_bytes:
                    return
            larger = Arena.create(size_bytes)  # slow: other strips are folded meanwhile
            with self._folding:
                if self.error:
                    larger.close()
                    self._check()
                if self.arena:
                    xor_into(larger.view, self.arena.view)
                    self.arena.close()
                self.arena = larger

    def fold(self, at: int, piece: memoryview) -> None:
        """XOR one more piece of a strip into the parity.

        Raises WireError once it is void: its memory may belong to another version by then.
        """
        with self._folding:
            self._check()
            assert self.arena
            xor_into(self.arena.view[at : at + len(piece)], piece)

    def invalidate(self, why: str) -> None:
        """Make the parity void; when this returns, no thread folds into it."""
        with self._folding:
            self.error = self.error or f"parity of step {self.place.step} is void: {why}"

    def take_arena(self) -> Arena | None:
        """Return the arena of a void parity, for another version."""
        with self._folding:
            arena, self.arena = self.arena, None
            return arena

    def _check(self) -> None:
        if self.error:
            raise WireError(self.error)


class StripFolding:
    """One member's strip, which is folded into parity."""

    def __init__(self, parities: HeldParities, parity: GroupParity, rank: int) -> None:
        self._parities, self._parity, self._rank = parities, parity, rank

    def pieces(self, at: int, end: int) -> Iterator[memoryview]:
        """Yield memory for the bytes of the strip; fold each piece after it was filled."""
        scratch = memoryview(bytearray(min(SLICE_BYTES, end - at)))
        for begin in range(at, end, SLICE_BYTES):
            piece = scratch[: min(SLICE_BYTES, end - begin)]
            yield piece
            self._parity.fold(begin, piece)

    def keep(self, manifest: Manifest) -> None:
        """Record that the strip is complete. Raises WireError if it does not count any more."""
        with self._parities.change:
            parity = self._parity
            if manifest.place != parity.place:
                raise WireError("the manifest is of another version than its strip")
            if parity.error:
                raise WireError(parity.error)
            parity.manifests[self._rank] = manifest
            self._parities.change.notify_all()

    def abandon(self, why: str) -> None:
        """Make the parity void, unless the strip is complete."""
        with self._parities.change:
            if self._rank not in self._parity.manifests:
                self._parity.invalidate(f"the strip of rank {self._rank} broke off ({why})")
                self._parities.change.notify_all()


class HeldParities:
    """Parity in the keeper of `rank` for the others of its group: two versions, newest last.

    Numbers of their arenas are below zero.
    """

    def __init__(self, rank: int, group: tuple[int, ...]) -> None:
        self.change = threading.Condition(threading.RLock())  # held while versions are read
        self._rank, self._group = rank, group
        self._others = frozenset(other_members(group, rank))
        self._versions: list[GroupParity] = []

    def begin(self, offer: Offer) -> StripFolding | None:
        """Return the destination of a strip; None where it was received before.

        Waits while the previous version is incomplete. Raises WireError for a strip of a void or
        older version, StorageError without memory.
        """
        place, rank = offer.place, offer.rank
        if place is None or rank not in self._others:
            raise WireError(f"rank {rank} is not of its group, {self._group}")
        with self.change:
            parity = self._of(place, rank)
            if rank in parity.manifests:
                return None
            if rank in parity.begun:
                raise WireError(f"an earlier transfer of a strip of step {place.step} was aborted")
            parity.begun.add(rank)
            first = not any(each.arena for each in self._versions)
        folding = StripFolding(self, parity, rank)
        try:
            if first:
                self._check_room(offer.arena_bytes)
            parity.make_room(offer.arena_bytes)
        except StorageError as error:
            folding.abandon(str(error))
            raise
        return folding

    def strip(self, manifest: Manifest) -> Strip:
        """Return the range of this part that this keeper gets.

        Raises WireError for a rank outside of the group.
        """
        if manifest.rank not in self._others:
            raise WireError(f"rank {manifest.rank} is not of its group, {self._group}")
        return cut_strip(self._group, manifest.rank, self._rank, manifest.size_bytes)

    @property
    def complete(self) -> list[tuple[keeper_frames.VersionParity, Arena]]:
        """Return the complete parities with their arenas; the caller holds `change`."""
        return [
            (
                keeper_frames.VersionParity(
                    rank=self._rank,
                    group=self._group,
                    manifests=[parity.manifests[rank] for rank in sorted(parity.manifests)],
                    arena=parity.number,
                ),
                parity.arena,
            )
            for parity in self._versions
            if parity.arena and self._is_whole(parity)
        ]

    def _check_room(self, size_bytes: int) -> None:
        count, ranks = len(self._others), ", ".join(map(str, sorted(self._others)))
        check_memory(
            2 * size_bytes,
            f"parity of the parts of ranks {ranks}, 2 strips of {as_size(size_bytes)}: each"
            f" 1/{count} of the memory of a part of {as_size(count * size_bytes)}",
        )

    # --- under the lock ----------------------------------------------------------------------

    def _of(self, place: SavePoint, rank: int) -> GroupParity:
        """Return the parity of this version, for a strip of `rank`."""
        due = time.monotonic() + TURN_S
        while True:
            for parity in self._versions:
                if parity.place == place:
                    return parity
            newest = self._versions[-1] if self._versions else None
            if not newest or newest.error or self._is_whole(newest):
                return self._next(place)
            if rank not in newest.begun:
                if _older(place, newest.place):
                    raise WireError(f"it makes parity of step {newest.place.step}, which is newer")
                # A sender sends versions in order: it will not send its strip of this one.
                newest.invalidate(f"rank {rank} continued with step {place.step} without it")
            elif not self.change.wait(max(0.0, due - time.monotonic())):
                if newest.begun - newest.manifests.keys():
                    raise WireError(f"it still makes parity of step {newest.place.step}")
                missing = sorted(self._others - newest.begun)
                newest.invalidate(f"the strips of ranks {missing} did not come")

    def _next(self, place: SavePoint) -> GroupParity:
        """Begin a version, in the memory of a void one or of the oldest one."""
        number, arena = -1 - len(self._versions), None
        if len(self._versions) > 1 or (self._versions and self._versions[0].error):
            replaced = next((each for each in self._versions if each.error), self._versions[0])
            self._versions.remove(replaced)
            replaced.invalidate("newer ones took its place")
            number, arena = replaced.number, replaced.take_arena()
        self._versions.append(GroupParity(number, place, arena))
        self.change.notify_all()
        return self._versions[-1]

    def _is_whole(self, parity: GroupParity) -> bool:
        return not parity.error and parity.manifests.keys() == self._others


def _older(place: SavePoint, other: SavePoint) -> bool:
    """Return whether a version is older; only versions of one attempt are comparable."""
    return place.attempt == other.attempt and place.position < other.position
