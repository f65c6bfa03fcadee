"""Checkpoints written as a stream in this process, for imports and DCP saves.

A training run saves through the keeper; here no step waits, and the input may exceed memory.
"""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
import xxhash

from outlast.checkpoint.format.manifests import (
    CHUNK_BYTES,
    COMMIT,
    ITEM_BYTES,
    STEPS_MAX,
    Blob,
    Commit,
    Manifest,
    ManifestEntry,
    SavePoint,
    Tensor,
    TensorPiece,
    digest_of,
    manifest_name,
    seal,
    shard_name,
)
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.interop.foreign_entries import SHARED, empty_rank_state, shared_of
from outlast.checkpoint.interop.foreign_layouts import OBJECT
from outlast.checkpoint.stores.catalog import lineage_of
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.errors import CodecError, CorruptionError, OutlastError, StorageError, UsageError

_PAGE_BYTES = 4096
PartBytes = bytes | memoryview


class StreamItem(NamedTuple):
    """A box of a tensor to be written to a shard. `parts`: yields its bytes in C order."""

    name: str
    tensor: Tensor
    box: Box
    parts: Callable[[], Iterable[PartBytes]]

    @property
    def size_bytes(self) -> int:
        """Return the size of the box in bytes."""
        return self.box.elements * ITEM_BYTES[self.tensor.dtype]


class StreamSave(NamedTuple):
    """The properties of a save that are equal on all ranks."""

    job: str
    place: SavePoint
    world: int
    plan: str
    parent: str = ""
    base: str = ""


class WrittenPart(NamedTuple):
    """A rank's durable part. `size_bytes`: of its shard."""

    entry: ManifestEntry
    size_bytes: int


def new_save(store: Store, job: str, step: int, world: int, plan: str) -> StreamSave:
    """Return a save at `step` that is newer than all in the store, also at the same step.

    Raises UsageError for a step outside of the range of directory names; StorageError where the
    store cannot be listed.
    """
    if not 0 <= step <= STEPS_MAX:
        raise UsageError(f"step {step}: a checkpoint is of step 0 to 10^18 - 1; nothing was saved")
    place, parent, base = lineage_of(store).go_on(step, step, secrets.token_hex(8))
    return StreamSave(job, place, world, plan, parent, base)


def plan_of(divided: Iterable[tuple[int, str, Box]]) -> str:
    """Return the digest of the division of work: rank, name, box."""
    return digest_of(msgspec.json.encode([(rank, name, *box) for rank, name, box in divided]))


def write_part(
    store: Store,
    save: StreamSave,
    rank: int,
    items: Sequence[StreamItem],
    blobs: Mapping[str, bytes],
) -> WrittenPart:
    """Write one rank's shard and manifest; both are durable when this returns.

    Raises StorageError where they cannot be written, and errors of `parts`; CorruptionError for an
    item whose parts are not as long as its box.
    """
    pieces, blob_table, size_bytes = _lay_out(items, blobs)
    directory, shard = save.place.directory, shard_name(rank)
    digests: list[str] = []
    stream = _digested(_padded(items, pieces, blob_table, blobs, size_bytes), digests)
    store.put(directory, shard, stream, size_bytes)
    manifest = seal(
        Manifest(
            job=save.job,
            place=save.place,
            rank=rank,
            world=save.world,
            shard=shard,
            size_bytes=size_bytes,
            chunk_bytes=CHUNK_BYTES,
            chunks=tuple(digests),
            plan=save.plan,
            tensors={item.name: item.tensor for item in items},
            pieces=tuple(pieces.values()),
            blobs=blob_table,
        )
    )
    name = manifest_name(rank)
    store.put(directory, name, [manifest], len(manifest))
    return WrittenPart(ManifestEntry(rank, name, len(manifest), digest_of(manifest)), size_bytes)


def commit(store: Store, save: StreamSave, written: Sequence[WrittenPart], by: str) -> None:
    """Make the checkpoint exist. `by`: name of the writer, for people.

    Raises StorageError, also where this attempt has been committed before.
    """
    record = Commit(
        job=save.job,
        place=save.place,
        world=save.world,
        time_ns=time.time_ns(),
        plan=save.plan,
        size_bytes=sum(part.size_bytes for part in written),
        manifests=tuple(sorted((part.entry for part in written), key=lambda entry: entry.rank)),
        origin={"outlast": version("outlast"), "host": platform.node(), "by": by},
        parent=save.parent,
        base=save.base,
    )
    if not store.create(save.place.directory, COMMIT, seal(record)):
        raise StorageError(f"{store.where}/{save.place.directory} has been committed before")
    store.point(save.place.directory)


