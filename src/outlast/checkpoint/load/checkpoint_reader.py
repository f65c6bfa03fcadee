"""Verified reading of tensors from a checkpoint, into memory or in blocks.

From a store, chunks are read into page-aligned buffers, checked against their digests, and copied
to their targets: no unverified bytes reach a target. From memory they are copied straight to a
target that is one piece, and are digested there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outlast.checkpoint.format.manifests import ITEM_BYTES, Blob, Manifest, Tensor, TensorPiece
from outlast.checkpoint.format.tensor_boxes import Box, divide, overlap, runs
from outlast.checkpoint.stores.catalog import Checkpoint
from outlast.checkpoint.stores.chunk_reader import Chunk, fetch, gather, walk
from outlast.checkpoint.stores.store_interfaces import MemorySource, StoreSource
from outlast.errors import CorruptionError, MismatchError, StalledError, StorageError

if TYPE_CHECKING:
    from outlast.checkpoint.load.chunk_relay import ChunkRelay, Key, OnChunk

Array = np.ndarray[Any, np.dtype[Any]]
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
_LISTED_MAX = 20
_KEPT_MAX = 4


class ReadTarget(NamedTuple):
    """A region of a tensor and the array to fill.

    `into` has the box's shape and elements of the tensor's size, in this machine's byte order; any
    strides. Bits are copied: a uint16 array may hold a bfloat16 tensor.
    """

    name: str
    box: Box
    into: Array


class _Part(NamedTuple):
    """The part of one piece for one target: `hit`, in coordinates of the complete tensor."""

    piece: Box
    at: int
    hit: Box
    box: Box
    into: Array


class CheckpointReader:
    """Reads one checkpoint; chunks that are damaged there come from `mirrors`, in their order.

    Mirrors are stores with a checkpoint of the same place. `on_repair` gets a message for each
    chunk that came from one, from any thread. With a `relay` other ranks read the same checkpoint
    at the same time, and a chunk that several of them want is read by one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        mirrors: Sequence[StoreSource] = (),
        on_repair: Callable[[str], None] = lambda _: None,
        relay: ChunkRelay | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.relay = relay
        self._cached: dict[Key, bytes] = {}  # read for a blob; tensors lie there, too
        self._mirrors = mirrors
        self._on_repair = on_repair
        store = checkpoint.store
        self._memory = store if isinstance(store, MemorySource) and not mirrors else None

    def read(self, targets: Sequence[ReadTarget]) -> None:
        """Fill all targets.

        Before anything is changed: MismatchError lists every target that does not fit, and
        CorruptionError or StorageError reports unreadable records. Raises CorruptionError or
        StorageError naming file, chunk, bytes and tensors for a chunk that is damaged in all
        sources; the targets are then undefined. With a relay, all ranks call it as often as each
        needs, and then the relay's `close`, even after an error.
        """
        _refuse_differences(self.checkpoint, targets)
        plan = self._plan(targets)

        def take(chunk: Chunk, buffer: memoryview) -> None:
            for part in plan[chunk.manifest.rank, chunk.number]:
                _scatter(buffer, chunk.at, part)

        def straight(chunk: Chunk, buffer: memoryview) -> bool:
            parts = plan[chunk.manifest.rank, chunk.number]
            if self._memory is None or (rooms := _rooms(chunk, parts, buffer)) is None:
                return False
            gather(self._memory, chunk, rooms)
            return True

        self._deliver(sorted(plan), take, self.relay, straight)

    def blob(self, rank: int, name: str, *, by_all: bool = False) -> bytes:
        """Return the bytes of rank `rank`'s blob `name`.

        Raises MismatchError when there is none, CorruptionError or StorageError as `read` does.
        `by_all`: all ranks of the relay want it now.
        """
        manifest, blob = self._find(rank, name)
        data = bytearray(blob.size_bytes)

        def take(chunk: Chunk, buffer: memoryview) -> None:
            first, last = max(chunk.at, blob.at), min(chunk.at + len(buffer), blob.at + len(data))
            data[first - blob.at : last - blob.at] = buffer[first - chunk.at : last - chunk.at]
            if self.relay and len(self._cached) < _KEPT_MAX:
                self._cached[rank, chunk.number] = bytes(buffer)

        numbers = _numbers(manifest, blob.at, blob.at + blob.size_bytes)
        self._deliver([(rank, each) for each in numbers], take, self.relay if by_all else None)
        return bytes(data)

    def _deliver(
        self,
        wanted: list[Key],
        take: OnChunk,
        relay: ChunkRelay | None,
        straight: Callable[[Chunk, memoryview], bool] = lambda *_: False,
    ) -> None:
        """Call `take` with each chunk, complete and verified.

        `straight` may handle one without it, and then returns True.
        """
        if relay:
            wanted = relay.hand_on(wanted, self._cached, self._fetch, take)

        def read(chunk: Chunk, buffer: memoryview) -> None:
            if not straight(chunk, buffer):
                self._fetch(chunk, buffer)
                take(chunk, buffer)

        manifests = self.checkpoint.manifests
        walk((Chunk(manifests[rank], number) for rank, number in wanted), read)

    def _find(self, rank: int, name: str) -> tuple[Manifest, Blob]:
        for manifest in self.checkpoint.manifests[rank : rank + 1]:
            for blob in manifest.blobs:
                if blob.name == name:
                    return manifest, blob
        raise MismatchError(f"{self.checkpoint.where} has no blob {name!r} of rank {rank}")

    def _plan(self, targets: Sequence[ReadTarget]) -> dict[tuple[int, int], list[_Part]]:
        """Return the parts to copy from each chunk (rank, number): every element once."""
        plan: dict[tuple[int, int], list[_Part]] = {}
        pieces = _pieces(self.checkpoint.manifests, {target.name for target in targets})
        for target in targets:
            width = ITEM_BYTES[self.checkpoint.tensors[target.name].dtype]
            into = target.into.view(_BITS[width])
            uncovered = [target.box] if target.box.elements else []
            for manifest, piece in pieces.get(target.name, ()):
                box = Box(piece.start, piece.size)
                hits, uncovered = divide(uncovered, box)
                for hit in hits:
                    part = _Part(box, piece.at, hit, target.box, into)
                    for number in _numbers(manifest, *_span(part, width)):
                        plan.setdefault((manifest.rank, number), []).append(part)
                if not uncovered:
                    break
            if uncovered:
                raise CorruptionError(
                    f"{self.checkpoint.where}: no piece holds {target.name} from"
                    f" {uncovered[0].start}, {uncovered[0].size} elements; nothing was touched"
                )
        return plan

    def _fetch(self, chunk: Chunk, into: memoryview) -> None:
        """Fill `into` with the chunk, from the checkpoint itself or a mirror."""
        if cached := self._cached.get((chunk.manifest.rank, chunk.number)):
            into[:] = cached
            return
        try:
            fetch(self.checkpoint.store, chunk, into)
        except StalledError:
            raise  # the hanging read may still write to `into`
        except (CorruptionError, StorageError) as error:
            for mirror in self._mirrors:
                try:
                    fetch(mirror, chunk, into)
                except (CorruptionError, StorageError):
                    continue  # the first error is the one to report, if no mirror has it
                self._on_repair(f"{error}; it was read from {mirror.where} instead")
                return
            raise


