"""Copies received from other keepers, each chunk verified.

Two arenas for each sender: the previous version stays complete until the next one is. Strips are
folded into parity.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from outlast.checkpoint.format.manifests import Manifest, unseal
from outlast.checkpoint.keeper.arena import Arena
from outlast.checkpoint.replicas.group_parity import HeldParities
from outlast.checkpoint.replicas.keeper_links import (
    COPY_S,
    SLICE_BYTES,
    STALL_S,
    Join,
    KeeperLink,
    Kept,
    ListRequest,
    Offer,
    ReadRequest,
    Ready,
    Sealed,
)
from outlast.checkpoint.replicas.remote_copies import ListedMemory, serve_reader
from outlast.checkpoint.replicas.replica_sender import BYTES_PER_S_MIN, LANES
from outlast.errors import CorruptionError, StorageError, WireError

CONNECTIONS_MAX = 512  # of senders, and of readers on other hosts
SENDERS_MAX = 15  # with two arenas each, and a trainer's own, they fit a frame's descriptors
_CHUNK_BYTES_MAX = 1 << 30


class ReplicaDestination(Protocol):
    """Destination of a version, or of a strip of it."""

    def pieces(self, at: int, end: int) -> Iterator[memoryview]:
        """Yield memory for these bytes, in order; each is consumed on the next iteration.

        Raises WireError where the version is void.
        """
        ...

    def keep(self, manifest: Manifest) -> None:
        """Accept the version, which was received and verified. Raises WireError as above."""

    def abandon(self, why: str) -> None:
        """Discard an incomplete or damaged transfer."""


@dataclass(eq=False)
class ReplicaCopy:
    """An arena for one sender's versions. `manifest`: of the complete version in it."""

    number: int
    arena: Arena
    manifest: Manifest | None = None

    def pieces(self, at: int, end: int) -> Iterator[memoryview]:
        """Yield slices of the arena."""
        for begin in range(at, end, SLICE_BYTES):
            yield self.arena.view[begin : min(begin + SLICE_BYTES, end)]

    def keep(self, manifest: Manifest) -> None:
        """Record the manifest of the complete version."""
        self.manifest = manifest

    def abandon(self, why: str) -> None:
        """Do nothing: it has no manifest yet."""


@dataclass(eq=False)
class _Transfer:
    """An incoming version. `links` are cut when a newer version of the same rank is offered."""

    offer: Offer
    due: float
    links: list[KeeperLink]
    into: ReplicaDestination | None = None
    digests: list[str] = field(default_factory=list[str])
    lanes_left: set[int] = field(default_factory=set[int])
    joined: set[int] = field(default_factory=set[int])
    error: str = ""
    over: bool = False


