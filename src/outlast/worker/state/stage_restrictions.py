"""Schedules and stages of a pipeline that cannot be protected, refused by name.

| a stage whose module | gradients are reduced |
|---|---|
| is plain | by the script, before the step |
| is a DistributedDataParallel | by torch, with the last micro-batch |
| is an FSDP2 module | by torch, after the last micro-batch |
| contains either below itself | with each micro-batch, or not at all: refused |
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from outlast.errors import UnsupportedError
from outlast.worker.state.sharded_modules import groups_of_state

PIPELINING = "torch.distributed.pipelining"
_SUPPORTED = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
)
_BY_HAND = "average gradients over the replicas by all_reduce before the step"


def must_be_known(name: str, schedule: Any) -> None:
    """Raise UnsupportedError for a schedule that has not been tried."""
    kind = type(schedule).__name__
    if kind not in _SUPPORTED or type(schedule).__module__ != f"{PIPELINING}.schedules":
        raise UnsupportedError(
            f"schedule {name!r} is a {kind}, which has not been tried (schedules that divide a"
            " backward, as zero bubble does, follow sets without an order); nothing was protected;"
            f" use one of {', '.join(_SUPPORTED)}"
        )
    if getattr(schedule, "_comp_type_to_function_map", None):
        raise UnsupportedError(
            f"schedule {name!r} has functions of its own (register_custom_function), whose state is"
            " unknown; nothing was protected; use the schedule without them"
        )


def must_be_undoable(name: str, stage: Any, kind: str) -> None:
    """Raise UnsupportedError for a stage that has not been tried in a schedule of this `kind`."""
    where = f"stage {stage.stage_index} of schedule {name!r}"
    if type(stage).__name__ != "PipelineStage":
        raise UnsupportedError(
            f"{where} is a {type(stage).__name__}, made by pipeline() or build_stage(), which has"
            " not been tried; nothing was protected; use PipelineStage"
        )
    if stage.dw_builder is not None:
        raise UnsupportedError(
            f"{where} has a dw_builder, for zero-bubble schedules, which have not been tried;"
            " nothing was protected; build the stage without it"
        )
    _must_reduce_once(where, stage.submod, kind)
    _must_be_whole_or_sharded(where, stage.submod)
    if not hasattr(stage, "_inference_mode"):
        raise UnsupportedError(
            f"{where} is one of torch {torch.__version__}, whose shapes cannot be put back;"
            " nothing was protected; torch 2.12 and newer can"
        )


def _must_reduce_once(where: str, module: Any, kind: str) -> None:
    """Raise UnsupportedError for a DDP that torch does not reduce once a step.

    With inferred shapes, its buckets are rebuilt after the first micro-batch, which needs a forward
    between the first backward and the last one: 1F1B has it.
    """
    found = [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
    if any(part is not module for part in found):
        raise UnsupportedError(
            f"{where} contains a DistributedDataParallel below its own module: torch reduces"
            " gradients once a step only where the module of the stage itself is one; nothing was"
            f" protected; wrap the whole stage, or {_BY_HAND}"
        )
    if found and kind != "Schedule1F1B":
        raise UnsupportedError(
            f"{where} is a DistributedDataParallel in a {kind}, where torch fails in the second"
            " step, as it infers shapes by a forward of DDP; nothing was protected; use"
            f" Schedule1F1B, fully_shard on the whole stage, or {_BY_HAND}"
        )
    for part in found:
        if part.static_graph or part.find_unused_parameters:
            option = "static_graph" if part.static_graph else "find_unused_parameters"
            raise UnsupportedError(
                f"{where} is a DistributedDataParallel with {option}=True, which has not been tried"
                f" over micro-batches; nothing was protected; leave it out, or {_BY_HAND}"
            )


def _must_be_whole_or_sharded(where: str, module: Any) -> None:
    """Raise UnsupportedError for DTensors that are not those of fully_shard on the whole stage."""
    if not any(hasattr(parameter, "to_local") for parameter in module.parameters()):
        return
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds: Any = fsdp.FSDPModule if fsdp is not None else ()
    sharded: list[Any] = [part for part in module.modules() if isinstance(part, kinds)]
    if any(each.__name__ == "ReplicateModule" for part in sharded for each in type(part).__mro__):
        raise UnsupportedError(
            f"{where} is wrapped by replicate(), which has not been tried; nothing was protected;"
            f" use DistributedDataParallel or fully_shard on the whole stage, or {_BY_HAND}"
        )
    if sharded and not isinstance(module, kinds):
        raise UnsupportedError(
            f"{where} contains modules of fully_shard, but is not one itself: torch would reduce"
            " its gradients with each micro-batch; nothing was protected; apply fully_shard to the"
            " module of the stage as well"
        )
    shards = {
        id(shard.sharded_param)
        for part in sharded
        for group in groups_of_state(part._get_fsdp_state())  # noqa: SLF001 - torch has no other access
        for shard in group.fsdp_params
        if not shard.is_dtensor
    }
    if any(hasattr(p, "to_local") and id(p) not in shards for p in module.parameters()):
        raise UnsupportedError(
            f"{where} has parameters that are DTensors (parallelize_module), which has not been"
            " tried; nothing was protected; keep whole parameters in stages, or shard them by"
            " fully_shard alone"
        )


def must_be_tensors(modules: Iterable[nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
    """Raise UnsupportedError for values of one stage that a save would not have: it has rank 0's.

    Hyperparameters are in the slots of all ranks.
    """
    for name, optimizer in optimizers.items():
        for parameter, values in optimizer.state.items():
            others = [key for key, value in values.items() if not isinstance(value, torch.Tensor)]
            if isinstance(parameter, torch.Tensor) and others:
                raise UnsupportedError(
                    f"optimizer {name!r} keeps {others[0]!r} of a parameter as a value that is no"
                    " tensor, and of stages of a pipeline only rank 0's would be saved; nothing was"
                    " saved; use Adam or SGD, or run without --checkpoint-every"
                )
    for part in (part for module in modules for part in module.modules()):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise UnsupportedError(
                f"{type(part).__name__} has extra state (get_extra_state), and of stages of a"
                " pipeline only rank 0's would be saved; nothing was saved; keep it in buffers, or"
                " run without --checkpoint-every"
            )
