"""Schedules of a pipeline: what an interrupted step leaves, and what a replacement takes over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    _utils,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from outlast.errors import ProtectError, UnsupportedError
from outlast.worker.state.pipeline_stages import PipelineStages
from outlast.worker.state.protected_state import ProtectedState

pytestmark = pytest.mark.skipif(
    not hasattr(_utils, "InferenceMode"), reason="pipelines of torch 2.11 are refused"
)
SINGLE = (ScheduleGPipe, Schedule1F1B)
SEVERAL = (ScheduleInterleaved1F1B, ScheduleLoopedBFS)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A group of one rank, which holds all stages: they pass tensors on without messages."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


class Interrupted(BaseException):
    """What ends an attempt in the middle, as StepRefused does."""


class Block(nn.Module):
    """A block that counts its forwards, and can end one of them."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.forwards, self.ends_at = 0, -1

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == self.ends_at:
            raise Interrupted
        return self.norm(self.linear(given))


class Job:
    """Stages, a schedule and an optimizer, protected."""

    def __init__(self, kind: Any, *, norm: bool = False, given: bool = False) -> None:
        torch.manual_seed(3)
        count = 1 if kind in SINGLE else 2
        self.blocks = [Block(norm) for _ in range(count)]
        shapes: dict[str, Any] = (
            {"input_args": torch.empty(2, 4, requires_grad=True)} if given else {}
        )
        if given:
            shapes["output_args"] = torch.empty(2, 4, requires_grad=True)
        self.stages = [
            PipelineStage(block, index, count, CPU, **shapes)
            for index, block in enumerate(self.blocks)
        ]
        stages: Any = self.stages[0] if kind in SINGLE else self.stages
        self.schedule = kind(stages, 4, loss_fn=nn.functional.mse_loss)
        parameters = [p for block in self.blocks for p in block.parameters()]
        self.optimizer = torch.optim.Adam(parameters)
        named = {"schedule": self.schedule, "optimizer": self.optimizer}
        self.protected = ProtectedState(named, {})
        self.pipeline = self.protected.pipeline

    def step(self) -> float:
        torch.manual_seed(5)
        losses: list[torch.Tensor] = []
        self.schedule.step(torch.randn(8, 4), target=torch.randn(8, 4), losses=losses)
        return sum(loss.item() for loss in losses)

    def gradients(self) -> list[torch.Tensor]:
        found = [p.grad for block in self.blocks for p in block.parameters()]
        return [each.clone() for each in found if each is not None]

    def clear(self) -> None:
        for block in self.blocks:
            block.zero_grad()


@pytest.mark.parametrize("ends_at", [1, 3, 5])  # while shapes are inferred, and later
@pytest.mark.parametrize("kind", [*SINGLE, *SEVERAL])
def test_a_step_repeats_after_an_interrupted_one(kind: Any, ends_at: int) -> None:
    expected = Job(kind)
    loss = expected.step()
    job = Job(kind)
    before = job.pipeline.state()
    job.blocks[-1].ends_at = ends_at
    with pytest.raises(Interrupted):
        job.step()
    job.clear()
    job.pipeline.restore(before)
    assert job.pipeline.state() == before
    assert job.step() == loss
    assert all(map(torch.equal, job.gradients(), expected.gradients()))
    caches = ("fwd_cache", "_forward_chunk_states")  # before and from torch 2.15 on
    assert not any(vars(stage).get(name) for stage in job.stages for name in caches)


@pytest.mark.parametrize("kind", [*SINGLE, *SEVERAL])
def test_a_replacement_takes_over_the_shapes_and_infers_none(kind: Any) -> None:
    job, other = Job(kind), Job(kind)
    job.step()
    other.pipeline.restore(job.pipeline.state())
    job.clear()
    counts = [block.forwards for block in job.blocks]
    assert job.step() == other.step()
    assert all(map(torch.equal, job.gradients(), other.gradients()))
    steps = [block.forwards - count for block, count in zip(job.blocks, counts, strict=True)]
    assert [block.forwards for block in other.blocks] == steps == [4] * len(job.blocks)


