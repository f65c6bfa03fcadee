"""Loads by torch.distributed.checkpoint, read from this format and verified."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from outlast.checkpoint.boxes import Box
from outlast.checkpoint.catalog import Checkpoint, newest, open_checkpoint, places
from outlast.checkpoint.foreign.dcp_kept import paths_of
from outlast.checkpoint.foreign.dcp_writer import step_of, store_of
from outlast.checkpoint.foreign.dtypes import DTYPES
from outlast.checkpoint.foreign.naming import OBJECT, divided
from outlast.checkpoint.reader import Reader, Target
from outlast.checkpoint.record import Tensor
from outlast.checkpoint.storage import Store
from outlast.errors import CorruptionError, UsageError

_STAGED_BYTES = 256 << 20
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_log = logging.getLogger(__name__)


class OutlastReader(StorageReader):
    """Reads a checkpoint of this format: one that DCP saved with `OutlastWriter`, or any other.

    It is the newest whole one under `root`, or that of `step`; which one is settled here, so that
    a missing or damaged one is an error before DCP starts. Chunks that are damaged come from
    `mirrors`, stores with a copy of the checkpoint. Values are verified, then copied into the
    tensors of the state; where one is nowhere whole, CorruptionError names file, chunk and tensors.
    """

    def __init__(
        self, root: Store | Path | str, step: int | None = None, mirrors: Sequence[Store] = ()
    ) -> None:
        """Raises UsageError where there is none, CorruptionError where that of `step` is damaged,
        StorageError where it cannot be read."""
        self._store = store_of(root)
        self._mirrors = mirrors
        self._reader = self._open(step)

    def _open(self, step: int | None) -> Reader:
        checkpoint = _find(self._store, step)
        if checkpoint is None:
            which = "" if step is None else f" of step {step}"
            raise UsageError(f"{self._store.where} has no whole checkpoint{which}")
        return Reader(checkpoint, self._mirrors, _log.warning)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._reader = self._open(step_of(checkpoint_id))

    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What the checkpoint holds; each tensor as one chunk, since any box of it can be read."""
        tensors, objects = divided(self._reader.checkpoint.tensors)
        known = paths_of(self._reader)
        return Metadata(
            {name: _about(tensor) for name, tensor in tensors.items()}
            | dict.fromkeys(objects, BytesStorageMetadata()),
            planner_data={name: known.get(name, (name,)) for name in [*tensors, *objects]},
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self._reader.checkpoint.where),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Nothing is left to do: everything needed is in the records."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._reader.checkpoint.place.directory)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        opened = [plan.storage_data for plan in plans]
        if len(set(opened)) > 1:
            other = next(rank for rank, place in enumerate(opened) if place != opened[0])
            raise CorruptionError(
                f"rank 0 found {opened[0]} as the newest checkpoint and rank {other} found"
                f" {opened[other]}; nothing was loaded; give the step"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        targets: list[Target] = []
        ready: list[tuple[ReadItem, torch.Tensor]] = []
        objects: list[tuple[ReadItem, np.ndarray]] = []
        staged: list[ReadItem] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                name = OBJECT + item.storage_index.fqn
                shape = self._reader.checkpoint.tensors[name].shape
                objects.append((item, np.empty(shape, np.uint8)))
                targets.append(Target(name, Box.whole(shape), objects[-1][1]))
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
        """Whether its memory can take the values as they are."""
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
        """Into memory of the host first: for a device, or another element type."""
        rooms = [torch.empty(i.lengths, dtype=self._dtype(i), device="cpu") for i in batch]
        self._reader.read([_target(i, room) for i, room in zip(batch, rooms, strict=True)])
        for item, room in zip(batch, rooms, strict=True):
            into = planner.resolve_tensor(item).detach()
            into.copy_(room)
            planner.commit_tensor(item, into)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return str(checkpoint_id).isdecimal()


def _find(store: Store, step: int | None) -> Checkpoint | None:
    if step is None:
        return newest(store, _log.warning)
    for place in places(store):
        if place.step == step:
            checkpoint = open_checkpoint(store, place)
            checkpoint.check()
            return checkpoint
    return None


def _about(tensor: Tensor) -> TensorStorageMetadata:
    whole = Box.whole(tensor.shape)
    chunk = ChunkStorageMetadata(torch.Size(whole.start), torch.Size(whole.size))
    properties = TensorProperties(dtype=DTYPES[tensor.dtype])
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), [chunk])


def _target(item: ReadItem, into: torch.Tensor) -> Target:
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    memory = into.view(_CARRIERS.get(into.dtype.itemsize, into.dtype)).numpy()
    return Target(item.storage_index.fqn, box, memory)