class ReplicaReceiver:
    """Receives copies from other ranks' keepers, or strips for `parities`.

    Numbers of its arenas are below zero.
    """

    def __init__(
        self,
        token: str,
        parities: HeldParities | None = None,
        contents: Callable[[], ListedMemory] | None = None,
    ) -> None:
        """`contents`: returns all memory of the keeper, for readers; from any thread."""
        self._token = token
        self._parities = parities
        self._contents = contents
        self.change = threading.Condition(threading.RLock())  # held while `copies` are read
        self._copies: dict[int, list[ReplicaCopy]] = {}  # by rank of the sender, at most two each
        self._transfers: dict[str, _Transfer] = {}
        self._numbers = itertools.count(-1, -1)
        self._connections = 0

    def accept(self, sock: socket.socket) -> None:
        """Serve a connection in a thread of its own; close it where there are too many."""
        with self.change:
            if self._connections >= CONNECTIONS_MAX:
                sock.close()
                return
            self._connections += 1
        threading.Thread(target=self._serve, args=(sock,), name="from a peer", daemon=True).start()

    @property
    def copies(self) -> list[ReplicaCopy]:
        """Return all arenas; the caller holds `change`."""
        return [copy for copies in self._copies.values() for copy in copies]

    def _serve(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(
                OSError, WireError
            ):  # the sender reports it to its own trainer
                link = KeeperLink.answer(sock, self._token)
                try:
                    self._dispatch(link)
                finally:
                    link.close()
        finally:
            with self.change:
                self._connections -= 1

    def _dispatch(self, link: KeeperLink) -> None:
        frame = link.receive()
        if isinstance(frame, Offer):
            self._receive_version(link, frame)
        elif isinstance(frame, Join):
            with self.change:
                transfer = self._transfers.get(frame.copy)
                if not transfer or transfer.error or frame.lane in transfer.joined:
                    raise WireError("a lane of an unknown transfer")
                if frame.lane not in transfer.lanes_left:
                    raise WireError("a lane that was not offered")
                transfer.joined.add(frame.lane)
                transfer.links.append(link)
            self._receive_lane(transfer, link, frame.lane)
        elif isinstance(frame, ListRequest | ReadRequest) and self._contents:
            serve_reader(link, frame, self._contents)
        else:
            raise WireError(f"{type(frame).__name__} as the first frame")

    # --- a transfer, in the thread of its first connection ----------------------------------

    def _receive_version(self, link: KeeperLink, offer: Offer) -> None:
        due = time.monotonic() + COPY_S + offer.size_bytes / BYTES_PER_S_MIN
        transfer = _Transfer(offer, due, [link])
        link.due = due
        try:
            _check(offer)
            if self._begin(transfer):
                link.send(Ready())
                self._receive_lane(transfer, link, 0)
                self._wait_for_lanes(transfer)
                frame = link.receive(STALL_S)
                if not isinstance(frame, Sealed):
                    raise WireError(f"{type(frame).__name__} instead of the manifest")
                self._accept_version(transfer, frame)
        except (CorruptionError, StorageError, WireError) as error:
            link.send(Kept(error=str(error)))
        else:
            link.send(Kept())
        finally:
            self._end(transfer)

    def _begin(self, transfer: _Transfer) -> bool:
        """Find memory for a transfer; return False if the version was received before."""
        offer, rank = transfer.offer, transfer.offer.rank
        transfer.digests = [""] * len(offer.chunks())
        transfer.lanes_left = set(range(offer.lanes))
        with self.change:
            for other in self._transfers.values():
                if other.offer.rank == rank:  # its sender has died, or aborted it
                    _abort(other, "a newer version was offered")
            if not self.change.wait_for(lambda: not self._receiving(rank), STALL_S):
                raise StorageError("an earlier copy of this rank has not ended")
            self._transfers[offer.copy] = transfer
        if bool(offer.place) != bool(self._parities):
            raise WireError("a strip where copies are held, or a copy where parity is")
        if self._parities:
            transfer.into = self._parities.begin(offer)
        else:
            transfer.into = self._copy(rank, offer.arena_bytes)
        return transfer.into is not None

    def _copy(self, rank: int, size_bytes: int) -> ReplicaCopy:
        """Return an arena for the rank; its version before the last is discarded."""
        with self.change:
            if rank not in self._copies and len(self._copies) >= SENDERS_MAX:
                raise StorageError(f"it holds copies of {SENDERS_MAX} other ranks already")
            copies = self._copies.setdefault(rank, [])
            old = copies[0] if len(copies) > 1 else None
            if old:
                old.manifest = None
            if old and old.arena.size_bytes < size_bytes:
                copies.remove(old)
                old.arena.close()
                old = None
        if not old:
            # Outside of the lock, since it is slow; this rank has only one transfer.
            old = ReplicaCopy(next(self._numbers), Arena.create(size_bytes))
            with self.change:
                copies.insert(0, old)
        return old

    def _receiving(self, rank: int) -> bool:
        return any(each.offer.rank == rank for each in self._transfers.values())

    def _receive_lane(self, transfer: _Transfer, link: KeeperLink, lane: int) -> None:
        """Receive and digest one lane's chunks."""
        into, offer = transfer.into, transfer.offer
        assert into
        link.due = transfer.due
        try:
            for at in offer.chunks(lane, offer.lanes):
                end = min(at + offer.chunk_bytes, offer.size_bytes)
                state = xxhash.xxh3_128()
                for piece in into.pieces(at, end):
                    link.receive_into(piece)
                    state.update(piece)
                transfer.digests[at // offer.chunk_bytes] = state.hexdigest()
        except (OSError, WireError) as error:
            with self.change:
                _abort(transfer, f"lane {lane}: {error}")
            raise
        finally:
            with self.change:
                transfer.lanes_left.discard(lane)
                self.change.notify_all()

    def _wait_for_lanes(self, transfer: _Transfer) -> None:
        with self.change:
            left_s = max(0.0, transfer.due - time.monotonic())
            self.change.wait_for(lambda: not transfer.lanes_left or transfer.error, left_s)
            if transfer.lanes_left or transfer.error:
                raise WireError(transfer.error or f"lanes {transfer.lanes_left} did not end")

    def _accept_version(self, transfer: _Transfer, sealed: Sealed) -> None:
        """Accept the version, if it matches the sent digests."""
        into, offer = transfer.into, transfer.offer
        assert into
        manifest = unseal(sealed.record, Manifest, f"the copy of rank {offer.rank}'s part")
        size_bytes, digests, part = manifest.size_bytes, manifest.chunks, manifest.shard
        if self._parities:
            strip = self._parities.strip(manifest)
            size_bytes, digests = strip.end - strip.begin, sealed.strip
            part = f"the strip from byte {strip.begin} of {part}"
        sealed_fields = (manifest.rank, size_bytes, manifest.chunk_bytes, len(digests))
        if sealed_fields != (offer.rank, offer.size_bytes, offer.chunk_bytes, len(offer.chunks())):
            raise WireError("the manifest is not of the version that was offered")
        wrong = [
            at
            for at, (local, sealed_fields) in enumerate(zip(transfer.digests, digests, strict=True))
            if local != sealed_fields
        ]
        if wrong:
            raise WireError(
                f"chunk {wrong[0]} of {part} arrived with other bytes than were sent"
                f" ({len(wrong)} of {len(digests)} did); the version before is kept"
            )
        with self.change:
            if transfer.error:
                raise WireError(transfer.error)
            into.keep(manifest)
            if copies := self._copies.get(manifest.rank):
                copies.sort(key=lambda each: each is into)  # the newest last
            transfer.over = True

    def _end(self, transfer: _Transfer) -> None:
        """End the transfer, once all its lanes have stopped writing."""
        with self.change:
            if not transfer.over:
                _abort(transfer, "the transfer was aborted")
                if transfer.into:
                    transfer.into.abandon(transfer.error)
            running = transfer.joined - {0}
            self.change.wait_for(lambda: not (running & transfer.lanes_left), STALL_S)
            transfer.over = True
            self._transfers.pop(transfer.offer.copy, None)
            self.change.notify_all()


def _check(offer: Offer) -> None:
    """Raise WireError for an inconsistent offer."""
    if (
        not 1 <= offer.lanes <= LANES
        or not 4096 <= offer.chunk_bytes <= _CHUNK_BYTES_MAX
        or not 0 <= offer.size_bytes <= offer.arena_bytes
        or offer.rank < 0
    ):
        raise WireError("an offer that contradicts itself")


def _abort(transfer: _Transfer, why: str) -> None:
    transfer.error = transfer.error or why
    for link in transfer.links:
        link.cut()
