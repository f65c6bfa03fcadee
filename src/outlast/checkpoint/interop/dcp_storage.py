"""Outlast's format under torch.distributed.checkpoint: a storage reader and a storage writer.

    dcp.save(state, storage_writer=OutlastWriter(root, step))
    dcp.load(state, storage_reader=OutlastReader(root))

DCP plans, as it does for its own files; what was written is verified when it is read, and a save is
complete or does not exist.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from outlast.checkpoint.format import codec
from outlast.checkpoint.format.manifests import Tensor
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.format.value_encoder import DTYPES
from outlast.checkpoint.interop.foreign_entries import SHARED, Paths, encode_paths, paths_of
from outlast.checkpoint.interop.foreign_layouts import OBJECT, split_objects
from outlast.checkpoint.interop.stream_writer import (
    PartBytes,
    StreamItem,
    StreamSave,
    WrittenPart,
    commit,
    new_save,
    plan_of,
    write_part,
)
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader, ReadTarget
from outlast.checkpoint.stores.catalog import (
    Checkpoint,
    checkpoint_places,
    newest_checkpoint,
    open_checkpoint,
)
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.errors import CodecError, CorruptionError, UnsupportedError, UsageError


class _ItemOrder(NamedTuple):
    """The coordinator's order to a rank. `paths`: of all names, for rank 0; else none."""

    save: StreamSave
    rank: int
    paths: Paths


class OutlastWriter(StorageWriter):
    """Writes a save of DCP as a checkpoint of this format at `step`.

    Every save gets a directory of its own under `root`; nothing is overwritten, and nothing is a
    checkpoint before all ranks' parts are durable. For a further save with the same writer pass the
    step as `checkpoint_id`. Objects are stored as the bytes that DCP's planner made of them.
    `dcp.async_save` works as with DCP's own writer, in a thread or a process.
    """

    def __init__(self, root: Store | Path | str, step: int, job: str = "dcp") -> None:
        self._store = store_of(root)
        self._step = step
        self._job = job

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the step of the next save."""
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002 - DCP passes it
        *_: Any,
        **kwargs: Any,
    ) -> None:
        """Raise UnsupportedError for use_collectives=False: no rank could commit."""
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "with use_collectives=False no rank commits all parts as one checkpoint;"
                " nothing was saved; leave it out"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank's plan the order to write. Raises UnsupportedError for cached plans."""
        if not all(plan.usable for plan in plans):
            raise UnsupportedError(
                "enable_plan_caching repeats the plan of an earlier save with the directory that is"
                " in it; nothing was saved; turn it off"
            )
        divided = ((k, i.index.fqn, _box(i)) for k, plan in enumerate(plans) for i in plan.items)
        save = new_save(self._store, self._job, self._step, len(plans), plan_of(divided))
        paths: dict[str, tuple[str | int, ...]] = {}
        for plan in reversed(plans):  # where ranks differ the first one has it, as in DCP
            paths.update(plan.planner_data or {})
        return [
            replace(plan, storage_data=_ItemOrder(save, rank, {} if rank else paths))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard and manifest; both are durable then."""
        order: _ItemOrder = plan.storage_data
        items = [_item(item, planner) for item in plan.items]
        blobs = {} if order.rank else {SHARED: encode_paths(order.paths)}
        written = write_part(self._store, order.save, order.rank, items, blobs)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(""), written.size_bytes, (order.save, written))])
        return done

    def finish(
        self,
        metadata: Metadata,  # noqa: ARG002 - ours is in the manifests
        results: list[list[WriteResult]],
    ) -> None:
        """Commit the checkpoint."""
        parts: list[tuple[StreamSave, WrittenPart]] = [
            r.storage_data for rank in results for r in rank
        ]
        commit(self._store, parts[0][0], [written for _, written in parts], "DCP")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a step."""
        return str(checkpoint_id).isdecimal()


def store_of(root: Store | Path | str) -> Store:
    """Return the store at `root`: a Folder for a path, else `root` itself."""
    return Folder(Path(root)) if isinstance(root, str | Path) else root


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """Return the step of DCP's `checkpoint_id`. Raises UsageError for any other name."""
    if not str(checkpoint_id).isdecimal():
        raise UsageError(
            f"checkpoint_id is {str(checkpoint_id)!r} where a step is wanted; the directory of all"
            " checkpoints is the first argument of OutlastWriter and OutlastReader"
        )
    return int(str(checkpoint_id))


def _box(item: WriteItem) -> Box:
    if item.tensor_data is None:
        return Box((), ())
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _item(item: WriteItem, planner: SavePlanner) -> StreamItem:
    """Return an item of DCP's plan. Objects are resolved now, since their length is unknown."""
    name = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        data = planner.resolve_data(item)
        assert isinstance(data, io.BytesIO)
        payload = data.getvalue()
        tensor = Tensor("uint8", (len(payload),))
        return StreamItem(OBJECT + name, tensor, Box.whole(tensor.shape), lambda: [payload])
    assert item.tensor_data is not None
    dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CodecError(f"{name} is a tensor of {dtype}, which cannot be kept; nothing was saved")
    tensor = Tensor(dtype, tuple(item.tensor_data.size))
    return StreamItem(name, tensor, _box(item), partial(_parts, planner, item))


def _parts(planner: SavePlanner, item: WriteItem) -> Iterator[PartBytes]:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor) and item.tensor_data is not None
    planned = item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes
    if (tensor.dtype, tensor.shape) != planned:
        raise UsageError(
            f"{item.index.fqn} was planned as {planned[0]} {tuple(planned[1])} and is"
            f" {tensor.dtype} {tuple(tensor.shape)}; nothing was saved"
        )
    if tensor.layout is not torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
        raise CodecError(
            f"{item.index.fqn} is a {type(tensor).__qualname__} ({tensor.layout}), which has no"
            " plain bytes; nothing was saved; save the tensors that it consists of"
        )
    yield codec.raw(tensor.detach().resolve_conj().resolve_neg().cpu())


