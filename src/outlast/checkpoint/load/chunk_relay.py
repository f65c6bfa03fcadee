"""Relay of chunks that several ranks need along a chain of ranks.

Each rank has three kinds of threads for one pass, and buffers of one chunk each:

    readers    buffer -> chunks that this rank reads, in order, READ_AHEAD of them early
    run        buffer -> chunks that it receives, ARRIVING of them early: sent to the next rank,
                         digested, and passed to `take`
    returning  buffer <- waits until a chunk was sent

There is no deadlock: all ranks process chunks in the order of their numbers, so that the lowest
chunk in progress does not depend on any other chunk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import accumulate
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from outlast.checkpoint.format.manifests import ManifestEntry, digest_of
from outlast.checkpoint.load.relay_routes import Leg, Wants, legs_of, spans
from outlast.checkpoint.stores.chunk_reader import Chunk, allocate
from outlast.checkpoint.stores.store_interfaces import GET_BYTES_MAX
from outlast.errors import CorruptionError, GroupError, StalledError, StorageError

if TYPE_CHECKING:
    from outlast.checkpoint.rank_group import ChunkTransfer, RankGroup
    from outlast.checkpoint.stores.catalog import Checkpoint

READ_AHEAD = 2
ARRIVING = 4
_LOOK_S = 1.0
_DRAIN_S = 30.0

Key: TypeAlias = tuple[int, int]  # a shard's rank, and a chunk's number in it
OnChunk: TypeAlias = Callable[[Chunk, memoryview], None]


class _Item(Protocol):
    """Bytes with a digest: a chunk of a shard, a manifest."""

    @property
    def size_bytes(self) -> int:
        """Return its length in bytes."""
        ...

    @property
    def digest(self) -> str:
        """Return its digest."""
        ...


T = TypeVar("T", bound=_Item)


class ChunkRelay:
    """Passes in which ranks send each other records and chunks of one checkpoint.

    Between two calls of `close`, each rank calls `hand_on` any number of times: the first calls of
    all ranks are one pass, the second ones the next.
    """

    def __init__(self, ranks: RankGroup, chain: Sequence[int], checkpoint: Checkpoint) -> None:
        self._ranks, self._chain, self._checkpoint = ranks, chain, checkpoint

    def read_records(self) -> None:
        """Read all manifests, each on one rank. All ranks call it first.

        Raises CorruptionError and StorageError as if this rank had read all of them.
        """
        checkpoint = self._checkpoint
        entries = checkpoint.commit.manifests
        if not all(0 < entry.size_bytes <= GET_BYTES_MAX for entry in entries):
            return  # reading them reports the error
        records: dict[int, bytes] = {}

        def fetch(entry: ManifestEntry, into: memoryview) -> None:
            into[:] = checkpoint.record(entry)

        def take(entry: ManifestEntry, data: memoryview) -> None:
            records[entry.rank] = bytes(data)

        wants = [Wants([(0, len(entries))])] * self._ranks.world
        legs = legs_of(self._ranks.rank, self._chain, wants).relayed
        self._run([_RelayStop(leg, entries[leg.chunk]) for leg in legs], fetch, take)
        checkpoint.adopt([records[entry.rank] for entry in entries])

    @cached_property
    def _first(self) -> list[int]:
        """Return the number of each shard's first chunk."""
        counts = (len(manifest.chunks) for manifest in self._checkpoint.manifests)
        return list(accumulate(counts, initial=0))

    def hand_on(
        self, wanted: Iterable[Key], in_memory: Collection[Key], fetch: OnChunk, take: OnChunk
    ) -> list[Key]:
        """Call `take` with each wanted chunk that other ranks want too; return the others.

        `in_memory`: chunks that `fetch` has in memory. `fetch` reads a verified chunk, and is
        called in several threads at once; `take` in one. A chunk that arrives damaged is fetched by
        this rank. An error of `fetch` is raised once all chunks have been sent: the first one, in
        the order of chunks. Raises GroupError where a rank died.
        """
        numbers = {self._first[rank] + number: (rank, number) for rank, number in wanted}
        mine = spans(sorted(numbers))
        has = spans(sorted(number for number, key in numbers.items() if key in in_memory))
        legs = legs_of(self._ranks.rank, self._chain, self._exchange_wants(Wants(mine, has)))
        self._run([self._stop(leg, numbers) for leg in legs.relayed], fetch, take)
        return [numbers[number] for number in legs.alone]

    def close(self) -> None:
        """Wait until all ranks have called it: after its last pass, and after an error."""
        while not all(each.done for each in self._exchange_wants(Wants(done=True))):
            pass

    def _exchange_wants(self, wants: Wants) -> list[Wants]:
        answers = self._ranks.exchange(msgspec.msgpack.encode(wants))
        return [msgspec.msgpack.decode(answer, type=Wants) for answer in answers]

    def _stop(self, leg: Leg, numbers: dict[int, Key]) -> _RelayStop[Chunk]:
        rank, number = numbers[leg.chunk]
        return _RelayStop(leg, Chunk(self._checkpoint.manifests[rank], number))

    def _run(
        self,
        stops: Sequence[_RelayStop[T]],
        fetch: Callable[[T, memoryview], None],
        take: Callable[[T, memoryview], None],
    ) -> None:
        if not stops:
            return
        mine = _RelayPass(self._ranks, stops, fetch, take)
        self._supervise(mine)
        if mine.error:
            raise mine.error

    def _supervise(self, mine: _RelayPass[T]) -> None:
        """Run the pass, and check for failed ranks meanwhile."""
        thread = _start(mine.run)
        try:
            runs = True
            while runs:
                thread.join(_LOOK_S)
                runs = thread.is_alive()
                if mine.ended:
                    raise mine.ended
                if runs:
                    self._ranks.look()
        except BaseException as error:  # Ctrl-C as well
            mine.end(error)
            self._ranks.leave(error)
            thread.join(_DRAIN_S)
            if isinstance(error, GroupError):
                raise GroupError(
                    f"{error}; the state may be filled in part, and must not be used"
                ) from error
            raise


