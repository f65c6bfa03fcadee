"""Dry results of all collectives: shapes, defined bytes, and no peer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as fc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

pytestmark = pytest.mark.process
WORLD, RANK = 4, 2


def _alone(member: Any) -> None:
    member.init_dry(RANK, WORLD)
    warnings.simplefilter("ignore", FutureWarning)


def _tensors(member: Any) -> None:
    _alone(member)
    own = torch.arange(4.0)
    dist.all_reduce(own)
    assert own.tolist() == [0, 1, 2, 3]
    dist.reduce(own, 0)
    dist.broadcast(own, 0)
    assert own.tolist() == [0, 1, 2, 3]
    slots = [torch.full((4,), 9.0) for _ in range(WORLD)]
    dist.all_gather(slots, own)
    assert all(torch.equal(slot, own) for slot in slots)
    flat = torch.full((16,), 9.0)
    dist.all_gather_into_tensor(flat, own)
    assert torch.equal(flat, own.repeat(4))
    part = torch.full((1,), 9.0)
    dist.reduce_scatter_tensor(part, own)
    assert part.item() == own[RANK]
    dist.reduce_scatter(part, [torch.tensor([float(i)]) for i in range(WORLD)])
    assert part.item() == RANK
    dist.scatter(part, None, src=0)
    assert part.item() == 0
    dist.gather(own, None, dst=0)
    mine = [torch.full((4,), 9.0) for _ in range(WORLD)]
    dist.gather(own, mine, dst=RANK)
    assert all(torch.equal(slot, own) for slot in mine)
    received = torch.full((3,), 9.0)
    assert dist.recv(received, 0) is not None
    assert received.tolist() == [0, 0, 0]
    assert 0 <= dist.recv(received) < WORLD
    dist.send(received, 0)
    dist.barrier()
    outs = [torch.full((2,), 9.0) for _ in range(WORLD)]
    dist.all_to_all(outs, [torch.full((2,), float(i)) for i in range(WORLD)])
    assert [out[0].item() for out in outs] == [0, 1, 2, 3]
    nested = [[torch.full((2,), 9.0)] for _ in range(WORLD)]
    dist.group.WORLD.allgather_coalesced(nested, [torch.ones(2)]).wait()
    assert all(one[0].tolist() == [1, 1] for one in nested)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, own, 0), dist.P2POp(dist.irecv, received, 0)]
    )
    for work in works:
        work.wait()
    assert member.groups.unfinished() == 0


def test_tensors(cluster: Any) -> None:
    cluster.run(1, _tensors)


def _counts(member: Any) -> None:
    _alone(member)
    sizes = torch.full((3,), 2**45)
    dist.broadcast(sizes, 0)
    assert int(sizes.max()) <= 2**20
    given, got = torch.tensor([1, 2, 3, 4]), torch.full((4,), 2**45)
    dist.all_to_all_single(got, given)
    out = torch.empty(int(got.sum()))
    dist.all_to_all_single(out, torch.ones(10), got.tolist(), given.tolist())
    assert torch.equal(out, torch.ones(10))
    received = torch.full((2,), 2**45)
    dist.recv(received, 1)
    assert received.tolist() == [0, 0]


def test_counts_stay_small(cluster: Any) -> None:
    cluster.run(1, _counts)


def _objects(member: Any) -> None:
    _alone(member)
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, {"mine": 1})
    assert every == [{"mine": 1}] * WORLD
    for _ in range(20):  # whatever lies in fresh memory, torch's pickles must be whole
        got: list[Any] = ["a", "b"]
        dist.broadcast_object_list(got, 0)
        assert got == [None, None]
        part: list[Any] = ["a"]
        dist.scatter_object_list(part, None, 0)
        assert part == [None]
        dist.recv_object_list(got, 0)
        assert got == [None, None]
    mine: list[Any] = ["mine", 2]
    dist.broadcast_object_list(mine, RANK)
    assert mine == ["mine", 2]


def test_objects(cluster: Any) -> None:
    cluster.run(1, _objects)


def _functional(member: Any) -> None:
    _alone(member)
    own, group = torch.arange(8.0), dist.group.WORLD
    assert torch.equal(fc.all_reduce(own, "sum", group) + 0, own)
    assert (fc.all_gather_tensor(own, 0, group) + 0).shape == (32,)
    assert (fc.reduce_scatter_tensor(own, "sum", 0, group) + 0).shape == (2,)
    assert torch.equal(fc.all_to_all_single(own, None, None, group) + 0, own)
    assert torch.equal(fc.broadcast(own, 0, group) + 0, own)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(own)
        dist.all_reduce(own)
    manager.wait()


def test_functional_and_coalesced(cluster: Any) -> None:
    cluster.run(1, _functional)


def _modules(member: Any) -> None:
    _alone(member)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert mesh["a"].size() == 2
    sharded = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [Shard(0)])
    assert sharded.to_local().shape == (2,)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        model = nn.parallel.DistributedDataParallel(plain, **options)
        for _ in range(3):
            model(torch.randn(3, 4)).sum().backward()
    assert dist.get_backend() == "outlast"


def test_modules(cluster: Any) -> None:
    cluster.run(1, _modules)


def _dry_inside_live(member: Any) -> list[float]:
    member.init()
    one = torch.ones(1)
    if member.rank == 0:
        with member.groups.dry():
            dist.all_reduce(one)
    dist.all_reduce(one)
    return one.tolist()


def test_dry_inside_a_live_generation(cluster: Any) -> None:
    assert cluster.run(2, _dry_inside_live) == [[2.0], [2.0]]