def _lay_out(
    items: Sequence[StreamItem], blobs: Mapping[str, bytes]
) -> tuple[dict[int, TensorPiece], tuple[Blob, ...], int]:
    """Return the piece of each non-empty item by index, the blobs, and the length."""
    pieces: dict[int, TensorPiece] = {}
    at = 0
    for index, item in enumerate(items):
        if item.size_bytes:
            large = item.size_bytes >= _PAGE_BYTES
            at = _up(at, _PAGE_BYTES if large else ITEM_BYTES[item.tensor.dtype])
            pieces[index] = TensorPiece(item.name, item.box.start, item.box.size, at)
            at += item.size_bytes
    blob_table: list[Blob] = []
    for name, data in blobs.items():
        blob_table.append(Blob(name, at, len(data)))
        at += len(data)
    return pieces, tuple(blob_table), _up(at, _PAGE_BYTES)


def _up(at: int, unit: int) -> int:
    return -(-at // unit) * unit


def _padded(
    items: Sequence[StreamItem],
    pieces: Mapping[int, TensorPiece],
    blob_table: Sequence[Blob],
    blobs: Mapping[str, bytes],
    size_bytes: int,
) -> Iterator[PartBytes]:
    """Yield the bytes of the shard in order, with padding."""
    at = 0
    for index, piece in pieces.items():
        yield bytes(piece.at - at)
        at, end = piece.at, piece.at + items[index].size_bytes
        for part in items[index].parts():
            at += memoryview(part).nbytes
            yield part
        if at != end:
            raise CorruptionError(f"{piece.name} has {at - end} bytes too many; nothing was kept")
    for blob in blob_table:
        yield bytes(blob.at - at)
        yield blobs[blob.name]
        at = blob.at + blob.size_bytes
    yield bytes(size_bytes - at)


def _digested(parts: Iterable[PartBytes], digests: list[str]) -> Iterator[PartBytes]:
    """Yield the same parts; `digests` gets the digest of each chunk of them."""
    digest, room = xxhash.xxh3_128(), CHUNK_BYTES
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest:
            head, rest = rest[:room], rest[room:]
            digest.update(head)
            room -= len(head)
            if not room:
                digests.append(digest.hexdigest())
                digest, room = xxhash.xxh3_128(), CHUNK_BYTES
        yield part
    if room < CHUNK_BYTES:
        digests.append(digest.hexdigest())


class ImportedCheckpoint(NamedTuple):
    """A checkpoint that was imported. `skipped`: objects left out, by name, with the reason."""

    place: SavePoint
    tensors: tuple[str, ...]
    objects: tuple[str, ...]
    skipped: Mapping[str, str]


def import_items(
    store: Store,
    items: Sequence[StreamItem],
    objects: Mapping[str, Any],
    *,
    step: int,
    job: str,
    by: str,
    skipped: Mapping[str, str] | None = None,
) -> ImportedCheckpoint:
    """Write and commit a checkpoint of these tensors and plain values.

    Raises errors of `write_part` and `commit`; the directory is removed then. Raises CodecError for
    a tensor with the name of a DCP object, which DCP's planner would unpickle at a load.
    """
    if forged := next((item.name for item in items if item.name.startswith(OBJECT)), ""):
        raise CodecError(
            f"{forged} is a tensor whose name is reserved for objects that torch unpickles;"
            " nothing was written; leave it out, or rename it"
        )
    save = new_save(store, job, step, 1, plan_of((0, item.name, item.box) for item in items))
    place = save.place
    names = tuple(dict.fromkeys(item.name for item in items))
    blobs = {SHARED: shared_of(names, objects), "own": empty_rank_state()}
    try:
        commit(store, save, [write_part(store, save, 0, items, blobs)], by)
    except BaseException:  # Ctrl-C as well: nothing half stays
        with suppress(OutlastError):  # the first error is the one to report
            store.remove(place.directory)
        raise
    return ImportedCheckpoint(place, names, tuple(objects), skipped or {})
