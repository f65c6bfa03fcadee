"""Checkpoints read into tensors that exist: each rank the boxes that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np
import torch

from outlast.checkpoint.plan import Held, describe, dtype_name, hold
from outlast.checkpoint.reader import Reader, Target
from outlast.errors import MismatchError

STAGED_BYTES_MAX = 1 << 30  # host memory, while tensors of a device are filled
NO_CASTS: Mapping[str, torch.dtype] = {}
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fill(
    reader: Reader,
    tensors: Mapping[str, torch.Tensor],
    casts: Mapping[str, torch.dtype] = NO_CASTS,
) -> list[str]:
    """Read a checkpoint's values into `tensors`: CPU memory directly, other devices through
    STAGED_BYTES_MAX of it. Of a DTensor it is this rank's box that is filled.

    `casts`: types in the checkpoint of tensors that have another one here. Returns the names of
    those that have infinite values now which were finite.

    Names, shapes and dtypes are compared before anything is touched: MismatchError lists every
    difference. A CorruptionError or StorageError later leaves tensors partly filled.
    """
    table, sources = describe(tensors)
    held = hold(table)
    expanded = {item.name for item in held if _shares_memory(sources[item.name])}
    held.sort(key=lambda item: item.name not in expanded)  # they may not fit, which is seen late
    _check(reader, held, casts)
    infinite: list[str] = []
    staged = {item.name for item in held if item.name in casts or _is_apart(sources[item.name])}
    staged |= expanded
    parts = [item for item in held if item.name in expanded], held[len(expanded) :]
    for batch in chain.from_iterable(_batches(part, staged) for part in parts):
        rooms: dict[str, torch.Tensor] = {}
        for item in batch:
            if item.name in staged:
                dtype = casts.get(item.name, item.dtype)
                rooms[item.name] = torch.empty(item.box.size, dtype=dtype, device="cpu")
        into = {item.name: rooms.get(item.name, sources[item.name].detach()) for item in batch}
        reader.read([Target(item.name, item.box, _memory(into[item.name])) for item in batch])
        whole = {name: _once(name, sources[name], room) for name, room in rooms.items()}
        for name, room in rooms.items():
            into_once, values = whole[name]
            into_once.copy_(values)
            if name in casts and not _as_finite(sources[name], room):
                infinite.append(name)
    return infinite


def _once(name: str, into: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor and its values without the elements that share the memory of others.

    Raises MismatchError where elements that share it here differ in the checkpoint.
    """
    if not _shares_memory(into):
        return into, values
    index = tuple(
        slice(0, 1) if not stride and size > 1 else slice(None)
        for size, stride in zip(into.shape, into.stride(), strict=True)
    )
    alike = values[index].expand_as(values).contiguous()
    if not torch.equal(alike.view(torch.uint8), values.view(torch.uint8)):
        raise MismatchError(
            f"{name}: is expanded here, so that several elements share one memory, and they differ"
            " in the checkpoint; nothing was touched on this rank; make it contiguous before"
        )
    return into[index], values[index]


def _is_apart(tensor: torch.Tensor) -> bool:
    """Return whether its values do not lie in this machine's memory as they are."""
    return tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg()


def _memory(tensor: torch.Tensor) -> np.ndarray:
    """Its own memory, as elements of the same size: NumPy has no bfloat16."""
    return tensor.view(_CARRIERS.get(tensor.dtype.itemsize, tensor.dtype)).numpy()


def _batches(items: list[Held], staged: set[str]) -> list[list[Held]]:
    """Divide tensors, in their order: what lies side by side in a checkpoint is read together."""
    batches: list[list[Held]] = []
    left_bytes = 0
    for item in items:
        size_bytes = item.size_bytes if item.name in staged else 0
        if not batches or size_bytes > left_bytes:
            batches.append([])
            left_bytes = STAGED_BYTES_MAX
        batches[-1].append(item)
        left_bytes -= size_bytes
    return batches


def _as_finite(now: torch.Tensor, before: torch.Tensor) -> bool:
    return bool(now.isfinite().sum() == before.isfinite().sum())


def _check(
    reader: Reader,
    held: list[Held],
    casts: Mapping[str, torch.dtype],
) -> None:
    found: list[str] = []
    saved = reader.checkpoint.tensors
    for name, dtype, shape, *_ in held:
        if name not in saved:
            found.append(f"{name}: is not in the checkpoint")
            continue
        if saved[name].shape != shape:
            found.append(f"{name}: has shape {saved[name].shape} there, {shape} here")
        expected = dtype_name(casts.get(name, dtype))
        if saved[name].dtype != expected:
            found.append(f"{name}: is {saved[name].dtype} there, {expected} here")
    if found:
        lines = "\n  ".join(found)
        raise MismatchError(
            f"{reader.checkpoint.where} does not fit; nothing was touched. Differences:\n  {lines}"
        )


def _shares_memory(tensor: torch.Tensor) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(not stride and size > 1 for size, stride in sizes)
