"""Division of named tensors among ranks: the boxes that each one writes.

A rank derives its part alone, from the placements of its tensors. Ranks that hold the same box
divide it among them; only the replicas of tensors without placements are found by one exchange
(agreed_plan.py).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from outlast.checkpoint.format.manifests import ITEM_BYTES, Tensor
from outlast.checkpoint.format.tensor_boxes import Box, shares
from outlast.errors import CodecError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

WHOLE_BYTES = 64 << 10  # boxes below this are written by one of their holders, undivided
GRAIN_BYTES = 4096  # larger boxes are cut at its multiples; a multiple of all element sizes
_NAMES_MAX = 5  # in a message
_CHANGES = 2  # changes, each seen at a save, after which a parameter is not Untrained
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class TensorSpread(NamedTuple):
    """The distribution of a DTensor over a mesh. `shape`: the complete tensor's."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]


class LocalTensor(NamedTuple):
    """The properties of a local tensor that a plan depends on.

    `flat`: its elements lie in C order in one run of memory, neither conjugated nor negated.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    flat: bool
    device: torch.device
    spread: TensorSpread | None


class HeldBox(NamedTuple):
    """A box of a tensor that this rank holds.

    `holders`: all ranks that hold this box, in order; () of a plain tensor before the ranks have
    compared their tables. `mesh`: the ranks of a distributed tensor's mesh.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    holders: tuple[int, ...]
    mesh: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Return the size of the box in bytes."""
        return self.box.elements * self.dtype.itemsize


class ShardShare(NamedTuple):
    """The elements `first` to `last` (exclusive) in C order of a box, written by this rank."""

    held_box: HeldBox
    first: int
    last: int

    @property
    def size_bytes(self) -> int:
        """Return the size of the share in bytes."""
        return (self.last - self.first) * self.held_box.dtype.itemsize


class NamedTensors(NamedTuple):
    """Named local tensors: the properties that a plan depends on, and the memory itself."""

    table: dict[str, LocalTensor]
    sources: dict[str, torch.Tensor]


def _is(tensor: torch.Tensor, row: LocalTensor) -> bool:
    """Return whether a tensor is a plain one that `row` describes in full."""
    return (
        type(tensor) in _PLAIN
        and row.spread is None
        and tensor.layout is torch.strided
        and tensor.dtype is row.dtype
        and tensor.shape == row.shape
        and tensor.device == row.device
        and row.flat is (tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())
        and _has_memory(tensor)
    )


@torch.no_grad()
def describe(
    tensors: Mapping[str, torch.Tensor], known: Mapping[str, LocalTensor] | None = None
) -> NamedTensors:
    """Return the local side of every tensor.

    Raises CodecError, by name, for tensors without plain bytes. `known`: an earlier table, whose
    rows are reused where they still hold.
    """
    distributed = _distributed_type()
    table: dict[str, LocalTensor] = {}
    sources: dict[str, torch.Tensor] = {}
    known = known or {}
    for name, tensor in tensors.items():
        row = known.get(name)
        if row and _is(tensor, row):
            table[name], sources[name] = row, tensor
            continue
        spread, source = None, tensor
        if type(tensor) not in _PLAIN and isinstance(tensor, distributed):
            whole: Any = tensor
            spread = TensorSpread(whole.device_mesh, whole.placements, whole.shape)
            source = whole.to_local()
        reason = _refusal(source)
        if reason:
            raise CodecError(
                f"{name} {reason}; nothing was saved; leave it out, or give what rebuilds it"
            )
        flat = source.is_contiguous() and not source.is_conj() and not source.is_neg()
        table[name] = LocalTensor(source.dtype, source.shape, flat, source.device, spread)
        sources[name] = source
    return NamedTensors(table, sources)


def frozen_names(tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the names of parameters that are not trained."""
    plain = torch.Tensor
    return frozenset(
        name
        for name, tensor in tensors.items()
        if not tensor.requires_grad
        and type(tensor) is not plain
        and isinstance(tensor, torch.nn.Parameter)
    )


