"""Groups that are split from others, in a run and outside of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.torch_version import TorchVersion

from outlast.errors import UsageError

pytestmark = pytest.mark.process

BACKENDS = ("gloo", "outlast", "seatless")


def _sum(member: Any, group: Any) -> float:
    tensor = torch.full((3,), 10.0**member.rank)
    group.allreduce([tensor]).wait()
    return tensor[0].item()


def _split(member: Any, backend: str, store: str) -> list[Any]:
    """Split [2, 0] off, twice with the same name, and end one of the two."""
    member.init(backend, store)
    world: Any = dist.group.WORLD
    first, second = (world.split_group([2, 0], group_name="pair") for _ in range(2))
    if member.rank == 1:
        assert first is None and second is None
        return [_sum(member, world)]
    found = [first.rank(), first.size(), first.group_name, _sum(member, first)]
    first.shutdown()
    with pytest.raises(UsageError, match="destroyed"):
        _sum(member, first)
    return [*found, _sum(member, second), _sum(member, world)]


@pytest.mark.parametrize("backend", ["outlast", "seatless"])
def test_a_group_of_some_ranks_in_another_order(cluster: Any, backend: str, tmp_path: Path) -> None:
    first, second, third = cluster.run(3, _split, backend, str(tmp_path / "store"))
    assert first == [1, 2, "pair", 101.0, 101.0, 111.0]
    assert second == [111.0]
    assert third == [0, 2, "pair", 101.0, 101.0, 111.0]


def _next_generation(member: Any) -> list[float]:
    member.init()
    group: Any = dist.group.WORLD.split_group([2, 0], group_name="pair")
    found = [] if group is None else [_sum(member, group)]
    member.await_others()  # one that is severed earlier ends those that still connect
    member.groups.sever(1)
    member.connect(2)
    return found if group is None else [*found, _sum(member, group)]


def test_the_next_generation_connects_it(cluster: Any) -> None:
    assert cluster.run(3, _next_generation) == [[101.0, 101.0], [], [101.0, 101.0]]


def _by_torch(member: Any, backend: str, store: str) -> list[Any]:
    member.init(backend, store)
    group: Any = dist.split_group(split_ranks=[[3, 1], [0, 2]])
    half: Any = dist.split_group(parent_pg=group, split_ranks=[[1]])
    tensor, alone = torch.full((3,), 10.0**member.rank), torch.ones(2)
    dist.all_reduce(tensor, group=group)
    found = [dist.get_process_group_ranks(group), dist.get_rank(group), tensor.tolist()]
    if half is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(alone, group=half)
        found += [dist.get_process_group_ranks(half), alone.tolist()]
        dist.destroy_process_group(half)
    dist.destroy_process_group(group)
    dist.barrier()
    return found


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.15", reason="needs a GPU before 2.15")
def test_as_torch_splits_plain_gloo(clusters: Any, tmp_path: Path) -> None:
    plain, *ours = (
        clusters().run(4, _by_torch, backend, str(tmp_path / backend)) for backend in BACKENDS
    )
    assert plain[1][:3] == [[3, 1], 1, [1010.0] * 3]
    assert ours == [plain, plain]
