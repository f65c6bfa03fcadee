"""Copies of a rank's shards: named while they are current, read, compared and put back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.checkpoint.rank_threads import alone
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from outlast.checkpoint.keeper.keeper_frames import KeeperSetup
from outlast.checkpoint.keeper.keeper_launch import ServedKeeper
from outlast.config import Limits, WorkerSettings
from outlast.errors import CorruptionError, MismatchError, StorageError
from outlast.transport import messages
from outlast.transport.worker_page import Page
from outlast.worker.copied_shards import CopiedShards
from outlast.worker.groups.rank_presence import RankPresence
from outlast.worker.phases.absent_parts import AbsentParts
from outlast.worker.phases.script_progress import Intervals, ScriptProgress
from outlast.worker.state.protected_state import ProtectedState, Replicated
from outlast.worker.worker_checkpointing import RunCheckpointer
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_ports import WorkerPorts
from outlast.worker.worker_status import WorkerStatus

pytestmark = pytest.mark.process
DEADLINE_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


class Count:
    """An object that is equal on all ranks, whose state no slot holds."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Rank:
    """The only rank of a job, with a sharded weight, after three steps and a copy of step 3."""

    def __init__(self, folder: Path) -> None:
        base = f"@outlast-test-shards-{os.getpid()}-"
        self.keeper = ServedKeeper(f"{base}0", "rank 0", KeeperSetup(token="00"))
        self.settings = WorkerSettings(
            run="job", token="00", term=1, agent="a", incarnation=1, worker="w0", seat=0, world=1,
            ranks_per_node=1,
            control_fd=-1, page_fd=-1, run_dir=str(folder), checkpoint_every=0, snapshot_every=1,
            audit_every=0, until_step=0, keepers=base, faults=(), fault_seed=0, clock_anchor_ns=0,
            limits=Limits(),
        )  # fmt: skip
        self.model: Any = nn.Linear(4, 4)
        mesh = init_device_mesh("cpu", (1,))
        weight = DTensor.from_local(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0)])
        self.model.weight = nn.Parameter(weight)
        self.model.register_buffer("seen", torch.zeros(3))
        self.optimizer = torch.optim.Adam([self.model.weight, self.model.bias], lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.count = Count()
        named = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "count": Replicated(self.count),
        }
        self.protected = ProtectedState(named, {})
        self.status = WorkerStatus(Page.create(1 << 16), lambda _: None, lambda _: None)
        self.status.generation, self.status.term = 1, 1
        self.copies = CopiedShards(self.settings, self.status, lambda: self.protected)
        self.copies.seat = 0
        for _ in range(3):
            self.step()
        self.copy = self.save()

    def step(self) -> None:
        for parameter in (self.model.weight, self.model.bias):
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.status.step += 1
        self.status.n += 1

    def save(self) -> messages.Checkpointed:
        ports: Any = WorkerPorts()
        ports.timeline, ports.status = WorkerEvents(None, "w0"), self.status
        ports.link = SimpleNamespace(send=lambda _: None)
        ports.faults = SimpleNamespace(reach=lambda _: None)
        ports.copies = self.copies
        groups: Any = SimpleNamespace(gather_bytes=alone, presence=RankPresence(), seat=0, world=1)
        absent = AbsentParts(groups)
        saves = RunCheckpointer(self.settings, groups, self.status, ports, {}, absent=absent)
        own = self.protected.own_state(self.protected.own_choices())
        slot = ScriptProgress().slot(self.status.n, self.status.step, own)
        saves.save(self.protected, slot, to_disk=False, propose=Intervals(1, 0))
        saves.complete()
        saves.settle(DEADLINE_S)
        copy = self.status.pending_copy
        assert copy is not None
        self.status.copy, self.status.n = copy, self.status.n + 1
        return copy

    def values(self) -> dict[str, torch.Tensor]:
        return {name: _local(each).clone() for name, each in self.protected.tensors().items()}

    @property
    def shard(self) -> torch.Tensor:
        return _local(self.model.weight)


