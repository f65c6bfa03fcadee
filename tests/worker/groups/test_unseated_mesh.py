"""Groups of the dimensions of a device mesh, as a hot spare learns them before it has a rank."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore

from outlast.worker.groups.unseated_mesh import rows_of

Rows = tuple[tuple[int, ...], ...]
NOTED: list[tuple[tuple[int, ...], Rows]] = []
CAN_KEEP_ORDER = "preserve_rank_order" in inspect.signature(DeviceMesh.__init__).parameters


def _create(options: Any, _: Any) -> Any:
    ranks = tuple(options.global_ranks_in_group)
    NOTED.append((ranks, rows_of(sys._getframe(1), ranks)))
    return FakeProcessGroup._create_internal(options.group_rank, options.group_size)


@pytest.fixture
def noted() -> Iterator[list[tuple[tuple[int, ...], Rows]]]:
    """Ranks and rows of each group that a mesh makes in rank 1 of 4."""
    if "NOTED" not in dist.Backend._plugins:
        dist.Backend.register_backend("noted", _create, extended_api=True, devices=["cpu"])
    NOTED.clear()
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield NOTED
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        pytest.param({}, (((0, 2), (1, 3)), ((2, 3), (0, 1))), id="sorted"),
        pytest.param(
            {"preserve_rank_order": True},
            (((2, 0), (3, 1)), ((2, 3), (0, 1))),
            id="in the order of the mesh",
            marks=pytest.mark.skipif(not CAN_KEEP_ORDER, reason="torch before 2.15"),
        ),
    ],
)
def test_rows_have_the_order_of_their_groups(
    noted: list[tuple[tuple[int, ...], Rows]], options: dict[str, bool], rows: tuple[Rows, Rows]
) -> None:
    ranks = torch.tensor([[2, 3], [0, 1]])
    DeviceMesh("cpu", ranks, backend_override=(("noted", None), ("noted", None)), **options)
    assert [each for _, each in noted] == list(rows)
    assert all(own in each for own, each in noted)
