"""Schedules and stages of a pipeline that are refused at `protect`, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _utils,
)
from torch.distributed.pipelining.schedules import REDUCE_GRAD
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from outlast.errors import UnsupportedError
from outlast.worker.state.protected_state import ProtectedState

CPU = torch.device("cpu")
KEEPS_SHAPES = hasattr(_utils, "InferenceMode")  # from torch 2.12 on


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


class OtherStage(PipelineStage):
    """A stage of the script's own."""


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def gpipe(module: nn.Module, kind: Any = PipelineStage, **options: Any) -> ScheduleGPipe:
    return ScheduleGPipe(kind(module, 0, 1, CPU, **options), 2, loss_fn=nn.functional.mse_loss)


def one_by_one(module: nn.Module) -> Schedule1F1B:
    return Schedule1F1B(PipelineStage(module, 0, 1, CPU), 2, loss_fn=nn.functional.mse_loss)


def interleaved(kind: Any) -> Any:
    stages = [PipelineStage(layers(), index, 2, CPU) for index in range(2)]
    return kind(stages, 2, loss_fn=nn.functional.mse_loss)


def custom_functions() -> Any:
    schedule = interleaved(ScheduleInterleaved1F1B)
    schedule.register_custom_function(REDUCE_GRAD, lambda _action, _context: None)
    return schedule


def ddp(**options: Any) -> nn.Module:
    return DistributedDataParallel(layers(), **options)


def ddp_below() -> nn.Module:
    return nn.Sequential(DistributedDataParallel(nn.Linear(4, 4)), nn.Linear(4, 4))


def sharded_below() -> nn.Module:
    module = layers()
    fully_shard(module[0], mesh=init_device_mesh("cpu", (1,)))
    return module


def sharded() -> nn.Module:
    module = sharded_below()
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    return module


def tensor_parallel() -> nn.Module:
    return parallelize_module(layers(), init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})


def replicated() -> Any:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(layers(), mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: interleaved(ScheduleInterleavedZeroBubble),
            "'schedule' is a ScheduleInterleavedZeroBubble, which has not been tried",
        ),
        (custom_functions, "has functions of its own"),
        (lambda: gpipe(layers(), OtherStage), "is a OtherStage, made by pipeline()"),
        (lambda: gpipe(layers(), dw_builder=lambda: lambda: None), "has a dw_builder"),
        (lambda: gpipe(ddp_below()), "contains a DistributedDataParallel below its own module"),
        (
            lambda: gpipe(ddp()),
            "is a DistributedDataParallel in a ScheduleGPipe, where torch fails",
        ),
        (lambda: one_by_one(ddp(static_graph=True)), "with static_graph=True"),
        (lambda: one_by_one(ddp(find_unused_parameters=True)), "with find_unused_parameters=True"),
        (lambda: gpipe(sharded_below()), "contains modules of fully_shard, but is not one itself"),
        (lambda: gpipe(tensor_parallel()), r"DTensors \(parallelize_module\)"),
        (lambda: gpipe(replicated()), r"is wrapped by replicate\(\)"),
    ],
)
def test_what_has_not_been_tried_is_refused_by_name(make: Callable[[], Any], words: str) -> None:
    schedule = make()
    with pytest.raises(UnsupportedError, match=words) as refused:
        ProtectedState({"schedule": schedule}, {})
    assert "nothing was protected; " in str(refused.value)


@pytest.mark.skipif(KEEPS_SHAPES, reason="this torch keeps the shapes of stages")
def test_stages_of_a_torch_that_does_not_keep_their_shapes_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"is one of torch 2\.11.*torch 2\.12 and newer can"):
        ProtectedState({"schedule": one_by_one(layers())}, {})


@pytest.mark.skipif(not KEEPS_SHAPES, reason="torch 2.11 does not keep the shapes of stages")
@pytest.mark.parametrize("make", [layers, ddp, sharded])
def test_stages_that_are_plain_or_data_parallel_as_a_whole_are_protected(
    make: Callable[[], nn.Module],
) -> None:
    assert ProtectedState({"schedule": one_by_one(make())}, {}).pipeline.indices == (0,)


@pytest.mark.skipif(not KEEPS_SHAPES, reason="torch 2.11 does not keep the shapes of stages")
def test_two_schedules_with_one_stage_are_refused() -> None:
    stage = PipelineStage(layers(), 0, 1, CPU)
    named = {"first": ScheduleGPipe(stage, 2), "second": Schedule1F1B(stage, 2)}
    with pytest.raises(UnsupportedError, match="'second' shares a stage with another schedule"):
        ProtectedState(named, {})
