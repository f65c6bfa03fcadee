"""Closed generations, the phase contract, refused operations, record and replay."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch
from torch import distributed as dist
from torch import nn

from outlast.errors import CorruptionError, PhaseError, StepRefused, UnsupportedError
from outlast.worker.groups import SetupRecord

pytestmark = pytest.mark.process


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        received = torch.full((2,), 7.0)
        dist.recv(received, 1 - dist.get_rank())
        assert received.tolist() == [0, 0]
        return total


def _closed(member: Any) -> list[float]:
    member.init()
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    output = model(torch.ones(1, 3)).sum()
    own = torch.ones(2, requires_grad=True)
    member.groups.sever(1)
    output.backward()  # the buckets' all-reduces are answered
    (_Sum.apply(own) * 3).sum().backward()
    assert own.grad is not None
    with pytest.raises(StepRefused):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(StepRefused):
        nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    member.connect(2)
    again = torch.ones(1)
    dist.all_reduce(again)
    model(torch.ones(1, 3)).sum().backward()
    return [*own.grad.tolist(), again.item()]


def test_closed_refuses_outside_backward_and_answers_inside(cluster: Any) -> None:
    assert cluster.run(2, _closed) == [[3.0, 3.0, 2.0]] * 2


def _contract(member: Any) -> None:
    member.init()
    groups, one = member.groups, torch.ones(1)
    dist.all_reduce(one)
    groups.start_phases()
    with pytest.raises(PhaseError, match="allreduce outside a phase"):
        dist.all_reduce(one)
    with groups.phase():
        dist.all_reduce(one)
        with pytest.raises(PhaseError), groups.phase():
            pass
        work = dist.irecv(one, 1 - member.rank)
        assert groups.unfinished() == 1
        dist.send(torch.ones(1), 1 - member.rank)
        work.wait()
        assert groups.unfinished() == 0
        groups.seal()
        with pytest.raises(PhaseError, match="after the vote"):
            dist.barrier()
    with groups.phase():
        dist.barrier()
    assert member.collectives[-1] == "barrier"


def test_the_contract_of_a_phase(cluster: Any) -> None:
    cluster.run(2, _contract)


def _foreign(member: Any) -> None:
    member.init()
    store: Any = dist.distributed_c10d._get_default_store()
    with pytest.raises(UnsupportedError, match="of another backend"):
        dist.ProcessGroupGloo(store, member.rank, 2, timedelta(seconds=30))
    with pytest.raises(UnsupportedError, match="monitored_barrier"):
        dist.group.WORLD.monitored_barrier()
    with pytest.raises(UnsupportedError, match="a hook of collectives"):
        dist.group.WORLD.register_pre_hook(print)
    dist.barrier()


def test_what_cannot_survive_is_refused_by_name(cluster: Any) -> None:
    cluster.run(2, _foreign)


def _set_up(rank: int, *, otherwise: bool = False) -> list[Any]:
    sizes = torch.tensor([10 + rank])
    if otherwise:  # another script than the one that was recorded
        dist.barrier()
    else:
        dist.broadcast(sizes, 0)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, f"rank {rank}")
    said = [f"from {rank}"]
    dist.broadcast_object_list(said, 0)
    loss = torch.ones(1)
    dist.all_reduce(loss)
    return [sizes.item(), every, said, loss.item()]


def _record(member: Any) -> list[Any]:
    member.init()
    found = _set_up(member.rank)
    member.groups.record.stop()
    dist.barrier()
    return [found, member.groups.record.encode()]


def _replay(member: Any, record: bytes, otherwise: bool) -> list[Any]:
    member.groups.record = SetupRecord.decode(record)
    member.init_dry(1, 2)
    return _set_up(1, otherwise=otherwise)


def test_a_joiner_gets_what_generation_one_got(cluster: Any, clusters: Any) -> None:
    _, (found, record) = cluster.run(2, _record)
    assert found == [10, ["rank 0", "rank 1"], ["from 0"], 2.0]
    (replayed,) = clusters().run(1, _replay, record, False)
    assert replayed == [*found[:3], 1.0]  # losses are not kept: a dry answer
    (other,) = clusters().run(1, _replay, record, True)
    assert other[:3] == [11, ["rank 1"] * 2, [None]]  # its own, dry, from there on


def test_a_record_is_bounded_and_checked() -> None:
    record = SetupRecord()
    large, small = torch.zeros(70_000, dtype=torch.uint8), torch.arange(4)
    for tensor in (large, small, torch.zeros(2)):
        entry = record.note(0, "broadcast", [tensor])
        assert entry is not None
        record.capture(entry, [tensor])
    entries = msgspec.msgpack.decode(record.encode())[0]
    assert [entry[2] is None for entry in entries] == [True, False, True]
    for _ in range(200):
        entry = record.note(0, "broadcast", [large[:60_000]])
        assert entry is not None
        record.capture(entry, [large[:60_000]])
    assert len(record.encode()) < (8 << 20) + 65_536
    with pytest.raises(CorruptionError):
        SetupRecord.decode(b"\xc1damaged")


def _after_a_group_of_the_others(member: Any) -> list[float]:
    """Rank 0 does not make the call for ranks 1 and 2; then all make further groups."""
    member.init()
    if member.rank:
        local = dist.new_group([1, 2], use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=local)
    found = []
    for ranks in ([0, 1, 2], [0, 2], [0, 1, 2]):
        group = dist.new_group(ranks)
        if member.rank in ranks:
            tensor = torch.ones(1) * (member.rank + 1)
            dist.all_reduce(tensor, group=group)
            found.append(tensor.item())
    return found


def test_groups_connect_behind_one_that_only_its_members_make(cluster: Any) -> None:
    """From torch 2.14 on, plain ranks wait for each other under different names here."""
    assert cluster.run(3, _after_a_group_of_the_others) == [[6, 4, 6], [6, 6], [6, 4, 6]]
