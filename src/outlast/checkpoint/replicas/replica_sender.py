"""Copies or parity strips sent to other keepers' memory, one thread a peer.

Locks: `_PeerThread._change` (its queue and links), `SentVersion._digesting` (the first reader
computes the digests) and `SentVersion._lock` (its count of peers). None is held while another is
taken, nor during a transfer.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

import msgspec
import xxhash

from outlast.checkpoint.format.manifests import Manifest, digest_of, seal
from outlast.checkpoint.keeper.arena import Arena
from outlast.checkpoint.keeper.keeper_frames import Outcome, PeerKeeper, SaveOrder
from outlast.checkpoint.replicas.group_parity import Strip, cut_strip, other_members, strip_bytes
from outlast.checkpoint.replicas.keeper_links import (
    COPY_S,
    SLICE_BYTES,
    Join,
    KeeperLink,
    Kept,
    Offer,
    Ready,
    Sealed,
)
from outlast.checkpoint.stores.chunk_reader import RateLimiter
from outlast.errors import WireError

LANES = 2
BYTES_PER_S_MIN = 50e6  # a slower transfer is aborted


class _PeerLostError(Exception):
    """The version was overwritten, or the keeper ends; this is not reported."""


class SentVersion:
    """A version in an arena (while its stamp is `stamp`) that is being sent to peers.

    `report` is called once, from any thread, with the number of holders and the errors of others;
    `on_digested` gets the manifest with chunks as soon as they are known.
    """

    def __init__(
        self,
        order: SaveOrder,
        arena: Arena,
        stamp: int,
        report: Callable[[Outcome], None],
        on_digested: Callable[[Manifest], None],
    ) -> None:
        manifest = order.manifest
        self._begun = time.monotonic()
        self.due = self._begun + COPY_S + manifest.size_bytes / BYTES_PER_S_MIN
        self._order, self._arena, self._stamp = order, arena, stamp
        self.rank = manifest.rank
        self._view: memoryview | None = arena.view[: manifest.size_bytes]  # keeps the memory
        self._report = report
        self._on_digested = on_digested
        self._lock, self._digesting = threading.Lock(), threading.Lock()
        self._digested: Manifest | None = None
        self._remaining = self._holders = self._strips = 0
        self._errors: list[str] = []

    def set_peers(self, count: int, strips: int = 0) -> None:
        """Set the number of peers, and of those that get strips."""
        self._remaining, self._strips = count, strips

    def check(self) -> None:
        """Raise _PeerLostError where the version may have been overwritten."""
        if self._view is None or self._arena.stamp != self._stamp:
            raise _PeerLostError

    def piece(self, begin: int, end: int) -> memoryview:
        """Return bytes of the version. Raises as `check` does."""
        self.check()
        assert self._view is not None
        return self._view[begin:end]

    def parcel(self, group: tuple[int, ...], holder: int) -> ReplicaParcel:
        """Return the parcel for the keeper of `holder`: a strip in a group, else the version."""
        manifest, arena_bytes = self._order.manifest, self._arena.size_bytes
        strip = Strip(0, manifest.size_bytes)
        if group:
            strip = cut_strip(group, manifest.rank, holder, manifest.size_bytes)
            arena_bytes = strip_bytes(arena_bytes, len(group))
        size_bytes = strip.end - strip.begin
        offer = Offer(
            copy=secrets.token_hex(8),
            lanes=max(1, min(LANES, -(-size_bytes // manifest.chunk_bytes))),
            rank=manifest.rank,
            size_bytes=size_bytes,
            chunk_bytes=manifest.chunk_bytes,
            arena_bytes=arena_bytes,
            place=manifest.place if group else None,
        )
        return ReplicaParcel(self, offer, strip.begin)

    def full(self, chunks: tuple[str, ...]) -> Manifest:
        """Return the manifest with digests, after all chunks were read unchanged."""
        self.check()
        full = msgspec.structs.replace(self._order.manifest, chunks=chunks)
        self._on_digested(full)
        return full

    def digested(self) -> Manifest:
        """Return the manifest with digests; the first caller computes them."""
        with self._digesting:
            if not self._digested:
                size_bytes, step = self._order.manifest.size_bytes, self._order.manifest.chunk_bytes
                chunks = [
                    digest_of(self.piece(at, min(at + step, size_bytes)))
                    for at in range(0, size_bytes, step)
                ]
                self._digested = self.full(tuple(chunks))
            return self._digested

    def peer_done(self, is_held: bool, error: str = "") -> None:
        """Record that one peer has succeeded or failed; the last one reports."""
        with self._lock:
            self._remaining -= 1
            self._holders += is_held
            self._errors += [error] if error else []
            if self._remaining:
                return
            self._view = None
        order = self._order
        self._report(
            Outcome(
                save=order.save,
                place=order.manifest.place,
                kind="copied",
                copies=self._holders,
                strips=self._strips,
                error="; ".join(self._errors),
                size_bytes=order.manifest.size_bytes,
                seconds=time.monotonic() - self._begun,
            )
        )


class ReplicaParcel:
    """The bytes of a version for one peer, from `begin` on, as in `offer`."""

    def __init__(self, version: SentVersion, offer: Offer, begin: int) -> None:
        self.offer = offer
        self._version, self._begin = version, begin
        self._digests = [""] * len(offer.chunks())

    def send_chunk(self, link: KeeperLink, at: int) -> None:
        """Send and digest a chunk, slice by slice."""
        end = min(at + self.offer.chunk_bytes, self.offer.size_bytes)
        state = xxhash.xxh3_128()
        for begin in range(at, end, SLICE_BYTES):
            last = min(begin + SLICE_BYTES, end)
            piece = self._version.piece(self._begin + begin, self._begin + last)
            state.update(piece)
            link.send_bytes(piece)
        self._digests[at // self.offer.chunk_bytes] = state.hexdigest()

    def sealed(self) -> Sealed:
        """Return the final frame, after all chunks were sent."""
        digests = tuple(self._digests)
        if self.offer.place:
            return Sealed(record=seal(self._version.digested()), strip=digests)
        return Sealed(record=seal(self._version.full(digests)))


class ReplicaSender:
    """Sends versions to all peers in parallel: strips in a `group`, else copies.

    A slow peer gets fewer versions, and delays no other.
    """

    def __init__(
        self,
        peers: tuple[PeerKeeper, ...],
        token: str,
        rank: int = 0,
        group: tuple[int, ...] = (),
        bytes_per_s: int | None = None,
    ) -> None:
        pace = RateLimiter(bytes_per_s, threading.Event()) if bytes_per_s else None
        holders = other_members(group, rank) if group else range(len(peers))
        self._strips = len(peers) if group else 0
        self._peer_threads = [
            _PeerThread(peer, token, pace, group, holder)
            for peer, holder in zip(peers, holders, strict=True)
        ]

    def add(self, version: SentVersion) -> None:
        """Send a version at once; peers skip an earlier one that they have not begun."""
        version.set_peers(len(self._peer_threads), self._strips)
        for courier in self._peer_threads:
            courier.add(version)

    def stop(self) -> None:
        """Stop all transfers."""
        for courier in self._peer_threads:
            courier.stop()


class _PeerThread:
    """The thread that serves one peer."""

    def __init__(
        self,
        peer: PeerKeeper,
        token: str,
        pace: RateLimiter | None,
        group: tuple[int, ...],
        holder: int,
    ) -> None:
        self._peer, self._token, self._pace = peer, token, pace
        self._group, self._holder = group, holder
        self._waiting: dict[int, SentVersion] = {}  # by rank: its own, and absent ones
        self._stopped = False
        self._links: list[KeeperLink] = []
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"to {peer.name}", daemon=True)
        self._thread.start()

    def add(self, version: SentVersion) -> None:
        with self._change:
            skipped = self._waiting.pop(version.rank, None)
            self._waiting[version.rank] = version
            self._change.notify_all()
        if skipped:
            skipped.peer_done(is_held=False)

    def stop(self) -> None:
        with self._change:
            self._stopped = True
            for link in self._links:
                link.cut()
            self._change.notify_all()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                version = self._waiting.pop(next(iter(self._waiting)))
            is_held, error = False, ""
            try:
                self._send(version)
                is_held = True
            except _PeerLostError:
                pass
            except (OSError, WireError) as failure:
                reason = getattr(failure, "strerror", None) or str(failure)
                error = f"{self._peer.name} at {self._peer.address}: {reason}"
            except Exception as failure:  # noqa: BLE001 - any error is reported to the trainer, and later copies are made
                error = f"{self._peer.name} at {self._peer.address}: {failure!r}"
            finally:
                with self._change:
                    for link in self._links:
                        link.close()
                    self._links.clear()
            version.peer_done(is_held, error)

    def _send(self, version: SentVersion) -> None:
        """Send a version; return once the peer holds it.

        Raises OSError, WireError or _PeerLostError.
        """
        version.check()
        parcel = version.parcel(self._group, self._holder)
        offer = parcel.offer
        links = [self._open(version)]
        links[0].send(offer)
        # The first allocation of memory takes a while.
        answer = links[0].receive(COPY_S)
        if offer.place and answer == Kept():
            return  # a predecessor of this keeper has sent it
        self._expect(answer, Ready)
        for lane in range(1, offer.lanes):
            links.append(self._open(version))
            links[lane].send(Join(copy=offer.copy, lane=lane))
        self._send_chunks(parcel, links)
        links[0].send(parcel.sealed())
        self._expect(links[0].receive(COPY_S), Kept)

    def _send_chunks(self, parcel: ReplicaParcel, links: list[KeeperLink]) -> None:
        """Send all lanes in parallel. The first error ends all lanes, and is raised."""
        failures: list[BaseException] = []

        def send(lane: int) -> None:
            try:
                for at in parcel.offer.chunks(lane, len(links)):
                    parcel.send_chunk(links[lane], at)
            except BaseException as failure:  # noqa: BLE001 - raised below, in the thread that waits
                failures.append(failure)
                for link in links:
                    link.cut()

        threads = [threading.Thread(target=send, args=(n,)) for n in range(1, len(links))]
        for thread in threads:
            thread.start()
        send(0)
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _open(self, version: SentVersion) -> KeeperLink:
        link = KeeperLink.open(self._peer.address, self._token, version.due, self._pace)
        with self._change:
            self._links.append(link)
            if self._stopped:
                raise _PeerLostError
        return link

    def _expect(self, frame: object, kind: type[Ready | Kept]) -> None:
        if isinstance(frame, Kept) and frame.error:
            raise WireError(frame.error)
        if not isinstance(frame, kind):
            raise WireError(f"it sent {type(frame).__name__} instead of {kind.__name__}")
