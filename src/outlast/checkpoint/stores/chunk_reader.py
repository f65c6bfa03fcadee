"""Chunks of shards, read in parallel within time limits and checked against their digests."""

from __future__ import annotations

import math
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock
from typing import NamedTuple, TypeVar, cast

import xxhash

from outlast.checkpoint.format.manifests import ITEM_BYTES, Manifest, digest_of, frozen_name
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.stores.store_interfaces import MemorySource, StoreSource
from outlast.errors import CorruptionError, StalledError, StorageError

T = TypeVar("T")
ANSWER_S = 120.0  # a restarted NFSv4 server does not answer for 90 s
_LOOK_S = 1.0


class IoThread(threading.Thread):
    """A thread for calls that may hang; a daemon, so that no process waits for it."""

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__(name="storage", daemon=True)
        self.given_up = False
        self.where = ""  # the path or directory of the call
        self.error: BaseException | None = None
        self.ended: Callable[[IoThread], None] = lambda _: None
        self._do = do
        self._lock = threading.Lock()
        self._answer_s = self._due = math.inf

    def run(self) -> None:
        """Run the call and keep its error for the thread that waits."""
        try:
            self._do()
        except BaseException as error:  # noqa: BLE001 - raised by `attend`, in the thread that waits
            self.error = error
        self.ended(self)

    @contextmanager
    def asking(self, where: str, answer_s: float) -> Iterator[None]:
        """Within, an answer about `where` is due after `answer_s`; then the old deadline restarts.

        Raises StalledError where this thread was given up.
        """
        before = self.where, self._answer_s
        self._ask(where, answer_s)
        try:
            yield
        finally:
            self._ask(*before)

    def give_up(self) -> StalledError | None:
        """Abandon the thread if its answer is overdue; return the error, else None."""
        with self._lock:
            if time.monotonic() < self._due:
                return None
            self.given_up = True
        return StalledError(
            f"{self.where}: the file system has not answered for {self._answer_s:g} s; see to its"
            " server or its mount, then try again"
        )

    def _ask(self, where: str, answer_s: float) -> None:
        with self._lock:
            if self.given_up:
                raise StalledError(f"{self.where}: answered after its caller had given up")
            self.where, self._answer_s = where, answer_s
            self._due = time.monotonic() + answer_s


def await_thread(hands: Sequence[IoThread], hurry: Callable[[], None] = lambda: None) -> None:
    """Start threads, and wait until each has ended, or was given up because it hangs.

    Raises the first error of any, StalledError for one that was given up. `hurry` is called after
    the first error; it should make the others end.
    """
    ended: SimpleQueue[IoThread] = SimpleQueue()
    running = set(hands)
    for hand in hands:
        hand.ended = ended.put
        hand.start()
    errors: list[BaseException] = []
    while running:
        try:
            hand = ended.get(timeout=_LOOK_S)
            outcomes = {hand: hand.error}
        except Empty:
            outcomes = {hand: error for hand in running if (error := hand.give_up())}
        except BaseException as error:  # noqa: BLE001 - Ctrl-C: raised once the others have ended
            outcomes = {None: error}
        running -= outcomes.keys()
        errors += filter(None, outcomes.values())
        if errors:
            hurry()
    if errors:
        raise errors[0]


class IoTimeout:
    """Timeout of calls to one file system: `answer_s` for each.

    A call that is given up stays behind in its thread. Until it returns, all other calls are
    refused at once: they would only pile up.
    """

    def __init__(self, answer_s: float) -> None:
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._asking: set[IoThread] = set()

    def call(self, where: str, do: Callable[[], T]) -> T:
        """Return the result of `do`, or raise its error.

        Raises StalledError, which names `where`, when the call is given up or was not begun.
        Arguments of an abandoned call may be modified at any later time.
        """
        hand = threading.current_thread()
        if isinstance(hand, IoThread):
            return self._ask(hand, where, do)
        answers: list[T] = []
        await_thread([IoThread(lambda: answers.append(self.call(where, do)))])
        return answers[0]

    def _ask(self, hand: IoThread, where: str, do: Callable[[], T]) -> T:
        with self._lock:
            owed = [hand.where for hand in self._asking if hand.given_up]
            if not owed:
                self._asking.add(hand)
        if owed:
            raise StalledError(
                f"{where}: was not tried: the file system still owes an answer about {owed[0]};"
                " check its server or its mount, then try again"
            )
        try:
            with hand.asking(where, self._answer_s):
                return do()
        finally:
            with self._lock:
                self._asking.discard(hand)