@pytest.mark.parametrize("kind", SINGLE)  # torch evaluates no neighbours on one rank
def test_evaluations_alternate_with_steps(kind: Any) -> None:
    job = Job(kind)
    job.step()
    trained = job.pipeline.state()
    with torch.no_grad():
        job.schedule.eval(torch.randn(8, 4), target=torch.randn(8, 4))
    evaluated = job.pipeline.state()
    assert evaluated != trained and not evaluated["schedule"]["backward"]
    job.protected.settle()
    job.clear()
    other = Job(kind)
    other.pipeline.restore(evaluated)
    assert job.step() == other.step()
    assert job.pipeline.state() == other.pipeline.state() == trained


def test_other_names_than_the_saved_ones_are_refused() -> None:
    job = Job(ScheduleGPipe)
    with pytest.raises(ProtectError, match=r"saved schedules are \['first'\], the script protects"):
        job.pipeline.restore({"first": job.pipeline.state()["schedule"]})


def test_an_unprotected_schedule_is_found_before_a_vote() -> None:
    job = Job(Schedule1F1B)
    protected = ProtectedState({"model": job.blocks[0], "optimizer": job.optimizer}, {})
    with pytest.raises(ProtectError, match="a Schedule1F1B runs protected modules as stages"):
        protected.settle()


def test_dtensors_between_stages_are_refused_before_a_vote() -> None:
    job = Job(ScheduleGPipe)
    job.step()
    job.stages[0]._stage_meta.inputs = (object(),)  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="stage 0 of a pipeline exchanges DTensors"):
        job.pipeline.state()


def test_statistics_of_an_inferred_forward_are_refused_before_a_vote() -> None:
    """Only the first stage infers its shapes from a batch."""
    first = Job(ScheduleGPipe, norm=True)
    first.step()
    first.protected.settle()
    job = Job(ScheduleInterleaved1F1B, norm=True)
    job.step()
    with pytest.raises(UnsupportedError, match=r"buffer schedule_stage1\.norm\.\S+ of stage 1"):
        job.protected.settle()


def test_statistics_of_stages_with_given_shapes_are_kept() -> None:
    job = Job(ScheduleInterleaved1F1B, norm=True, given=True)
    job.step()
    job.protected.settle()
    assert [block.forwards for block in job.blocks] == [4, 4]


def test_saves_name_modules_by_the_indices_of_stages() -> None:
    job = Job(ScheduleInterleaved1F1B)
    names = set(job.protected.content().entries)
    assert names == {"schedule"}
    found = {entry.name for entry in job.protected.content().entries["schedule"]}
    assert {"stages_0.linear.weight", "stages_1.linear.weight"} <= found
    named = {"model": nn.ModuleList(job.blocks), "schedule": job.schedule}
    entries = ProtectedState(named | {"optimizer": job.optimizer}, {}).content().entries
    assert "stages_0_1.0.linear.weight" in {entry.name for entry in entries["model"]}


def test_names_of_other_stages_are_no_differences() -> None:
    pipeline = Job(ScheduleInterleaved1F1B).pipeline
    own = ["schedule.stages_0.linear.weight", "optimizer.state.stages_1.linear.weight.step"]
    names = ["schedule.stages_2.linear.weight", "schedule.stages_1.gone", "average.weight"]
    assert pipeline.names_here(names, own) == ["schedule.stages_1.gone", "average.weight"]
    assert PipelineStages().names_here(names, own) == names


def test_values_of_one_stage_that_are_no_tensors_are_not_saved() -> None:
    job = Job(ScheduleGPipe)
    job.step()
    job.optimizer.step()
    job.protected.content()
    state = next(iter(job.optimizer.state.values()))
    state["rank"] = 3
    with pytest.raises(UnsupportedError, match="'optimizer' keeps 'rank' of a parameter"):
        job.protected.content()


def test_extra_state_of_one_stage_is_not_saved() -> None:
    class Counting(Block):
        def get_extra_state(self) -> int:
            return self.forwards

    job = Job(ScheduleGPipe)
    job.blocks[0].add_module("more", Counting(norm=False))
    with pytest.raises(UnsupportedError, match="Counting has extra state"):
        job.protected.content()
