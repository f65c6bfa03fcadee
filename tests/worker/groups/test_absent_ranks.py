"""Collectives while ranks are absent, beside those of a plain smaller world."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from outlast.errors import UnsupportedError
from outlast.transport.rank_spans import unpack_ranks

WORLD = 4


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    counted = torch.nn.BatchNorm1d(8)  # a module with buffers
    return torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), counted, torch.nn.Linear(8, 3))


def _train(rank: int, steps: int, model: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses: list[float] = []
    for step in range(steps):
        data = torch.Generator().manual_seed(100 * step + rank)
        loss = (model(torch.randn(5, 6, generator=data)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean / dist.get_world_size()))
    return [*losses, *(float(each.detach().abs().sum()) for each in model.parameters())]


def _without(member: Any, absent: tuple[int, ...]) -> list[float]:
    member.init()
    model = DistributedDataParallel(_model())
    for _ in range(2):  # DDP settles its buckets, as in the rehearsals of a run
        model(torch.ones(2, 6)).sum().backward()
    member.groups.sever(1)
    member.connect(2, absent=absent)
    if member.rank in absent:
        return []
    assert dist.get_world_size() == WORLD
    assert member.groups.vote("phase 1")
    assert len(member.groups.gather_bytes(b"x")) == WORLD - len(absent)
    return _train(member.rank, 6, model)


def _plain(member: Any, path: str, ranks: tuple[int, ...]) -> list[float]:
    member.init("gloo", path)
    return _train(ranks[member.rank], 6, DistributedDataParallel(_model()))


@pytest.mark.parametrize("absent", [(3,), (0,), (1, 2), (0, 1, 3)])
def test_averages_are_those_of_a_plain_smaller_world(
    absent: tuple[int, ...], clusters: Any, tmp_path: Any
) -> None:
    ranks = tuple(rank for rank in range(WORLD) if rank not in absent)
    ours = [each for each in clusters().run(WORLD, _without, absent) if each]
    plain = clusters().run(len(ranks), _plain, str(tmp_path / "store"), ranks)
    assert len(ours) == len(ranks)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert all(each == ours[0] for each in ours), "ranks differ"


def _reduce(op: Any, values: list[float], dtype: torch.dtype = torch.float64) -> list[float]:
    tensor = torch.tensor(values, dtype=dtype)
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def _collectives(member: Any) -> dict[str, Any]:
    member.init()
    pair = dist.new_group([0, 2])
    rest = dist.new_group([0, 1, 3])
    single = dist.new_group([0, 3])
    found: dict[str, Any] = {}
    member.groups.start_phases()
    member.groups.presence.begin_phase(frozenset(), is_real=True)
    member.connect(2, absent=(1,))
    if member.rank == 1:
        return found
    rank = member.rank
    with member.groups.phase():
        found["sum"] = _reduce(dist.ReduceOp.SUM, [float(rank)])
        found["max"] = _reduce(dist.ReduceOp.MAX, [float(rank)])
        found["min"] = _reduce(dist.ReduceOp.MIN, [float(rank)])
        value = torch.tensor([float(rank)])
        dist.broadcast(value, 2)
        found["broadcast"] = float(value)
        dist.barrier()
        needs, use = member.groups.presence.needs(), member.groups.presence.use()
        for name, call in {
            "root": lambda: dist.broadcast(value, 1),
            "gather": lambda: dist.all_gather([torch.zeros(1) for _ in range(4)], value),
            "objects": lambda: dist.all_gather_object([None] * 4, rank),
            "count": lambda: dist.all_reduce(torch.tensor([1])),
            "product": lambda: dist.all_reduce(value, dist.ReduceOp.PRODUCT),
        }.items():
            with pytest.raises(UnsupportedError) as refused:
                call()
            found[name] = str(refused.value)
        if rank in (0, 2):
            both = [torch.zeros(1) for _ in range(2)]
            dist.all_gather(both, torch.tensor([float(rank)]), group=pair)
            found["pair"] = [float(each) for each in both]
            found["pair sum"] = float(_sum_in(pair, 1.0))
        if rank in (0, 3):
            with pytest.raises(UnsupportedError) as refused:
                _sum_in(rest, 1.0)
            found["rest sum"] = str(refused.value)
            found["single sum"] = float(_sum_in(single, 1.0))
        member.groups.presence.idle = frozenset({3})
        found["idle"] = _reduce(dist.ReduceOp.SUM, [float(rank + 1)])
    found["needs"] = needs, use.whole == (), [root for root, _ in use.roots]
    found["needs later"] = member.groups.presence.needs()
    found["whole"] = sorted(
        {tuple(unpack_ranks(each)) for each in member.groups.presence.use().whole}
    )
    return found


def _sum_in(group: Any, value: float) -> torch.Tensor:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor


def test_each_collective_is_defined_or_refused(cluster: Any) -> None:
    results = cluster.run(WORLD, _collectives)
    for rank in (0, 2, 3):
        found = results[rank]
        assert found["sum"] == pytest.approx([(0 + 2 + 3) * 4 / 3])
        assert found["max"] == [3.0] and found["min"] == [0.0]
        assert "sums of whole numbers" in found["count"]
        assert found["broadcast"] == 2.0
        assert "its root, rank 1, is absent" in found["root"]
        assert "needs all ranks" in found["gather"] and "needs all ranks" in found["objects"]
        assert "none of SUM, AVG" in found["product"]
        assert found["idle"] == pytest.approx([(1 + 3) * 4 / 2])
        assert found["needs"] == ["", True, [2]]
        assert [0, 1, 2, 3] in found["whole"] and ([0, 2] in found["whole"]) == (rank != 3)
        assert "allgather" in found["needs later"]
        assert "SUM of whole numbers" in found["needs later"]
    for rank in (0, 2):
        assert results[rank]["pair"] == [0.0, 2.0] and results[rank]["pair sum"] == 2.0
    for rank in (0, 3):
        assert "which are some replicas and not all" in results[rank]["rest sum"]
        assert results[rank]["single sum"] == 2.0


def _tables(member: Any) -> dict[str, bool]:
    member.init()
    member.groups.record.stop()
    member.groups.start_phases()
    rank, lines = member.rank, {}
    member.groups.presence.begin_phase(frozenset(), is_real=True)
    with member.groups.phase():
        for step in range(3):
            mine = torch.tensor([float(rank + 1), 0.0])
            empty, table, seed = torch.zeros(2), torch.zeros(WORLD), torch.zeros(())
            table[rank] = rank + 1
            seed += 7 * (rank == 0)
            rare = torch.tensor([1.0 if rank == 2 or step == 2 else 0.0])
            large = torch.zeros(2000)
            dist.all_reduce(mine)
            dist.all_reduce(table)
            dist.all_reduce(seed, async_op=True).wait()
            dist.all_reduce(rare)
            dist.all_reduce(empty)
            dist.all_reduce(table.clone(), dist.ReduceOp.MAX)
            dist.all_reduce(large)
            table = torch.zeros(WORLD)
            table[rank] = 1.0
            dist.reduce(table, 0)
            if step == 1:
                lines["rare"] = member.groups.presence.tables()
    lines["all"] = member.groups.presence.tables()
    return lines


def test_sums_that_are_tables_are_recognised(cluster: Any) -> None:
    for rank, lines in enumerate(cluster.run(WORLD, _tables)):
        at_root = [True] * (rank == 0)
        assert [*lines["rare"].values()] == [False, True, True, True, *at_root], rank
        assert [*lines["all"].values()] == [False, True, True, False, *at_root], rank
        assert all(line.startswith("test_absent_ranks.py:") for line in lines["all"])
