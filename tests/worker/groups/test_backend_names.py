"""Groups that a script asks for by the names "gloo" and "nccl", in a process with a seat.

torch before 2.14 opens these backends itself, and the job's store refuses them there.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from outlast.errors import UnsupportedError
from outlast.worker.groups import StableGroup
from outlast.worker.groups.backend_registration import answered_names

pytestmark = pytest.mark.process

ANSWERED = "gloo" in answered_names()
needs_look_up = pytest.mark.skipif(not ANSWERED, reason="this torch opens gloo without a look-up")


def _sum(rank: int, group: Any = None) -> float:
    tensor = torch.ones(3) * (rank + 1)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def _named(member: Any) -> list[Any]:
    member.init()
    groups = [
        dist.new_group(backend="gloo"),
        dist.new_group(backend=dist.Backend.GLOO),
        dist.new_group(backend="cpu:gloo,cuda:gloo"),
        dist.new_subgroups_by_enumeration([[0, 1]], backend="gloo")[0],
    ]
    assert all(isinstance(group, StableGroup) for group in groups)
    found: list[Any] = [dist.get_backend(), *(dist.get_backend(group) for group in groups[:2])]
    found += [groups[0].name(), [_sum(member.rank, group) for group in groups]]
    member.groups.sever(1)
    member.connect(2)  # groups of torch's own would end here
    return [*found, [_sum(member.rank, group) for group in groups]]


@needs_look_up
def test_groups_by_name_live_through_generations(cluster: Any) -> None:
    sums = [3.0] * 4
    expected = ["outlast", "gloo", "gloo", "gloo", sums, sums]
    assert cluster.run(2, _named) == [expected] * 2


def _mesh(member: Any) -> list[Any]:
    member.init()
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("data", "tensor"), backend_override={"tensor": "gloo"}
    )
    inner = mesh["tensor"].get_group()
    before = _sum(member.rank, inner)
    member.groups.sever(1)
    member.connect(2)
    return [
        dist.get_backend(inner),
        isinstance(inner, StableGroup),
        before,
        _sum(member.rank, inner),
    ]


@needs_look_up
def test_a_mesh_with_a_backend_of_its_own(cluster: Any) -> None:
    low, high = ["gloo", True, 3.0, 3.0], ["gloo", True, 7.0, 7.0]
    assert cluster.run(4, _mesh) == [low, low, high, high]


def _refused(member: Any) -> str:
    member.init()
    try:
        dist.new_group(backend="gloo")
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.skipif(ANSWERED, reason="this torch looks gloo up, and Outlast answers")
def test_the_name_is_refused_where_torch_does_not_look_it_up(cluster: Any) -> None:
    assert all("before torch 2.14" in text for text in cluster.run(2, _refused))


def _checked(member: Any, backend: str, store: str) -> list[bool]:
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    member.init(backend, store)
    dist.all_reduce(torch.ones(3))
    found = []
    for value in (1.0, math.nan):
        try:
            dist.all_reduce(torch.full((3,), value))
        except RuntimeError as error:
            found.append("NaN" in str(error))
        else:
            found.append(False)
    return found


@needs_look_up
def test_torchs_check_for_nan_is_equal_to_plain_gloos(clusters: Any, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    plain, ours = (clusters().run(2, _checked, name, store) for name in ("gloo", "outlast"))
    assert ours == plain
    assert any(any(found) for found in plain)
