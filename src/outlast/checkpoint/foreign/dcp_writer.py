"""Saves by torch.distributed.checkpoint, written in this format."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from outlast.checkpoint import tree
from outlast.checkpoint.boxes import Box
from outlast.checkpoint.folder import Folder
from outlast.checkpoint.foreign.dcp_kept import SHARED, Paths, encode_paths
from outlast.checkpoint.foreign.dtypes import DTYPES
from outlast.checkpoint.foreign.naming import OBJECT
from outlast.checkpoint.foreign.written import (
    Item,
    Part,
    Save,
    Written,
    commit,
    new_save,
    plan_of,
    write_part,
)
from outlast.checkpoint.record import Tensor
from outlast.checkpoint.storage import Store
from outlast.errors import CodecError, UnsupportedError, UsageError


class _Order(NamedTuple):
    """What the coordinator tells a rank. `paths`: of all names, for rank 0; else none."""

    save: Save
    rank: int
    paths: Paths


class OutlastWriter(StorageWriter):
    """Writes what DCP plans as a checkpoint of this format at `step`.

    Every save gets a directory of its own under `root`; nothing is overwritten, and nothing is a
    checkpoint before all ranks' parts are durable. For a further save with the same writer give
    `checkpoint_id` the step. Objects are kept as the bytes that DCP's planner made of them.
    `dcp.async_save` works as with DCP's own writer, in a thread or a process.
    """

    def __init__(self, root: Store | Path | str, step: int, job: str = "dcp") -> None:
        self._store = store_of(root)
        self._step = step
        self._job = job

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002 - DCP passes it
        *_: Any,
        **kwargs: Any,
    ) -> None:
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "use_collectives=False leaves nobody to commit the ranks' parts as one checkpoint;"
                " nothing was saved; leave it out"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
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
            replace(plan, storage_data=_Order(save, rank, {} if rank else paths))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        order: _Order = plan.storage_data
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
        parts: list[tuple[Save, Written]] = [r.storage_data for rank in results for r in rank]
        commit(self._store, parts[0][0], [written for _, written in parts], "DCP")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return str(checkpoint_id).isdecimal()


def store_of(root: Store | Path | str) -> Store:
    return Folder(Path(root)) if isinstance(root, str | Path) else root


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """DCP's name for a checkpoint, which is the step here."""
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


def _item(item: WriteItem, planner: SavePlanner) -> Item:
    """What DCP wants written. Objects are resolved now, since their length is not known before."""
    name = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        data = planner.resolve_data(item)
        assert isinstance(data, io.BytesIO)
        held = data.getvalue()
        tensor = Tensor("uint8", (len(held),))
        return Item(OBJECT + name, tensor, Box.whole(tensor.shape), lambda: [held])
    assert item.tensor_data is not None
    dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CodecError(f"{name} is a tensor of {dtype}, which cannot be kept; nothing was saved")
    tensor = Tensor(dtype, tuple(item.tensor_data.size))
    return Item(name, tensor, _box(item), partial(_parts, planner, item))


def _parts(planner: SavePlanner, item: WriteItem) -> Iterator[Part]:
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
            " plain bytes; nothing was saved; save what it is made of"
        )
    yield tree.raw(tensor.detach().resolve_conj().resolve_neg().cpu())
