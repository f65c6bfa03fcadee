"""The state that optimizers will make at their first step, as far as its size can be known before.

It says how large arenas are made ahead, and nothing else: what is wrong here costs time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from outlast.checkpoint.state import State

_MOMENTS = 2  # tensors of a parameter's size that Adam and most others keep


def stand_ins(state: State) -> dict[str, torch.Tensor]:
    """Return, under names of no meaning, a tensor like each one that is to come.

    The parameter itself stands for each of its moments: they have its shape, type and placement.
    """
    found: dict[str, torch.Tensor] = {}
    for name, optimizer in state.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            count = _moments(optimizer, group)
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in optimizer.state:
                    prefix = f"{name}.state to come.{number}.{index}"
                    found |= {f"{prefix}.{moment}": parameter for moment in range(count)}
    return found


def _moments(optimizer: Optimizer, group: Mapping[str, Any]) -> int:
    kind = type(optimizer).__name__
    if kind == "SGD":
        return int(bool(group.get("momentum")))
    if kind == "RMSprop":
        return 1 + bool(group.get("momentum")) + bool(group.get("centered"))
    if kind in ("Muon", "ASGD"):
        return 1
    return _MOMENTS + bool(group.get("amsgrad"))
