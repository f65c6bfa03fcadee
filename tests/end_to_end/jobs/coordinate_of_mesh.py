"""A module beside a script that reads the rank's coordinate in a mesh."""

from torch.distributed.device_mesh import DeviceMesh


def first_coordinate(mesh: DeviceMesh) -> int:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return coordinate[0]
