"""Reading of a checkpoint into existing tensors, each rank only its own boxes."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from outlast.checkpoint.load.checkpoint_reader import CheckpointReader, ReadTarget
from outlast.checkpoint.save.shard_plan import HeldBox, describe, dtype_name, held_boxes
from outlast.checkpoint.state_values import overlaps_itself
from outlast.errors import MismatchError

STAGED_BYTES_MAX = 1 << 30  # host memory, while tensors of a device are filled
NO_CASTS: Mapping[str, torch.dtype] = {}
_MAPS = Path("/proc/self/maps")  # ordered by address
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fill_tensors(
    reader: CheckpointReader,
    tensors: Mapping[str, torch.Tensor],
    casts: Mapping[str, torch.dtype] = NO_CASTS,
) -> list[str]:
    """Read a checkpoint's values into `tensors`; of a DTensor, this rank's box.

    CPU memory is filled directly, other devices through STAGED_BYTES_MAX of host memory. `casts`:
    types in the checkpoint of tensors that have another one here. Returns the names of those with
    infinite values that were finite.

    Names, shapes and dtypes are compared before anything is changed: MismatchError lists every
    difference. A CorruptionError or StorageError later leaves tensors partly filled, as does the
    MismatchError of tensors that share memory here and differ in the checkpoint.
    """
    table, sources = describe(tensors)
    boxes = held_boxes(table)
    _check(reader, boxes, casts, _read_only(sources))
    repeated, overlapping = _sharing(boxes, sources)
    shared = repeated | overlapping
    expanded = {item.name for item in boxes if overlaps_itself(sources[item.name])} - shared
    parts = [  # expanded ones first, since they may raise, and nothing was changed yet
        [item for item in boxes if item.name in expanded],
        [item for item in boxes if item.name not in expanded | shared],
        [item for item in boxes if item.name in overlapping],
        [item for item in boxes if item.name in repeated],
    ]
    infinite: list[str] = []
    staged = {
        item.name
        for item in boxes
        if item.name in casts or _is_not_in_host_memory(sources[item.name])
    }
    staged |= expanded | shared
    for batch in chain.from_iterable(_batches(part, staged) for part in parts):
        rooms: dict[str, torch.Tensor] = {}
        for item in batch:
            if item.name in staged:
                dtype = casts.get(item.name, item.dtype)
                rooms[item.name] = torch.empty(item.box.size, dtype=dtype, device="cpu")
        into = {item.name: rooms.get(item.name, sources[item.name].detach()) for item in batch}
        reader.read([ReadTarget(item.name, item.box, _memory(into[item.name])) for item in batch])
        distinct = {name: fill_once(name, sources[name], room) for name, room in rooms.items()}
        for name, room in rooms.items():
            into_once, values = distinct[name]
            if name not in repeated:
                into_once.copy_(values)
            if name in casts and not _as_finite(sources[name], room):
                infinite.append(name)
        for name in shared & rooms.keys():
            _check_kept(name, sources[name], rooms[name])
    return infinite


def _sharing(
    boxes: list[HeldBox], sources: Mapping[str, torch.Tensor]
) -> tuple[set[str], set[str]]:
    """Return the names of tied tensors, and of other tensors whose memory may overlap.

    A tied tensor is exactly the memory of an earlier name's tensor (tied weights).
    """
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), at)
        for at, tensor in enumerate(sources[item.name] for item in boxes)
        if tensor.numel()
    )
    repeated, overlapping = set[str](), set[str]()
    run, end = list[str](), ("", 0)  # names of adjoining spans; end of the last one
    for device, begin, at in spans:
        name = boxes[at].name
        if (device, begin) >= end:
            _divide(run, sources, repeated, overlapping)
            run = []
        run.append(name)
        end = max(end, (device, begin + _extent_bytes(sources[name])))
    _divide(run, sources, repeated, overlapping)
    return repeated, overlapping


def _divide(
    names: list[str], sources: Mapping[str, torch.Tensor], repeated: set[str], overlapping: set[str]
) -> None:
    """Sort names of tensors in one run of memory into `repeated` and `overlapping`."""
    first: dict[object, str] = {}
    for name in names:
        tensor = sources[name]
        key = (
            tensor.data_ptr(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if first.setdefault(key, name) != name:
            repeated.add(name)
    if len(first) > 1:
        overlapping.update(first.values())


def _extent_bytes(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def _check_kept(name: str, into: torch.Tensor, values: torch.Tensor) -> None:
    """Raise MismatchError where another tensor has overwritten a tensor's values."""
    if not torch.equal(_bits(into), _bits(values.to(into.dtype))):
        raise MismatchError(
            f"{name} shares memory here with another tensor of the state, and the checkpoint has"
            " other values of the two; the state was filled in part and must not be used; untie"
            f" them, or load one of the two: skip=[{name!r}]"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    alone = tensor.detach().cpu().resolve_conj().resolve_neg()
    return alone.contiguous().reshape(-1).view(torch.uint8)


def fill_once(
    name: str, into: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor and its values without the elements that share the memory of others.

    Raises MismatchError where elements that share it here differ in the checkpoint.
    """
    if not overlaps_itself(into):
        return into, values
    index = tuple(
        slice(0, 1) if not stride and size > 1 else slice(None)
        for size, stride in zip(into.shape, into.stride(), strict=True)
    )
    into_once, once = into[index], values[index]
    elements = _extent_bytes(into_once) // into.itemsize
    spare = torch.empty(elements, dtype=values.dtype, device=values.device)
    spare = spare.as_strided(into_once.shape, into_once.stride()).copy_(once)
    if not torch.equal(_bits(spare.expand_as(values)), _bits(values)):
        raise MismatchError(
            f"{name}: is expanded here or overlaps itself (unfold), so that several elements share"
            " one memory, and they differ in the checkpoint; nothing was touched on this rank; make"
            " it contiguous before"
        )
    return into_once, once


def _read_only(sources: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors in read-only mapped files.

    A store there ends the process by a signal.
    """
    closed: list[tuple[int, int]] = []
    with suppress(OSError):
        for line in _MAPS.read_text(errors="replace").splitlines():
            span, rights, _ = line.split(" ", 2)
            if rights[1] != "w":
                begin, _, end = span.partition("-")
                closed.append((int(begin, 16), int(end, 16)))
    names: list[str] = []
    for name, tensor in sources.items():
        if tensor.device.type == "cpu" and tensor.numel():
            last = tensor.data_ptr() + _extent_bytes(tensor) - 1
            at = bisect_right(closed, (last, sys.maxsize)) - 1
            if at >= 0 and closed[at][1] > tensor.data_ptr():
                names.append(name)
    return names


def _is_not_in_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether it is on a device, or a lazy conjugate or negation."""
    return tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg()


def _memory(tensor: torch.Tensor) -> np.ndarray:
    """Return its memory as elements of the same size: NumPy has no bfloat16."""
    return tensor.view(_CARRIERS.get(tensor.dtype.itemsize, tensor.dtype)).numpy()


def _batches(items: list[HeldBox], staged: set[str]) -> list[list[HeldBox]]:
    """Divide tensors into batches, in order: neighbours in a checkpoint are read together."""
    batches: list[list[HeldBox]] = []
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
    reader: CheckpointReader,
    boxes: list[HeldBox],
    casts: Mapping[str, torch.dtype],
    read_only: Collection[str],
) -> None:
    differences = [
        f"{name}: is in memory that is mapped read-only here; clone it" for name in read_only
    ]
    saved = reader.checkpoint.tensors
    for name, dtype, shape, *_ in boxes:
        if name not in saved:
            differences.append(f"{name}: is not in the checkpoint")
            continue
        if saved[name].shape != shape:
            differences.append(f"{name}: has shape {saved[name].shape} there, {shape} here")
        expected = dtype_name(casts.get(name, dtype))
        if saved[name].dtype != expected:
            differences.append(f"{name}: is {saved[name].dtype} there, {expected} here")
    if differences:
        lines = "\n  ".join(differences)
        raise MismatchError(
            f"{reader.checkpoint.where} does not fit; nothing was touched. Differences:\n  {lines}"
        )
