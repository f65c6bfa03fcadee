"""Device meshes of a hot spare: built for a *stand-in*, a rank that it may not get, and moved to
the rank that it gets.

| keeps the rank | moved by |
|---|---|
| a group of a mesh's dimension | `UnseatedGroup.move`: other members, the same name in torch |
| `DeviceMesh`: rank and coordinate | computed again |
| FSDP2: the rank in the groups of a mesh | read again |
| torch's caches of local shapes | cleared, if they have any that differs by rank |

Shards do not move. Ranks at another place of a dimension that divides a tensor do not fit, be it a
parameter or a tensor that the script keeps for itself.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from outlast.worker.groups.unseated_group import UnseatedGroup, module_of

_MESH = DeviceMesh.__module__
_BUILDS_DIMENSION = "_init_one_process_group"
_BUILDERS = ("__init__", _BUILDS_DIMENSION, "_setup_world_group_and_device")
_KEEPERS = ("torch.distributed.fsdp._fully_shard.", "torch.distributed.tensor._")
# Releases of torch whose sources were searched for what keeps a rank.
_READ = ("2.11", "2.12", "2.13", "2.14", "2.15")
CAN_MOVE = torch.__version__.startswith(_READ)  # with others a spare waits where a mesh is made


def is_moved(frame: FrameType | None) -> bool:
    """Return whether what reads the rank in `frame` keeps it only where `UnseatedMeshes.move`
    corrects it. Meshes read it for themselves, and for who calls `get_local_rank()` or `mesh`."""
    while frame is not None and module_of(frame) == _MESH and frame.f_code.co_name not in _BUILDERS:
        frame = frame.f_back
    if frame is None:
        return False
    return module_of(frame) == _MESH or module_of(frame).startswith(_KEEPERS)


def rows_of(frame: FrameType | None, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of the mesh's dimension for which `frame` makes the group of `ranks`: each
    rank is in one of them. Outside of a mesh only `ranks`."""
    while frame is not None:
        if module_of(frame) == _MESH and frame.f_code.co_name == _BUILDS_DIMENSION:
            rows = frame.f_locals.get("pg_ranks_by_dim")
            keeps_order = frame.f_locals.get("preserve_rank_order", False)  # from torch 2.15 on
            if rows is not None:
                return tuple(tuple(row if keeps_order else sorted(row)) for row in rows.tolist())
        frame = frame.f_back
    return (ranks,)


class UnseatedMeshes:
    """The meshes of a process that stands in for a rank, and what divides tensors over them."""

    def __init__(self, groups: Sequence[UnseatedGroup], stand_in: int, world: int) -> None:
        self._groups, self._stand_in, self._world = groups, stand_in, world
        self._meshes: list[Any] = []
        self._infos: list[Any] = []
        self._divided: dict[int, set[int]] = {}  # by id of the mesh: dimensions of tensors
        self._cached: dict[int, set[int]] = {}  # ... and of what torch has cached
        common = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_common")
        info = getattr(common, "DataParallelMeshInfo", None)
        tensors = sys.modules.get("torch.distributed.tensor")
        specs = sys.modules.get("torch.distributed.tensor._dtensor_spec")
        gc.collect()  # tensors that the dry step has left
        for each in gc.get_objects():
            bases = type(each).__mro__
            if DeviceMesh in bases and hasattr(each, "_coordinate_on_dim"):
                self._meshes.append(each)
            elif info is not None and info in bases:
                self._infos.append(each)
            elif tensors is not None and tensors.DTensor in bases:
                _note(self._divided, each.device_mesh, each.placements)
            elif specs is not None and specs.DTensorSpec in bases:
                _note(self._cached, each.mesh, each.placements)

    def __bool__(self) -> bool:
        """Return whether anything here was built for the stand-in alone."""
        return bool(self._meshes) or any(len(group.ranks) < self._world for group in self._groups)

    def fitting(self) -> tuple[int, ...]:
        """Return the ranks to which this process can be moved, the stand-in among them."""
        own = {id(mesh): _coordinate(mesh, self._stand_in) for mesh in self._meshes}
        return tuple(rank for rank in range(self._world) if self._fits(rank, own))

    def _fits(self, rank: int, own: dict[int, tuple[int, ...] | None]) -> bool:
        if rank == self._stand_in:
            return True
        if not all(any(rank in row for row in group.rows) for group in self._groups):
            return False
        for mesh in self._meshes:
            mine, other = own[id(mesh)], _coordinate(mesh, rank)
            if mine is None or other is None:
                return False
            if any(mine[at] != other[at] for at in self._divided.get(id(mesh), ())):
                return False
        return True

    def move(self, rank: int) -> None:
        """Make everything that of `rank`, which must be fitting. The default group has it."""
        earlier: list[tuple[int, ...]] = []
        for group in self._groups:
            group.move(rank, earlier)
        if rank == self._stand_in:
            return
        is_stale = False
        for mesh in self._meshes:
            before = mesh.get_coordinate()
            mesh._rank = rank  # noqa: SLF001 - torch has no other access
            mesh._coordinate_on_dim = now = mesh._compute_coordinate_on_dim()  # noqa: SLF001 - the same
            is_stale |= any(before[at] != now[at] for at in self._cached.get(id(mesh), ()))
        for info in self._infos:
            for kind in ("shard", "replicate"):
                if (group := getattr(info, f"{kind}_process_group", None)) is not None:
                    setattr(info, f"{kind}_mesh_rank", group.rank())
        if is_stale:
            _clear_caches()


def _note(found: dict[int, set[int]], mesh: Any, placements: Sequence[Any]) -> None:
    """Add the dimensions of a mesh whose ranks have other parts of a tensor."""
    divided = (at for at, placement in enumerate(placements) if not placement.is_replicate())
    found.setdefault(id(mesh), set()).update(divided)


def _coordinate(mesh: Any, rank: int) -> tuple[int, ...] | None:
    """Return the coordinate of a rank in a mesh, or in its row of a sliced mesh; None outside."""
    every = mesh._layout.remap_to_tensor(mesh._rank_map)  # noqa: SLF001 - as DeviceMesh.mesh does
    try:
        row = DeviceMesh._get_mesh_tensor_from_full_mesh(every, rank)  # noqa: SLF001 - the same
    except RuntimeError:  # its answer for a rank outside of a sliced mesh
        return None
    return DeviceMesh._compute_coordinates_from_mesh(row, rank)  # noqa: SLF001 - the same


def _clear_caches() -> None:
    """Drop local shapes and offsets that torch has computed for the stand-in."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()  # noqa: SLF001 - torch has no public one
        _redistribute._gen_transform_infos.cache_clear()  # noqa: SLF001 - the same
