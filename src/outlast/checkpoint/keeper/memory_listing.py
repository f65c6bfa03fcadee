"""Listing of a keeper's memory, for its trainers and for readers on other hosts."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from outlast.checkpoint.format.manifests import Manifest, digest_of
from outlast.checkpoint.keeper.arena import Arena, Unmapped
from outlast.checkpoint.keeper.keeper_frames import HeldVersion, VersionParity
from outlast.checkpoint.replicas.group_parity import HeldParities
from outlast.checkpoint.replicas.keeper_links import COPY_S
from outlast.checkpoint.replicas.remote_copies import ListedMemory
from outlast.checkpoint.replicas.replica_receiver import ReplicaReceiver
from outlast.errors import StorageError


class KeptVersion(msgspec.Struct, eq=False):
    """The version in an arena.

    `stamp`: the arena's stamp while that version is in it; `full`: the manifest with chunks, once
    its write has succeeded.
    """

    manifest: Manifest
    stamp: int
    full: Manifest | None = None


class MemoryEntries(NamedTuple):
    """Versions and parities, and all arenas by number."""

    versions: list[HeldVersion]
    parities: list[VersionParity]
    arenas: dict[int, Arena]


class MemoryListing:
    """Versions of a keeper's own trainers, and those that its `receiver` holds for others.

    Only `ask` may be called from another thread than the keeper's main one.
    """

    receiver: ReplicaReceiver

    def __init__(
        self,
        arenas: Mapping[int, Arena],
        versions: Mapping[int, KeptVersion],
        parities: HeldParities | None,
        wake_fd: int,
    ) -> None:
        self._arenas, self._versions, self._parities = arenas, versions, parities
        self._wake_fd = wake_fd
        self._readers: deque[Future[ListedMemory]] = deque()

    @contextlib.contextmanager
    def entries(self) -> Iterator[MemoryEntries]:
        """Yield what is held now; no arena is closed or overwritten by a peer meanwhile."""
        versions: list[HeldVersion] = []
        for number, version in self._versions.items():
            arena = self._arenas[number]
            if arena.stamp == version.stamp and not version.full:
                version.full = _with_digests(version.manifest, arena)
            if arena.stamp == version.stamp and version.full:  # else it is being overwritten
                versions.append(HeldVersion(manifest=version.full, arena=number))
        parities: list[VersionParity] = []
        with contextlib.ExitStack() as locks:
            locks.enter_context(self.receiver.change)
            copies = self.receiver.copies
            arenas = {**self._arenas, **{copy.number: copy.arena for copy in copies}}
            versions += [
                HeldVersion(manifest=c.manifest, arena=c.number) for c in copies if c.manifest
            ]
            if self._parities:
                locks.enter_context(self._parities.change)
                for parity, arena in self._parities.complete:
                    parities.append(parity)
                    arenas[parity.arena] = arena
            yield MemoryEntries(versions, parities, arenas)

    def ask(self) -> ListedMemory:
        """Return the contents, with memory that the caller closes, from any thread.

        Raises StorageError if the main thread does not answer.
        """
        reader: Future[ListedMemory] = Future()
        self._readers.append(reader)
        os.eventfd_write(self._wake_fd, 1)
        try:
            return reader.result(COPY_S)
        except TimeoutError as error:
            raise StorageError("the keeper does not list its contents") from error

    def answer(self) -> None:
        """Answer all readers; called when the main thread was woken."""
        while self._readers:
            reader = self._readers.popleft()
            with self.entries() as (versions, parities, arenas):
                memories = {
                    number: Unmapped(os.dup(arena.fd), arena.size_bytes)
                    for number, arena in arenas.items()
                }
            reader.set_result(ListedMemory(versions, parities, memories))


def _with_digests(manifest: Manifest, arena: Arena) -> Manifest:
    shard = arena.view[: manifest.size_bytes]
    chunks = tuple(
        digest_of(shard[at : at + manifest.chunk_bytes])
        for at in range(0, manifest.size_bytes, manifest.chunk_bytes)
    )
    return msgspec.structs.replace(manifest, chunks=chunks)
