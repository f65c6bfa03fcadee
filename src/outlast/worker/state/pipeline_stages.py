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
    gathered stages (fully_shard), counts of backwards  dropped

Stages that are data parallel are those that torch itself knows: the module of the stage is a DDP or
an FSDP2 module, whose gradients torch reduces once a step, with the last micro-batch.

Saves name the modules of stages by the indices of the stages, as other ranks have other ones.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outlast.errors import ProtectError, UnsupportedError
from outlast.worker.state.stage_restrictions import (
    PIPELINING,
    must_be_known,
    must_be_tensors,
    must_be_undoable,
)

_METAS = ("inputs", "outputs", "input_grads", "output_grads")
_OF_STAGES = re.compile(r"stages(_\d+)+")  # part of a name in a save
_SEARCHES = 8  # votes before which all objects are searched for schedules


def is_schedule(value: Any) -> bool:
    """Return whether a value is a pipeline schedule of torch."""
    schedules = sys.modules.get(f"{PIPELINING}.schedules")
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
        must_be_known(name, schedule)
        known = {id(stage) for each in self._schedules.values() for stage in _stages_of(each)}
        for stage in _stages_of(schedule):
            if id(stage) in known:
                raise UnsupportedError(
                    f"schedule {name!r} shares a stage with another schedule, which would make its"
                    " buffers again; nothing was protected; use one schedule, and its eval()"
                )
            must_be_undoable(name, stage, type(schedule).__name__)
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

    def must_repeat(self, changed: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Check that no buffer depends on an inference of shapes. Raises UnsupportedError.

        torch infers shapes by a forward of each stage; all but the first one are given memory that
        nothing was written to. `changed`: return the buffers that change before the vote.
        """
        inferred = [
            stage
            for stage in self._all()
            if not stage.is_first
            and stage._inference_mode is not None  # noqa: SLF001 - torch has no other access
            and stage._inference_mode.value == "dynamic"  # noqa: SLF001 - the same
            and any(True for _ in stage.submod.buffers())
        ]
        names = {id(buffer): name for name, buffer in changed().items()} if inferred else {}
        for stage in inferred:
            for buffer in stage.submod.buffers():
                if name := names.get(id(buffer)):
                    raise UnsupportedError(
                        f"buffer {name} of stage {stage.stage_index} changes in forward, and torch"
                        " infers the shapes of a pipeline by a forward over uninitialized memory:"
                        " its values would not repeat; nothing was applied; give each"
                        " PipelineStage input_args and output_args"
                    )

    def must_be_complete(self, modules: Mapping[str, nn.Module]) -> None:
        """Check that all schedules of protected modules are protected. Raises ProtectError.

        All objects are searched, before the first votes only: schedules are made at the start.
        """
        if f"{PIPELINING}.schedules" not in sys.modules or self._searches >= _SEARCHES:
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

    # --- saves ---

    def by_stages(
        self, modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
    ) -> dict[str, nn.Module]:
        """Return the protected modules by entry of a save, below the indices of this rank's stages.

        The modules of a schedule's stages that the script has not named have the schedule's name.
        Raises UnsupportedError for values of one stage that a save would not have.
        """
        must_be_tensors(modules.values(), optimizers)
        entries: dict[str, dict[str, nn.Module]] = {}
        unnamed = {
            f"{name}_stage{stage.stage_index}": (name, (stage.stage_index,))
            for name, schedule in self._schedules.items()
            for stage in _stages_of(schedule)
        }
        for name, module in modules.items():
            entry, indices = unnamed.get(name, (name, self.indices))
            part = "_".join(["stages", *map(str, indices)])
            entries.setdefault(entry, {})[part] = module
        return {entry: nn.ModuleDict(parts) for entry, parts in entries.items()}

    def names_here(self, names: Iterable[str], own: Iterable[str]) -> list[str]:
        """Return those of a save's names that belong to no other stages. `own`: this rank's."""
        if not self:
            return list(names)
        here = {part for name in own for part in _stages_in(name)}
        return [name for name in names if not _stages_in(name) or _stages_in(name) & here]

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


def _stages_in(name: str) -> set[str]:
    return {part for part in name.split(".") if _OF_STAGES.fullmatch(part)}


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
        if vars(stage).get("_gradient_reduction_handle") is not None:  # torch 2.15: it would wait
            stage._gradient_reduction_handle = None  # noqa: SLF001 - the same
            stage.submod.set_manual_backward_finalization(False)
        stage.clear_runtime_states()
        for cache in (stage.bwd_cache, stage.backward_state, stage.dw_runner):
            cache.clear()
        for name in ("outputs", "inputs", "kwargs_tensors"):
            setattr(stage, f"_fwd_{name}_for_bwd_meta", None)