class Untrained:
    """Parameters that are not trained and do not change between saves either.

    Averages of weights and target networks change without training. This is a guess, by torch's
    counts of in-place changes; digests decide whether bytes are equal.
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._changes: Counter[str] = Counter()

    def names(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return the names, at a save."""
        untrained = frozen_names(tensors)
        versions = {name: _version(tensors[name]) for name in untrained}
        before, self._versions = self._versions, versions
        self._changes.update(n for n, at in versions.items() if before.get(n, at) != at)
        return untrained - {name for name, count in self._changes.items() if count >= _CHANGES}

    def loaded(self) -> None:
        """Forget the counts, so that a load is no change."""
        self._versions.clear()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no other


def held_boxes(table: Mapping[str, LocalTensor]) -> list[HeldBox]:
    """Return the boxes that this rank holds, sorted by name.

    Boxes of meshes without this rank are left out. Raises CodecError, by name, for placements that
    are no boxes.
    """
    boxes: list[HeldBox] = []
    meshes: dict[int, tuple[int, ...]] = {}
    for name in sorted(table):
        local = table[name]
        if local.spread is None:
            shape = tuple(local.shape)
            boxes.append(HeldBox(name, local.dtype, shape, Box.whole(shape), ()))
            continue
        coordinate = local.spread.mesh.get_coordinate()
        if coordinate is None:
            continue
        box = _region(name, local.spread, coordinate)
        if box.size != tuple(local.shape):
            raise CodecError(
                f"{name} is {tuple(local.shape)} here where its placements"
                f" {local.spread.placements} over {tuple(local.spread.mesh.shape)} ranks give"
                f" {box.size}; nothing was saved; shard it evenly, or redistribute it first"
            )
        holders = _holders(local.spread, coordinate)
        mesh = local.spread.mesh
        if id(mesh) not in meshes:
            meshes[id(mesh)] = tuple(sorted(mesh.mesh.flatten().tolist()))
        shape = tuple(local.spread.shape)
        boxes.append(HeldBox(name, local.dtype, shape, box, holders, meshes[id(mesh)]))
    return boxes


