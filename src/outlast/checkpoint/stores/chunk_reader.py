"""Chunks of shards, read in parallel and checked against their digests."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import xxhash

from outlast.checkpoint.format.manifests import ITEM_BYTES, Manifest, digest_of, frozen_name
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.stores.io_limits import IoThread, await_thread
from outlast.checkpoint.stores.store_interfaces import MemorySource, StoreSource
from outlast.errors import CorruptionError, StorageError

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
    found = (chunk.tensors for chunk in chunks_of(manifest) if chunk.file == file)
    names = dict.fromkeys(name for names in found for name in names)
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
        f"{where}: {chunk.title} does not match its digest; nothing was taken over from it"
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