def call_in_thread(each: Iterator[T]) -> Iterator[T]:
    """Yield the items of `each`, whose production does not count against the timeout."""
    hand = threading.current_thread()
    assert isinstance(hand, IoThread)
    end = object()
    while True:
        with hand.asking(hand.where, math.inf):
            item = next(each, end)
        if item is end:
            return
        yield cast(T, item)


_BURST_S = 0.25
_RATE_CHECK_S = 0.1


class RateLimiter:
    """A limit in bytes a second (None: none), and an end that may come at any time.

    `stop` is set by the caller to end the copy; `end` is called when another thread has failed.
    """

    def __init__(self, limit_bytes_per_s: float | None, stop: Event) -> None:
        self._limit = limit_bytes_per_s
        self._stop = stop
        self._ended = Event()
        self._free_at = time.monotonic()
        self._lock = Lock()

    def spend(self, size_bytes: int) -> None:
        """Wait until `size_bytes` more may move. Raises StorageError once the copy is to end."""
        until = self._booked(size_bytes)
        while not (self._stop.is_set() or self._ended.is_set()):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            self._ended.wait(min(left_s, _RATE_CHECK_S))
        raise StorageError("the copy was stopped; what it has sent is used by the next one")

    def end(self) -> None:
        """Make every thread that calls `spend` end."""
        self._ended.set()

    def _booked(self, size_bytes: int) -> float:
        """Return the monotonic time from which they may move; unused rate is kept for _BURST_S."""
        if not self._limit:
            return 0.0
        with self._lock:
            earliest = time.monotonic() - _BURST_S
            self._free_at = max(self._free_at, earliest) + size_bytes / self._limit
            return self._free_at


THREADS = 4  # so that the disk always has a read to do while chunks are digested and copied
_NAMED_MAX = 8
_STEP_BYTES = 512 << 10


class Chunk(NamedTuple):
    """One chunk of a rank's shard."""

    manifest: Manifest
    number: int

    @property
    def at(self) -> int:
        """Return its first byte within the rank's shard."""
        return self.number * self.manifest.chunk_bytes

    @property
    def size_bytes(self) -> int:
        """Return its length; the last chunk of a shard may be shorter."""
        return min(self.manifest.chunk_bytes, self.manifest.size_bytes - self.at)

    @property
    def file(self) -> str:
        """Return the name of the file that contains it."""
        manifest = self.manifest
        return frozen_name(manifest.rank) if self.at < manifest.frozen_bytes else manifest.shard

    @property
    def offset(self) -> int:
        """Return its first byte within that file."""
        frozen_bytes = self.manifest.frozen_bytes
        return self.at - frozen_bytes if self.at >= frozen_bytes else self.at

    @property
    def digest(self) -> str:
        """Return its digest (XXH3-128, hexadecimal)."""
        return self.manifest.chunks[self.number]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors and (in brackets) blobs that overlap it."""
        end, names = self.at + self.size_bytes, dict[str, None]()
        for piece in self.manifest.pieces:
            width = ITEM_BYTES[self.manifest.tensors[piece.name].dtype]
            size = Box(piece.start, piece.size).elements * width
            if piece.at < end and piece.at + size > self.at:
                names[piece.name] = None
        for blob in self.manifest.blobs:
            if blob.at < end and blob.at + blob.size_bytes > self.at:
                names[f"({blob.name})"] = None
        return tuple(names)

    @property
    def title(self) -> str:
        """Return its number, bytes and contents, for messages."""
        names = self.tensors
        more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
        holds = f"holds {', '.join(names[:_NAMED_MAX])}{more}" if names else "holds padding"
        return f"chunk {self.number} (bytes {self.at} to {self.at + self.size_bytes}; {holds})"


def tensors_in(manifest: Manifest, file: str) -> tuple[str, ...]:
    """Return the names of the tensors that lie in one of a part's files, at least in part."""
    if not manifest.frozen_bytes:
        return tuple(dict.fromkeys(piece.name for piece in manifest.pieces))
    groups = (chunk.tensors for chunk in chunks_of(manifest) if chunk.file == file)
    names = dict.fromkeys(name for names in groups for name in names)
    return tuple(name for name in names if name in manifest.tensors)


