"""Replicas of several ranks that are absent, beside a plain run of a smaller world."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from outlast.controller.recovery.rank_units import Units
from outlast.errors import UnsupportedError

PRECISIONS = {"": None, "float64": torch.float64, "bfloat16": torch.bfloat16}
STEPS = 5


class Way(NamedTuple):
    """Choices of FSDP2 that change how it divides."""

    reduce: str = ""  # data type of reductions
    clip: float = 0.0
    accumulates: bool = False  # two micro-batches, reduced over replicas once
    reshards: bool = True


def _model(replicas: int, way: Way) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 10), torch.nn.GELU(), torch.nn.Linear(10, 3))
    shape = replicas, dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    low = MixedPrecisionPolicy(reduce_dtype=PRECISIONS[way.reduce])
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, mp_policy=low, reshard_after_forward=way.reshards)
    return model


def _train(numbers: dict[int, int], rank: int, model: Any, way: Way) -> list[float]:
    """Train; rank `rank` has the data of rank `numbers[rank]`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found: list[float] = []
    for step in range(STEPS):
        data = torch.Generator().manual_seed(100 * step + numbers[rank])
        optimizer.zero_grad()
        for micro in range(1 + way.accumulates):
            model.set_requires_all_reduce(micro == way.accumulates)
            loss = (model(torch.randn(4, 7, generator=data)) ** 2).mean()
            loss.backward()
        if way.clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), way.clip)
            found.append(float(norm.full_tensor().detach()))
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(float(mean / dist.get_world_size()))
    return [
        *found,
        *(float(each.full_tensor().detach().abs().sum()) for each in model.parameters()),
    ]


def _units(replicas: int, size: int) -> Units:
    return tuple(tuple(range(at * size, (at + 1) * size)) for at in range(replicas))


def _without(member: Any, replicas: int, size: int, gone: tuple[int, ...], way: Any) -> list[float]:
    member.init()
    model = _model(replicas, Way(*way))
    units = _units(replicas, size)
    absent = tuple(rank for number in gone for rank in units[number])
    member.groups.sever(1)
    member.connect(2, absent=absent, units=units)
    if member.rank in absent:
        return []
    ranks = [rank for rank in range(replicas * size) if rank not in absent]
    return _train(dict(zip(ranks, range(len(ranks)), strict=True)), member.rank, model, Way(*way))


def _plain(member: Any, path: str, replicas: int, way: Any) -> list[float]:
    member.init("gloo", path)
    same = {rank: rank for rank in range(dist.get_world_size())}
    return _train(same, member.rank, _model(replicas, Way(*way)), Way(*way))


@pytest.mark.parametrize(
    ("replicas", "size", "gone", "way"),
    [
        (2, 2, (1,), Way()),
        (2, 2, (0,), Way(clip=0.5)),
        (3, 2, (1,), Way(clip=0.5, reshards=False)),
        (3, 2, (0, 2), Way(accumulates=True)),
        (3, 2, (1,), Way("float64", clip=0.5)),
        (3, 2, (1,), Way("bfloat16")),
        (2, 3, (0,), Way(accumulates=True, clip=0.5)),
    ],
    ids=str,
)
def test_hybrid_sharding_is_that_of_a_plain_smaller_world(
    replicas: int, size: int, gone: tuple[int, ...], way: Way, clusters: Any, tmp_path: Any
) -> None:
    world, rest = replicas * size, replicas - len(gone)
    ours = [each for each in clusters().run(world, _without, replicas, size, gone, way) if each]
    plain = clusters().run(rest * size, _plain, str(tmp_path / "store"), rest, way)
    assert len(ours) == rest * size
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=3e-2 if way.reduce == "bfloat16" else 1e-5)
    for place in range(size):
        assert all(each == ours[place] for each in ours[place::size]), "replicas differ"


def _idle(member: Any) -> list[float]:
    member.init()
    units = _units(2, 2)
    groups = [dist.new_group(list(unit)) for unit in units]
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    three = dist.new_group([0, 1, 2])
    member.connect(2, units=units)
    member.groups.presence.begin_phase(frozenset(units[1]), is_real=True)
    unit, place = divmod(member.rank, 2)
    found: list[float] = []
    for group in (groups[unit], pairs[place], None):
        value = torch.tensor([float(member.rank + 1)])
        dist.all_reduce(value, group=group)
        found.append(float(value))
    count = torch.tensor([1])
    dist.all_reduce(count, group=groups[unit])
    found.append(int(count))
    if member.rank < 3:
        with pytest.raises(UnsupportedError, match="some replicas and not all"):
            dist.all_reduce(torch.ones(()), group=three)
    return found


def test_an_idle_replica_is_idle_as_a_whole(cluster: Any) -> None:
    results = cluster.run(4, _idle)
    for rank in range(4):
        within, across, world, count = results[rank]
        assert within == (3.0 if rank < 2 else 7.0), "a sum within a replica was scaled"
        assert across == 2.0 * (rank % 2 + 1) and world == 4 / 2 * (1 + 2)
        assert count == 2


def _ring(member: Any) -> float | None:
    member.init()
    units = ((0, 3), (1, 4), (2, 5))  # of ranks that are not next to each other
    member.connect(2, absent=units[0], units=units)
    member.groups.presence.begin_phase(frozenset(), is_real=True)
    if member.rank in units[0]:
        return None
    peer = (member.rank + 3) % 6
    mine, theirs = torch.tensor([float(member.rank)]), torch.zeros(1)
    calls = [lambda: dist.send(mine, peer), lambda: dist.recv(theirs, peer)]
    for call in calls if member.rank < peer else calls[::-1]:
        call()
    with pytest.raises(UnsupportedError, match="needs all ranks"):
        dist.send(mine, 2 if member.rank in units[1] else 1)
    dist.barrier()
    return float(theirs)


def test_ranks_of_a_unit_send_over_the_default_group(cluster: Any) -> None:
    assert cluster.run(6, _ring) == [None, 4.0, 5.0, None, 1.0, 2.0]