def _refuse_differences(checkpoint: Checkpoint, targets: Iterable[ReadTarget]) -> None:
    differences = [
        difference for target in targets for difference in _differences(checkpoint, target)
    ]
    if differences:
        more = (
            [f"and {len(differences) - _LISTED_MAX} more"] if len(differences) > _LISTED_MAX else []
        )
        lines = "\n  ".join(differences[:_LISTED_MAX] + more)
        raise MismatchError(
            f"{checkpoint.where} does not fit; nothing was touched. Differences:\n  {lines}"
        )


def _differences(checkpoint: Checkpoint, target: ReadTarget) -> Iterator[str]:
    name, box, into = target
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        yield f"{name}: is not in the checkpoint"
        return
    if not box.within(tensor.shape):
        yield f"{name}: has shape {tensor.shape}; {box.size} from {box.start} is no part of it"
    if into.shape != box.size:
        yield f"{name}: {box.size} elements were wanted in an array of {into.shape}"
    if into.dtype.kind not in "biufc" or not into.dtype.isnative:
        yield f"{name}: an array of {into.dtype} cannot take bits"
    elif into.dtype.itemsize != ITEM_BYTES.get(tensor.dtype):
        yield f"{name}: is {tensor.dtype}; the array's elements have {into.dtype.itemsize} bytes"
    if not into.flags.writeable:
        yield f"{name}: the array cannot be written to"


def _pieces(
    manifests: Iterable[Manifest], names: set[str]
) -> dict[str, list[tuple[Manifest, TensorPiece]]]:
    pieces: dict[str, list[tuple[Manifest, TensorPiece]]] = {}
    for manifest in manifests:
        for piece in manifest.pieces:
            if piece.name in names:
                pieces.setdefault(piece.name, []).append((manifest, piece))
    return pieces


def _span(part: _Part, width: int) -> tuple[int, int]:
    """Return the shard's bytes from the first to behind the last copied element."""
    first = last = 0
    hit = part.hit.relative(part.piece)
    for start, size, whole in zip(hit.start, hit.size, part.piece.size, strict=True):
        first, last = first * whole + start, last * whole + start + size - 1
    return part.at + first * width, part.at + (last + 1) * width


