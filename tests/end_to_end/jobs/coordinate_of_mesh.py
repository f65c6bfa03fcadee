"""A module beside a script that reads the rank's place in a mesh."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def first_coordinate(mesh: DeviceMesh) -> int:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return coordinate[0]


def place_of(mesh: DeviceMesh) -> list[Any]:
    """Return the rank's coordinates and groups in a mesh and in its dimensions."""
    names = mesh.mesh_dim_names or ()
    parts = [mesh, *(mesh[name] for name in names if mesh.ndim > 1)]
    groups = [(dist.get_process_group_ranks(each), each.rank()) for each in mesh.get_all_groups()]
    return [(part.get_coordinate(), part.mesh.tolist(), part.get_rank()) for part in parts] + groups