_STAGED_BYTES = 256 << 20
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_log = logging.getLogger(__name__)


class OutlastReader(StorageReader):
    """Reads a checkpoint of this format: one that DCP saved with `OutlastWriter`, or any other.

    It reads the newest undamaged one under `root`, or that of `step`; the constructor chooses it,
    so that a missing or damaged one is an error before DCP starts. Damaged chunks come from
    `mirrors`, stores with a copy of the checkpoint. Values are verified, then copied into the
    tensors of the state; where no copy is undamaged, CorruptionError names file, chunk and tensors.
    """

    def __init__(
        self, root: Store | Path | str, step: int | None = None, mirrors: Sequence[Store] = ()
    ) -> None:
        """Open the checkpoint.

        Raises UsageError where there is none, CorruptionError where that of `step` is damaged,
        StorageError where it cannot be read.
        """
        self._store = store_of(root)
        self._mirrors = mirrors
        self._reader = self._open(step)

    def _open(self, step: int | None) -> CheckpointReader:
        checkpoint = _find(self._store, step)
        if checkpoint is None:
            which = "" if step is None else f" of step {step}"
            raise UsageError(f"{self._store.where} has no whole checkpoint{which}")
        return CheckpointReader(checkpoint, self._mirrors, _log.warning)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Open the checkpoint of the step `checkpoint_id`."""
        if checkpoint_id is not None:
            self._reader = self._open(step_of(checkpoint_id))

    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return DCP's metadata; each tensor is one chunk, since any box of it can be read."""
        tensors, objects = split_objects(self._reader.checkpoint.tensors)
        paths = paths_of(self._reader)
        return Metadata(
            {name: _tensor_metadata(tensor) for name, tensor in tensors.items()}
            | dict.fromkeys(objects, BytesStorageMetadata()),
            planner_data={name: paths.get(name, (name,)) for name in [*tensors, *objects]},
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self._reader.checkpoint.where),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do nothing: the records contain all that is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the directory of the checkpoint to the plan."""
        return replace(plan, storage_data=self._reader.checkpoint.place.directory)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks opened the same checkpoint. Raises CorruptionError."""
        opened = [plan.storage_data for plan in plans]
        if len(set(opened)) > 1:
            other = next(rank for rank, place in enumerate(opened) if place != opened[0])
            raise CorruptionError(
                f"rank 0 found {opened[0]} as the newest checkpoint and rank {other} found"
                f" {opened[other]}; nothing was loaded; give the step"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify all items of the plan."""
        targets: list[ReadTarget] = []
        ready: list[tuple[ReadItem, torch.Tensor]] = []
        objects: list[tuple[ReadItem, np.ndarray]] = []
        staged: list[ReadItem] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                name = OBJECT + item.storage_index.fqn
                shape = self._reader.checkpoint.tensors[name].shape
                objects.append((item, np.empty(shape, np.uint8)))
                targets.append(ReadTarget(name, Box.whole(shape), objects[-1][1]))
            elif self._fits(item, into := planner.resolve_tensor(item).detach()):
                ready.append((item, into))
                targets.append(_target(item, into))
            else:
                staged.append(item)
        self._reader.read(targets)
        for item, into in ready:
            planner.commit_tensor(item, into)
        for item, array in objects:
            planner.load_bytes(item, io.BytesIO(array.tobytes()))
        for batch in self._batches(staged):
            self._read_staged(batch, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _dtype(self, item: ReadItem) -> torch.dtype:
        return DTYPES[self._reader.checkpoint.tensors[item.storage_index.fqn].dtype]

    def _fits(self, item: ReadItem, into: torch.Tensor) -> bool:
        """Return whether the bytes can be read straight into its memory."""
        plain = into.device.type == "cpu" and not into.is_conj() and not into.is_neg()
        return plain and into.dtype == self._dtype(item)

    def _batches(self, items: list[ReadItem]) -> Iterator[list[ReadItem]]:
        batch: list[ReadItem] = []
        size_bytes = 0
        for item in items:
            size = item.lengths.numel() * self._dtype(item).itemsize
            if batch and size_bytes + size > _STAGED_BYTES:
                yield batch
                batch, size_bytes = [], 0
            batch.append(item)
            size_bytes += size
        yield batch

    def _read_staged(self, batch: list[ReadItem], planner: LoadPlanner) -> None:
        """Read via host memory: for a device, or another element type."""
        rooms = [torch.empty(i.lengths, dtype=self._dtype(i), device="cpu") for i in batch]
        self._reader.read([_target(i, room) for i, room in zip(batch, rooms, strict=True)])
        for item, room in zip(batch, rooms, strict=True):
            into = planner.resolve_tensor(item).detach()
            into.copy_(room)
            planner.commit_tensor(item, into)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a step."""
        return str(checkpoint_id).isdecimal()


def _find(store: Store, step: int | None) -> Checkpoint | None:
    if step is None:
        return newest_checkpoint(store, _log.warning)
    for place in checkpoint_places(store):
        if place.step == step:
            checkpoint = open_checkpoint(store, place)
            checkpoint.check()
            return checkpoint
    return None


def _tensor_metadata(tensor: Tensor) -> TensorStorageMetadata:
    whole = Box.whole(tensor.shape)
    chunk = ChunkStorageMetadata(torch.Size(whole.start), torch.Size(whole.size))
    properties = TensorProperties(dtype=DTYPES[tensor.dtype])
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), [chunk])


def _target(item: ReadItem, into: torch.Tensor) -> ReadTarget:
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    memory = into.view(_CARRIERS.get(into.dtype.itemsize, into.dtype)).numpy()
    return ReadTarget(item.storage_index.fqn, box, memory)


__all__ = ["OutlastReader", "OutlastWriter"]