def _local(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _write_past_the_counter(rank: Rank) -> None:
    rank.model.weight.to_local().data.mul_(2)


def _write_in_place(rank: Rank) -> None:
    with torch.no_grad():
        rank.model.bias.add_(1)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.keeper.close(DEADLINE_S)


@pytest.mark.parametrize("write", [_write_past_the_counter, _write_in_place, Rank.step])
def test_a_copy_is_named_until_the_shards_change(rank: Rank, write: Callable[[Rank], None]) -> None:
    assert rank.copy.tier == "memory" and rank.copy.step == 3
    assert rank.copies.current() == rank.copy.path
    write(rank)
    assert rank.copies.current() == ""


def test_the_state_of_a_lost_rank_is_read_from_its_copy(rank: Rank) -> None:
    before = rank.values()
    rank.step()
    staged, (_, size_bytes, _) = rank.copies.read(rank.copy, rank.copy.path)
    parameters = staged["modules"]["model"]["parameters"]
    assert torch.equal(parameters["weight"], before["model.weight"])
    assert size_bytes == sum(each.nbytes for each in before.values())


def test_a_copy_that_the_lost_rank_does_not_name_is_refused(rank: Rank) -> None:
    before = rank.values()
    with pytest.raises(MismatchError, match="rank 0 changed between the copy step-000000003"):
        rank.copies.read(rank.copy, "")
    assert all(torch.equal(before[name], each) for name, each in rank.values().items())


def test_a_remaining_rank_compares_every_byte(rank: Rank) -> None:
    rank.copies.compare(rank.copy)
    rank.shard.view(-1)[3] += 1
    with pytest.raises(MismatchError, match=r"model\.weight of rank 0 changed after the copy"):
        rank.copies.compare(rank.copy)


def test_hyperparameters_may_change_after_the_copy(rank: Rank) -> None:
    """Each rank has its own in its slot: the loop has set them between the draw and the step."""
    rank.optimizer.param_groups[0]["lr"] = 0.2
    rank.scheduler.step()
    rank.copies.compare(rank.copy)


def test_a_remaining_rank_compares_objects(rank: Rank) -> None:
    rank.count.value = 1
    with pytest.raises(MismatchError, match="objects of rank 0 changed after the copy"):
        rank.copies.compare(rank.copy)


def test_a_step_is_put_back_in_place(rank: Rank) -> None:
    before, addresses = rank.values(), [p.data_ptr() for p in map(_local, rank.model.parameters())]
    keys = [list(each) for each in rank.optimizer.state.values()]
    rank.step()
    rank.status.take_back()
    rank.copies.put_back(rank.copy)
    assert all(torch.equal(before[name], each) for name, each in rank.values().items())
    assert addresses == [p.data_ptr() for p in map(_local, rank.model.parameters())]
    assert keys == [list(each) for each in rank.optimizer.state.values()]
    rank.copies.compare(rank.copy)
    assert rank.copies.current() == rank.copy.path  # for a loss in the redo


def test_a_rank_puts_back_only_the_copy_that_it_knows(rank: Rank) -> None:
    other = msgspec.structs.replace(rank.copy, path="step-000000002-n2-t1g1")
    rank.step()
    before = rank.values()
    with pytest.raises(MismatchError, match="knows only step-000000003-n3-t1g1"):
        rank.copies.put_back(other)
    assert all(torch.equal(before[name], each) for name, each in rank.values().items())


def test_a_rank_whose_objects_are_not_the_copys_is_not_put_back(rank: Rank) -> None:
    rank.step()
    rank.count.value = 1
    with pytest.raises(MismatchError, match="objects of rank 0 are not those"):
        rank.copies.put_back(rank.copy)


def test_a_copy_that_no_keeper_holds_is_an_error(rank: Rank) -> None:
    gone = msgspec.structs.replace(rank.copy, path="step-000000002-n2-t1g1")
    with pytest.raises((CorruptionError, StorageError), match="step-000000002"):
        rank.copies.read(gone, gone.path)


def test_a_step_is_put_back_after_a_refused_attempt_at_the_next_copy(rank: Rank) -> None:
    before, copy = rank.values(), rank.copy
    rank.step()
    rank.status.n -= 1  # `save` counts the phase as complete
    rank.save()
    rank.status.copy = copy
    assert rank.copies.current() != copy.path
    rank.status.take_back()
    rank.copies.put_back(copy)
    assert all(torch.equal(before[name], each) for name, each in rank.values().items())
    assert rank.copies.current() == copy.path
