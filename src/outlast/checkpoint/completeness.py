"""Whether a state holds all that the next step depends on: told at a save, not at the resume."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from outlast.checkpoint.state import State
from outlast.errors import UsageError


def must_be_complete(state: State) -> None:
    """Raises UsageError that names every missing part."""
    missing = [*_optimizers(state), *_parameters(state), *_schedulers(state)]
    if missing:
        raise UsageError(
            f"the state is not complete: {'; '.join(missing)}. A run could not go on from such a"
            " checkpoint, so nothing was saved; add the missing part, or say complete=False where"
            " that is meant (weights alone, say)"
        )


def _optimizers(state: State) -> Iterable[str]:
    if state.optimizers:
        return
    for name, module in state.modules.items():
        if any(parameter.requires_grad for parameter in module.parameters()):
            yield f"{name!r} has parameters to train, but no optimizer is given"


def _parameters(state: State) -> Iterable[str]:
    held = {id(e.value) for found in state.entries.values() for e in found}
    held |= {id(tensor) for tensor in _tensors(state.values)}
    for name, optimizer in state.optimizers.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        strange = sum(id(parameter) not in held for parameter in parameters)
        if strange:
            yield (
                f"optimizer {name!r} updates {strange} of its {len(parameters)} parameters in no"
                " module that is given"
            )


def _schedulers(state: State) -> Iterable[str]:
    scheduled = {id(optimizer) for part in state.objects.values() for optimizer in _led_by(part)}
    for name, optimizer in state.optimizers.items():
        # torch marks the step of an optimizer that it has made a scheduler for.
        if hasattr(optimizer.step, "_wrapped_by_lr_sched") and id(optimizer) not in scheduled:
            yield f"a learning rate scheduler leads optimizer {name!r}, but is not given"


def _led_by(part: Any) -> Iterable[Optimizer]:
    """The optimizers that a scheduler, or a container of schedulers, changes."""
    inside = [part]
    for value in list(getattr(part, "__dict__", {}).values()):
        inside += value if isinstance(value, (list, tuple)) else [value]
    for each in inside:
        optimizer = getattr(each, "optimizer", None)
        if isinstance(optimizer, Optimizer):
            yield optimizer


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