def chunks_of(manifest: Manifest) -> list[Chunk]:
    """Return the chunks of a rank's shard, in order."""
    return [Chunk(manifest, number) for number in range(len(manifest.chunks))]


def fetch(source: StoreSource, chunk: Chunk, into: memoryview) -> None:
    """Fill `into` with a chunk that matches its digest.

    Raises CorruptionError or StorageError, which name file, chunk, bytes and tensors; the contents
    of `into` are then undefined.
    """
    if isinstance(source, MemorySource):
        gather(source, chunk, [into])
        return
    try:
        source.read(chunk.manifest.place.directory, chunk.file, chunk.offset, into)
    except (CorruptionError, StorageError) as error:
        raise type(error)(f"{error}; this is {chunk.title}") from error
    if digest_of(into) != chunk.digest:
        raise _differs(source, chunk)


def gather(memory: MemorySource, chunk: Chunk, rooms: Sequence[memoryview]) -> None:
    """Copy a chunk from memory straight to its destinations `rooms`, in order.

    The chunk is digested at its destination, in steps that fit into the processor's cache. If the
    bytes of one holder do not match, those of the next one replace them. Raises as `fetch` does.
    """
    directory, shard = chunk.manifest.place.directory, chunk.manifest.shard
    for holder in memory.holders(directory, shard):
        at, digest = chunk.at, xxhash.xxh3_128()
        try:
            for room in rooms:
                for begin in range(0, len(room), _STEP_BYTES):
                    step = room[begin : begin + _STEP_BYTES]
                    holder.read(at, step)
                    digest.update(step)
                    at += len(step)
        except (CorruptionError, StorageError):
            continue
        if digest.hexdigest() == chunk.digest:
            return
    raise _differs(memory, chunk)


def _differs(source: StoreSource, chunk: Chunk) -> CorruptionError:
    where = f"{source.where}/{chunk.manifest.place.directory}/{chunk.file}"
    return CorruptionError(
        f"{where}: {chunk.title} does not match its digest; nothing was loaded from it"
    )


def walk(chunks: Iterable[Chunk], do: Callable[[Chunk, memoryview], None]) -> None:
    """Call `do` with each chunk and a page-aligned buffer of its length, THREADS at a time.

    The first error ends it: no thread runs any more when this returns or raises, except threads
    that hang in a file system that does not answer; those then do nothing more.
    """
    pending = deque(chunks)
    room = max((chunk.size_bytes for chunk in pending), default=0)

    def work() -> None:
        buffer = allocate(room)
        while (chunk := _next(pending)) is not None:
            do(chunk, buffer[: chunk.size_bytes])

    # After an error or Ctrl-C the other threads end after their chunks.
    await_thread([IoThread(work) for _ in range(min(THREADS, len(pending)))], pending.clear)


def allocate(size_bytes: int) -> memoryview:
    """Return zeroed, page-aligned memory, in huge pages where available.

    Huge pages save time, since a read pins each page that it fills.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _next(pending: deque[Chunk]) -> Chunk | None:
    try:
        return pending.popleft()
    except IndexError:
        return None