def _numbers(manifest: Manifest, first: int, last: int) -> range:
    """Return the chunks that contain the bytes `first` to `last` (exclusive)."""
    return range(first // manifest.chunk_bytes, -(-last // manifest.chunk_bytes))


def _scatter(data: memoryview, chunk_at: int, part: _Part) -> None:
    """Copy a chunk's elements of a part to their target, run of memory by run of memory."""
    for offset, here in _runs(chunk_at, len(data), part):
        if hit := overlap(here, part.hit):
            source = np.frombuffer(data, part.into.dtype, here.elements, offset).reshape(here.size)
            into = part.into[(*hit.relative(part.box).slices, ...)]
            np.copyto(into, source[(*hit.relative(here).slices, ...)])


def _rooms(chunk: Chunk, parts: Iterable[_Part], spare: memoryview) -> list[memoryview] | None:
    """Return the destinations of a chunk's bytes, in order; unwanted bytes go to `spare`.

    None where a run of the chunk has no contiguous destination, or is wanted twice.
    """
    destinations: list[tuple[int, memoryview]] = []
    for part in parts:
        for offset, here in _runs(chunk.at, chunk.size_bytes, part):
            if hit := overlap(here, part.hit):
                into = part.into[(*hit.relative(part.box).slices, ...)]
                if hit != here or not into.flags.c_contiguous:
                    return None
                destinations.append((offset, into.reshape(-1).view(np.uint8).data))
    rooms: list[memoryview] = []
    at = 0
    for offset, room in sorted(destinations, key=itemgetter(0)):
        if offset < at:
            return None
        rooms += [spare[at:offset], room]
        at = offset + len(room)
    return [*rooms, spare[at:]]


def _runs(chunk_at: int, size_bytes: int, part: _Part) -> Iterator[tuple[int, Box]]:
    """Yield the runs of a part's piece in a chunk: offset in the chunk, box of the tensor."""
    width = part.into.dtype.itemsize
    first = max(0, (chunk_at - part.at) // width)
    last = min(part.piece.elements, (chunk_at + size_bytes - part.at) // width)
    offset = part.at + first * width - chunk_at
    for run in runs(part.piece.size, first, last):
        yield offset, run.moved(part.piece.start)
        offset += run.elements * width


BLOCK_BYTES = 64 << 20
# Types that NumPy copies bit by bit, by width.
_WIDTHS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class TensorBlock(NamedTuple):
    """A box of a tensor to be read."""

    name: str
    tensor: Tensor
    box: Box

    @property
    def size_bytes(self) -> int:
        """Return the size of the box in bytes."""
        return self.box.elements * ITEM_BYTES[self.tensor.dtype]


def blocks_of(name: str, tensor: Tensor, limit_bytes: int = BLOCK_BYTES) -> list[TensorBlock]:
    """Return the tensor as boxes of at most `limit_bytes`, in C order.

    An empty tensor is one empty box.
    """
    elements = max(1, limit_bytes // ITEM_BYTES[tensor.dtype])
    return [TensorBlock(name, tensor, box) for box in _boxes(tensor.shape, elements)]


def read_blocks(
    reader: CheckpointReader, blocks: Iterable[TensorBlock]
) -> Iterator[tuple[TensorBlock, memoryview]]:
    """Yield each block with its bytes in C order, valid until the next one is taken.

    Small ones are read together, since each costs at least a chunk. Raises as
    `CheckpointReader.read` does.
    """
    batch: list[TensorBlock] = []
    size_bytes = 0
    for block in blocks:
        if batch and size_bytes + block.size_bytes > BLOCK_BYTES:
            yield from _read_block(reader, batch)
            batch, size_bytes = [], 0
        batch.append(block)
        size_bytes += block.size_bytes
    yield from _read_block(reader, batch)


def _read_block(
    reader: CheckpointReader, batch: list[TensorBlock]
) -> Iterator[tuple[TensorBlock, memoryview]]:
    arrays: list[np.ndarray] = []
    for block in batch:
        width = _WIDTHS[ITEM_BYTES[block.tensor.dtype]]
        arrays.append(np.empty(block.box.size, width))
    reader.read(
        [ReadTarget(b.name, b.box, a) for b, a in zip(batch, arrays, strict=True) if a.size]
    )
    for block, array in zip(batch, arrays, strict=True):
        yield block, array.reshape(-1).view(np.uint8).data


def _boxes(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    if math.prod(shape) <= limit:
        yield Box.whole(shape)
        return
    row = math.prod(shape[1:])
    if row > limit:
        for index in range(shape[0]):
            for box in _boxes(shape[1:], limit):
                yield Box((index, *box.start), (1, *box.size))
        return
    for start in range(0, shape[0], limit // row):
        size = min(limit // row, shape[0] - start)
        yield Box((start, *(0,) * len(shape[1:])), (size, *shape[1:]))