class _RelayStop(NamedTuple, Generic[T]):
    leg: Leg
    item: T


class _RelayBuffer(NamedTuple):
    memory: memoryview
    home: SimpleQueue[_RelayBuffer]  # queue to which it returns


class _ReadChunk(NamedTuple):
    """A chunk that was read or received, or the `error` of reading it.

    A failed chunk is sent as well: the receiver finds it damaged, and reads it itself.
    """

    buffer: _RelayBuffer
    error: Exception | None = None


class _RelayPass(Generic[T]):
    """One rank's part in one pass. `error`: of the first chunk that this rank could not read.

    `ended`: why the pass ends early, on all ranks. Then no chunk is read or taken; the buffers'
    contents are still sent, so that no thread of any rank stays in an operation of the group.
    """

    def __init__(
        self,
        ranks: RankGroup,
        stops: Sequence[_RelayStop[T]],
        fetch: Callable[[T, memoryview], None],
        take: Callable[[T, memoryview], None],
    ) -> None:
        self.error: Exception | None = None
        self.ended: BaseException | None = None
        self._ranks, self._stops, self._fetch, self._take = ranks, stops, fetch, take
        self._size = max(stop.item.size_bytes for stop in stops)
        self._coming = deque(stop for stop in stops if stop.leg.source is not None)
        self._posted: deque[tuple[_RelayBuffer, ChunkTransfer | None]] = deque()
        self._arriving = self._allocate_buffers(min(ARRIVING, len(self._coming)))
        own = [stop.item for stop in stops if stop.leg.source is None]
        self._reading = self._allocate_buffers(min(READ_AHEAD, len(own)))
        self._reads = deque((item, Future[_ReadChunk]()) for item in own)
        self._read = deque(future for _, future in self._reads)
        self._sending: SimpleQueue[tuple[_RelayBuffer, ChunkTransfer | None] | None] = SimpleQueue()

    def run(self) -> None:
        """Run the pass to its end; errors are recorded in `error` and `ended`."""
        with self._guarded():
            self._run()

    def _run(self) -> None:
        returning = _start(self._return_buffers)
        for _ in range(min(READ_AHEAD, len(self._reads))):
            _start(self._read_ahead)
        for leg, item in self._stops:
            self._post(needed=leg.source is not None)
            read = self._read.popleft().result() if leg.source is None else self._next_arrival()
            data = read.buffer.memory[: item.size_bytes]
            transfer = self._begin_transfer(self._ranks.send, data, leg.to, leg.chunk)
            with self._guarded():
                self._use(item, data, read.error, came=leg.source is not None)
            self._sending.put((read.buffer, transfer))
        self._sending.put(None)
        returning.join()

    def end(self, why: BaseException) -> None:
        """Stop reading and taking chunks."""
        self.ended = self.ended or why

    def _use(self, item: T, data: memoryview, error: Exception | None, *, came: bool) -> None:
        if came and not self.ended and digest_of(data) != item.digest:
            data = allocate(item.size_bytes)  # the buffer is being sent
            try:
                self._fetch(item, data)
            except (CorruptionError, StorageError) as why:
                error = why
        self.error = self.error or error
        if not self.ended and not error:
            self._take(item, data)

    def _post(self, *, needed: bool) -> None:
        """Post receives while buffers are free; if the next is `needed`, wait for a buffer."""
        while self._coming and not (self._arriving.empty() and (self._posted or not needed)):
            room = self._arriving.get()
            leg, item = self._coming.popleft()
            data = room.memory[: item.size_bytes]
            transfer = self._begin_transfer(self._ranks.receive, data, leg.source, leg.chunk)
            self._posted.append((room, transfer))

    def _next_arrival(self) -> _ReadChunk:
        room, transfer = self._posted.popleft()
        self._wait(transfer)
        return _ReadChunk(room)

    def _read_ahead(self) -> None:
        with suppress(IndexError):  # another thread has the last one
            while self._reads:
                room = self._reading.get()  # before a chunk: the lowest chunks get buffers
                item, future = self._reads.popleft()
                read = _ReadChunk(room)
                with self._guarded():
                    if not self.ended:
                        read = self._read_into(room, item)
                future.set_result(read)

    def _read_into(self, room: _RelayBuffer, item: T) -> _ReadChunk:
        try:
            self._fetch(item, room.memory[: item.size_bytes])
        except StalledError as error:  # the hanging read may still write there
            return _ReadChunk(_RelayBuffer(allocate(self._size), room.home), error)
        except (CorruptionError, StorageError) as error:
            return _ReadChunk(room, error)
        return _ReadChunk(room)

    def _return_buffers(self) -> None:
        """Return buffers once their chunks were sent."""
        while handed := self._sending.get():
            room, transfer = handed
            self._wait(transfer)
            room.home.put(room)

    def _begin_transfer(
        self,
        begin: Callable[[memoryview, int, int], ChunkTransfer],
        data: memoryview,
        peer: int | None,
        chunk: int,
    ) -> ChunkTransfer | None:
        with self._guarded():
            return None if peer is None else begin(data, peer, chunk)
        return None

    def _wait(self, transfer: ChunkTransfer | None) -> None:
        with self._guarded():
            if transfer:
                transfer.wait()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for `run`
            self.end(error)

    def _allocate_buffers(self, count: int) -> SimpleQueue[_RelayBuffer]:
        home: SimpleQueue[_RelayBuffer] = SimpleQueue()
        for _ in range(count):
            home.put(_RelayBuffer(allocate(self._size), home))
        return home


def _start(do: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread: it may wait for a rank that never answers."""
    thread = threading.Thread(target=do, name="relay", daemon=True)
    thread.start()
    return thread
