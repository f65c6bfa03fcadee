"""Contents of a keeper's memory, read over its link for other keepers: for readers on other hosts.

    reader                                keeper
    ListRequest              ->
                               <-         ListAnswer
    ReadRequest(arena, at, size) ->
                               <-         the bytes, without a frame; again and again

A connection that reads nothing for `IDLE_S` ends, and the reader opens another one. Bytes may have
been overwritten meanwhile: readers compare digests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from outlast.checkpoint.keeper.arena import Unmapped
from outlast.checkpoint.keeper.keeper_frames import HeldVersion, VersionParity
from outlast.checkpoint.replicas.keeper_links import (
    COPY_S,
    SLICE_BYTES,
    STALL_S,
    KeeperLink,
    ListAnswer,
    ListRequest,
    ReadRequest,
)
from outlast.errors import CorruptionError, StorageError, WireError

IDLE_S = 5.0
CONNECTION_S = 3600.0  # a connection ends after it, busy or not
REACH_S = 5.0  # for a keeper that has too many connections, or starts again
_PAUSE_S = 0.05


class ListedMemory(NamedTuple):
    """Versions and parities of a keeper, and its arenas by number, which the receiver closes."""

    versions: list[HeldVersion]
    parities: list[VersionParity]
    memories: dict[int, Unmapped]


def serve_reader(
    link: KeeperLink, first: ListRequest | ReadRequest, contents: Callable[[], ListedMemory]
) -> None:
    """Answer a reader until it is idle. Raises OSError, WireError."""
    listed = contents()
    link.due = time.monotonic() + CONNECTION_S
    try:
        request: object = first
        while True:
            if isinstance(request, ListRequest):
                sizes = [(number, each.size_bytes) for number, each in listed.memories.items()]
                link.send(
                    ListAnswer(versions=listed.versions, parities=listed.parities, arenas=sizes)
                )
            elif isinstance(request, ReadRequest):
                _send_bytes(link, request, listed.memories)
            else:
                raise WireError(f"{type(request).__name__} of a reader")
            request = link.receive(IDLE_S)
    finally:
        for memory in listed.memories.values():
            memory.close()


def _send_bytes(link: KeeperLink, request: ReadRequest, memories: dict[int, Unmapped]) -> None:
    memory = memories.get(request.arena)
    end = request.at + request.size_bytes
    if memory is None or not 0 <= request.at <= end <= memory.size_bytes:
        raise WireError(f"a read beyond arena {request.arena}")
    buffer = bytearray(min(SLICE_BYTES, request.size_bytes))
    for at in range(request.at, end, SLICE_BYTES):
        piece = memoryview(buffer)[: min(SLICE_BYTES, end - at)]
        try:
            memory.read(at, piece)
        except CorruptionError as error:
            raise WireError(str(error)) from error
        link.send_bytes(piece)


class RemoteKeeper:
    """A reader's end. Its calls may come from several threads, and take turns."""

    def __init__(self, address: str, token: str) -> None:
        self.address, self._token = address, token
        self._turn = threading.Lock()
        self._link: KeeperLink | None = None
        self._used_s = 0.0

    def contents(self) -> ListAnswer:
        """Return the contents of its memory. Raises StorageError if it cannot be reached."""
        until_s = time.monotonic() + REACH_S
        with self._turn:
            while True:
                try:
                    link = self._open()
                    link.send(ListRequest())
                    answer = link.receive(COPY_S)  # digests of unwritten versions are computed now
                    if not isinstance(answer, ListAnswer):
                        raise WireError(f"{type(answer).__name__} instead of its contents")
                except (OSError, WireError) as error:
                    self._drop()
                    has_closed = isinstance(error, ConnectionResetError)
                    if not has_closed or time.monotonic() > until_s:
                        raise StorageError(
                            f"the keeper at {self.address} cannot be read: {error}"
                        ) from error
                    time.sleep(_PAUSE_S)  # it may have too many connections
                else:
                    self._used_s = time.monotonic()
                    return answer

    def read(self, arena: int, at: int, into: memoryview) -> None:
        """Fill `into` from an arena. Raises CorruptionError if the keeper cannot be read."""
        until_s = time.monotonic() + REACH_S
        with self._turn:
            while True:
                try:
                    link = self._open()
                    link.send(ReadRequest(arena=arena, at=at, size_bytes=len(into)))
                    link.receive_into(into, STALL_S)
                except (OSError, WireError) as error:
                    self._drop()
                    if time.monotonic() > until_s:
                        raise CorruptionError(
                            f"the memory of the keeper at {self.address} cannot be read: {error}"
                        ) from error
                    time.sleep(_PAUSE_S)  # it may have too many connections
                else:
                    self._used_s = time.monotonic()
                    return

    def close(self) -> None:
        """Close the connection."""
        with self._turn:
            self._drop()

    def _open(self) -> KeeperLink:
        if self._link is not None and time.monotonic() > self._used_s + IDLE_S / 2:
            self._drop()  # the keeper is about to close it
        if self._link is None:
            due = time.monotonic() + CONNECTION_S
            self._link = KeeperLink.open(self.address, self._token, due)
            self._used_s = time.monotonic()
        return self._link

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


class RemoteMemory:
    """An arena of a remote keeper, read like a local one."""

    def __init__(self, keeper: RemoteKeeper, arena: int) -> None:
        self._keeper, self._arena = keeper, arena

    def read(self, at: int, into: memoryview) -> None:
        """See MemoryFile.read."""
        self._keeper.read(self._arena, at, into)

    def close(self) -> None:
        """Close the keeper's connection, which its arenas share."""
        self._keeper.close()
