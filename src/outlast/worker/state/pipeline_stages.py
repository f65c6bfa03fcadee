"""Pipeline stages: the state of schedules that an attempt changes, and refusals by name.

A schedule infers the shapes that its stages exchange in its first `step`, by messages between the
stages, and again when training and `eval` alternate. The shapes belong to the rank: a refused
attempt puts back those of before it, and a replacement receives them with its rank's slot. No rank
then infers them while another one does not, as their messages would not match.

    state of a schedule                                 where it comes from after a failure
    which directions are initialized                    the slot
    inference mode, shapes and dtypes of each stage     the slot
    buffers of messages, indices of peers               made again from the shapes
    caches of micro-batches, losses, pending messages   dropped
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from outlast.errors import ProtectError, UnsupportedError

_PIPELINING = "torch.distributed.pipelining"
_SUPPORTED = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS")
_METAS = ("inputs", "outputs", "input_grads", "output_grads")
_SEARCHES = 8  # votes before which all objects are searched for schedules


def is_schedule(value: Any) -> bool:
    """Return whether a value is a pipeline schedule of torch."""
    schedules = sys.modules.get(f"{_PIPELINING}.schedules")
    return schedules is not None and isinstance(value, schedules._PipelineSchedule)  # noqa: SLF001 - torch has no other base


class PipelineStages:
    """The stages of all protected schedules."""

    def __init__(self) -> None:
        self._schedules: dict[str, Any] = {}
        self._searches = 0

    def __bool__(self) -> bool:
        return bool(self._schedules)

    def add(self, name: str, schedule: Any) -> None:
        """Add a schedule. Raises UnsupportedError, by name, for one that cannot be undone."""
        kind = type(schedule).__name__
        if kind not in _SUPPORTED or type(schedule).__module__ != f"{_PIPELINING}.schedules":
            raise UnsupportedError(
                f"schedule {name!r} is a {kind}, which has not been tried (schedules that divide a"
                " backward, as zero bubble does, follow sets without an order); nothing was"
                f" protected; use one of {', '.join(_SUPPORTED)}"
            )
        if getattr(schedule, "_comp_type_to_function_map", None):
            raise UnsupportedError(
                f"schedule {name!r} has functions of its own (register_custom_function), whose"
                " state is unknown; nothing was protected; use the schedule without them"
            )
        known = {id(stage) for each in self._schedules.values() for stage in _stages_of(each)}
        for stage in _stages_of(schedule):
            if id(stage) in known:
                raise UnsupportedError(
                    f"schedule {name!r} shares a stage with another schedule, which would make its"
                    " buffers again; nothing was protected; use one schedule, and its eval()"
                )
            _must_be_supported(name, stage)
        self._schedules[name] = schedule

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules of all stages, by names that are those of a stage."""
        return {
            f"{name}_stage{stage.stage_index}": stage.submod
            for name, schedule in self._schedules.items()
            for stage in _stages_of(schedule)
        }

    @property
    def indices(self) -> tuple[int, ...]:
        """Return the indices of this rank's stages; () without a pipeline."""
        return tuple(sorted(stage.stage_index for stage in self._all()))

    @property
    def identity(self) -> str:
        """Return text that is equal on ranks with the same stages; "" without a pipeline."""
        return f"stages {self.indices} of {self._all()[0].num_stages}" if self else ""

    def must_be_complete(self, modules: Mapping[str, nn.Module]) -> None:
        """Check that all schedules of protected modules are protected. Raises ProtectError.

        All objects are searched, before the first votes only: schedules are made at the start.
        """
        if f"{_PIPELINING}.schedules" not in sys.modules or self._searches >= _SEARCHES:
            return
        self._searches += 1
        known = {id(each) for each in self._schedules.values()}
        parameters = {id(p) for module in modules.values() for p in module.parameters()}
        found = (each for each in gc.get_objects() if _is_schedule_object(each))
        for schedule in found:
            if id(schedule) in known:
                continue
            of_stages = (p for s in _stages_of(schedule) for p in s.submod.parameters())
            if any(id(p) in parameters for p in of_stages):
                raise ProtectError(
                    f"a {type(schedule).__name__} runs protected modules as stages of a pipeline,"
                    " but is not protected: a refused attempt could not be undone, and a"
                    " replacement worker would not know the shapes that stages exchange; pass it,"
                    " session.protect(schedule=schedule, ...)"
                )

    # --- the rank's own state ---

    def state(self) -> dict[str, Any]:
        """Return what the schedules have initialized, as plain values by name."""
        return {name: _state_of(each) for name, each in self._schedules.items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of `state`, and drop what an interrupted step has left."""
        if saved.keys() != self._schedules.keys():
            raise ProtectError(
                f"the saved schedules are {sorted(saved)}, the script protects"
                f" {sorted(self._schedules)}: every worker must protect the same names"
            )
        for name, schedule in self._schedules.items():
            _restore(schedule, saved[name])

    def _all(self) -> list[Any]:
        return [stage for each in self._schedules.values() for stage in _stages_of(each)]


def _is_schedule_object(value: Any) -> bool:
    return any(each.__name__ == "_PipelineSchedule" for each in type(value).__mro__)


def _stages_of(schedule: Any) -> list[Any]:
    if hasattr(schedule, "_stages"):
        return list(schedule._stages)  # noqa: SLF001 - torch has no other list
    return [schedule._stage]  # noqa: SLF001 - the same


def _must_be_supported(name: str, stage: Any) -> None:
    """Raise UnsupportedError for a stage that has not been tried."""
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
    parts = stage.submod.modules()
    if wrapped := next((p for p in parts if isinstance(p, DistributedDataParallel)), None):
        raise UnsupportedError(
            f"{where} contains a {type(wrapped).__name__}, which has not been tried; nothing was"
            " protected; average gradients over the replicas by all_reduce before the step"
        )
    if any(hasattr(parameter, "to_local") for parameter in stage.submod.parameters()):
        raise UnsupportedError(
            f"{where} has parameters that are DTensors (fully_shard, parallelize_module), which"
            " has not been tried; nothing was protected; keep whole parameters in stages"
        )
    if any(True for _ in stage.submod.buffers()):
        raise UnsupportedError(
            f"{where} has buffers (as BatchNorm's statistics), which the inference of shapes may"
            " change, and which has not been tried; nothing was protected"
        )


def _flags_of(schedule: Any) -> tuple[str, str]:
    """Return the names of a schedule's attributes for initialized directions."""
    stages = "stages" if hasattr(schedule, "_stages") else "stage"
    return f"_{stages}_forward_initialized", f"_{stages}_backward_initialized"


def _state_of(schedule: Any) -> dict[str, Any]:
    forward, backward = _flags_of(schedule)
    return {
        "forward": getattr(schedule, forward),
        "backward": getattr(schedule, backward),
        "stages": [_stage_state(stage) for stage in _stages_of(schedule)],
    }


def _stage_state(stage: Any) -> dict[str, Any]:
    mode = stage._inference_mode  # noqa: SLF001 - torch has no other access, here and below
    return {
        "mode": None if mode is None else mode.value,
        "has_backward": stage.has_backward,
        "metas": {name: _plain(stage, getattr(stage._stage_meta, name)) for name in _METAS},  # noqa: SLF001
    }


def _plain(stage: Any, metas: Iterable[Any] | None) -> list[Any] | None:
    if metas is None:
        return None
    values: list[Any] = []
    for meta in metas:
        if meta is not None and type(meta).__name__ != "_TensorMeta":
            raise UnsupportedError(
                f"stage {stage.stage_index} of a pipeline exchanges DTensors, which has not been"
                " tried; nothing was applied; exchange plain tensors between stages"
            )
        values.append(
            None
            if meta is None
            else [
                list(meta.shape),
                list(meta.stride),
                str(meta.dtype).removeprefix("torch."),
                meta.requires_grad,
            ]
        )
    return values


def _restore(schedule: Any, saved: Mapping[str, Any]) -> None:
    _drop_microbatches(schedule)
    forward, backward = _flags_of(schedule)
    setattr(schedule, forward, saved["forward"])
    setattr(schedule, backward, saved["backward"])
    for stage, values in zip(_stages_of(schedule), saved["stages"], strict=True):
        _restore_stage(stage, values)
        count = schedule._n_microbatches  # noqa: SLF001 - torch has no other access, here and below
        if saved["forward"]:
            stage._setup_forward_recv_info(count, values["has_backward"])  # noqa: SLF001
            stage._setup_forward_send_info()  # noqa: SLF001
        if saved["backward"]:
            stage._setup_backward_recv_info(count)  # noqa: SLF001


def _restore_stage(stage: Any, values: Mapping[str, Any]) -> None:
    from torch.distributed.pipelining import _utils  # imported already: the stage is of it

    metas = {
        name: None if each is None else tuple(_meta_of(_utils, meta) for meta in each)
        for name, each in values["metas"].items()
    }
    mode = values["mode"]
    stage._stage_meta = _utils._StageMeta(**metas)  # noqa: SLF001 - torch has no other access, here and below
    stage._inference_mode = None if mode is None else _utils.InferenceMode(mode)  # noqa: SLF001
    stage.has_backward = values["has_backward"]
    stage.chunks = None
    stage.args_recv_info.clear()
    stage.act_send_info.clear()
    stage.grad_recv_info.clear()
    stage.grad_send_info = None


def _meta_of(utils: Any, meta: list[Any] | None) -> Any:
    if meta is None:
        return None
    shape, stride, dtype, requires_grad = meta
    return utils._TensorMeta(  # noqa: SLF001 - torch has no other access
        shape=torch.Size(shape),
        stride=tuple(stride),
        dtype=getattr(torch, dtype),
        requires_grad=requires_grad,
    )


def _drop_microbatches(schedule: Any) -> None:
    schedule._internal_losses.clear()  # noqa: SLF001 - torch has no other access
    for name in ("backward_counter", "fwd_recv_ops", "bwd_recv_ops"):
        if hasattr(schedule, name):
            getattr(schedule, name).clear()
    for name in ("unshard_ops", "unsharded_stages"):
        if hasattr(schedule, name):
            getattr(schedule, name).clear()
    for stage in _stages_of(schedule):
        stage.clear_runtime_states()
        for cache in (stage.bwd_cache, stage.backward_state, stage.dw_runner):
            cache.clear()
        for name in ("outputs", "inputs", "kwargs_tensors"):
            setattr(stage, f"_fwd_{name}_for_bwd_meta", None)