def divide_boxes(boxes: Iterable[HeldBox], rank: int) -> list[ShardShare]:
    """Return the shares of `rank`: equal bytes (to 4096) of the boxes of each set of holders.

    Small boxes come first and stay undivided, so that the first holder's are saved: buffers that
    differ by rank (BatchNorm's) are one rank's, not a mixture.
    """
    together: dict[tuple[int, ...], list[HeldBox]] = {}
    for item in boxes:
        if item.size_bytes:
            together.setdefault(item.holders, []).append(item)
    own_shares: list[ShardShare] = []
    for holders, items in together.items():
        items.sort(key=lambda item: item.size_bytes >= WHOLE_BYTES)
        sizes = [item.size_bytes for item in items]
        for index, begin, end in shares(sizes, len(holders))[holders.index(rank)]:
            item, itemsize = items[index], items[index].dtype.itemsize
            grain = GRAIN_BYTES if item.size_bytes >= WHOLE_BYTES else item.size_bytes
            first, last = (min(-(-cut // grain) * grain, item.size_bytes) for cut in (begin, end))
            if first < last:
                own_shares.append(ShardShare(item, first // itemsize, last // itemsize))
    return own_shares


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without "torch.", as records have it."""
    return _name_of(dtype)


_name_of = lru_cache(maxsize=256)(lambda dtype: str(dtype).removeprefix("torch."))


def _distributed_type() -> type | tuple[()]:
    # DTensors exist only after the import of their module, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module.DTensor if module else ()


def _refusal(tensor: torch.Tensor) -> str:
    if type(tensor) not in _PLAIN:
        if not isinstance(tensor, torch.Tensor):
            return f"is a {type(tensor).__qualname__} and no tensor"
        if hasattr(type(tensor), "__tensor_flatten__"):
            return f"is a {type(tensor).__qualname__}, whose bytes only its own class can read"
        if beside := _number_attributes(tensor):
            return (
                f"is a {type(tensor).__qualname__}, whose attributes ({', '.join(beside)}) are"
                " values that its bytes do not have"
            )
    if tensor.layout is not torch.strided:
        return f"is a sparse tensor ({tensor.layout})"
    if dtype_name(tensor.dtype) not in ITEM_BYTES:
        return f"is of type {tensor.dtype}"
    if tensor.is_meta:
        return "is on the meta device and has no bytes"
    if not _has_memory(tensor):
        return "has no memory: its storage was freed, or only its own class has it"
    return ""


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return not tensor.numel() or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # of a wrapper around other tensors
        return False


def _number_attributes(tensor: torch.Tensor) -> list[str]:
    """Return the attributes of a tensor subclass that hold numbers, such as scales.

    Counts, texts and modules describe objects that the script builds anyway.
    """

    def holds(value: Any) -> bool:
        return isinstance(value, (torch.Tensor, float, complex))

    return sorted(
        name
        for name, value in vars(tensor).items()
        if holds(value)
        or (isinstance(value, (list, tuple)) and any(map(holds, value)))
        or (
            not isinstance(value, (torch.nn.Module, type))
            and any(map(holds, getattr(value, "__dict__", {}).values()))
        )
    )


def _region(name: str, spread: TensorSpread, coordinate: Sequence[int]) -> Box:
    """Return the box at a coordinate of the mesh.

    The dimensions of the mesh cut one after the other, each the rest of the last one, as
    torch.chunk does.
    """
    start, size = [0] * len(spread.shape), list(spread.shape)
    for dim, order in _cutting_order(name, spread).items():
        for mesh_dim in order:
            step = -(-size[dim] // spread.mesh.size(mesh_dim))
            first = min(size[dim], step * coordinate[mesh_dim])
            start[dim] += first
            size[dim] = min(size[dim] - first, step)
    return Box(tuple(start), tuple(size))


def _cutting_order(name: str, spread: TensorSpread) -> dict[int, list[int]]:
    """Return the mesh dimensions that cut each sharded dimension of a tensor, in order.

    They cut from left to right, except that a strided shard (FSDP2 over tensor parallel) comes
    after those to its right whose sizes multiply to its split factor.
    """
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    cuts: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(spread.placements))):
        placement = spread.placements[mesh_dim]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, (Shard, _StridedShard)):
            raise CodecError(
                f"{name} has the placement {placement}, which is no box of a tensor; nothing was"
                " saved; redistribute it to Shard or Replicate first"
            )
        order = cuts.setdefault(placement.dim, [])
        factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
        product, before = 1, 0
        while product < factor and before < len(order):
            product *= spread.mesh.size(order[before])
            before += 1
        if product != factor:
            raise CodecError(
                f"{name} has the placement {placement} over a mesh of {tuple(spread.mesh.shape)},"
                " whose pieces are no boxes; nothing was saved; redistribute it to Shard first"
            )
        order.insert(before, mesh_dim)
    return cuts


def _holders(spread: TensorSpread, coordinate: Sequence[int]) -> tuple[int, ...]:
    at = tuple(
        slice(None) if placement.is_replicate() else where
        for placement, where in zip(spread.placements, coordinate, strict=True)
    )
    return tuple(sorted(spread.mesh.mesh[at].flatten().tolist()))


def changed_names(before: Mapping[str, LocalTensor], now: Mapping[str, LocalTensor]) -> str:
    """Return the names of tensors that differ, the first few of many."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    more = f" and {len(names) - _NAMES_MAX} more" if names[_NAMES_MAX:] else ""
    return ", ".join(names[:_NAMES_MAX]) + more


def saved_tensors(boxes: Iterable[HeldBox]) -> dict[str, Tensor]:
    """Return the dtype and shape of each of these tensors, by name."""
    return {item.name: Tensor(dtype_name(item.dtype), item.shape) for item in boxes}
