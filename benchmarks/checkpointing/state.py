"""What every engine saves, as a script holds it: a module and its optimizer.

A transformer's weights in bfloat16 with AdamW's moments in float32 (1.58 GB in 216 tensors and 72
counters at the size that the field is measured with), or as many bytes in tensors of 4 KB.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn

LAYERS = 10
VOCABULARY_WIDTHS = 32
BYTES_A_WIDTH_SQUARED = 1502
STEP_WIDTH = 64
FULL_MB = 1580
SMALL_ELEMENTS = 1024  # of float32
SMALL_BYTES = 3 * 4 * SMALL_ELEMENTS  # of a parameter and its moments


class State(NamedTuple):
    """What a training script saves."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and moments by name, live."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            kept: dict[str, Any] = self.optimizer.state[parameter]
            found[f"model.{name}"] = parameter.detach()
            found |= {f"adam.{key}.{name}": kept[key] for key in ("exp_avg", "exp_avg_sq")}
        return found


def make(size_mb: float, kind: str = "transformer") -> State:
    """About `size_mb` of it; of a transformer 216 tensors whatever the size. The same each time."""
    dice = torch.Generator().manual_seed(0)
    shapes, dtype = _transformer(size_mb), torch.bfloat16
    if kind == "many":
        count = max(1, round(size_mb * 1e6 / SMALL_BYTES))
        shapes, dtype = {f"small.{n}": (SMALL_ELEMENTS,) for n in range(count)}, torch.float32
    model = nn.Module()
    moments: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, shape in shapes.items():
        drawn = torch.empty(shape).normal_(generator=dice)
        *path, last = name.split(".")
        inside = model
        for part in path:
            if not hasattr(inside, part):
                inside.add_module(part, nn.Module())
            inside = inside.get_submodule(part)
        inside.register_parameter(last, nn.Parameter(drawn.to(dtype)))
        moments.append((drawn.mul(0.01), drawn.square_().mul_(0.001)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter, (mean, square) in zip(model.parameters(), moments, strict=True):
        step = torch.tensor(1.0)
        optimizer.state[parameter] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
    return State(model, optimizer)


def _transformer(size_mb: float) -> dict[str, tuple[int, ...]]:
    width = round(math.sqrt(size_mb * 1e6 / BYTES_A_WIDTH_SQUARED) / STEP_WIDTH) * STEP_WIDTH
    width = max(STEP_WIDTH, width)
    hidden = width * 8 // 3 // STEP_WIDTH * STEP_WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (VOCABULARY_WIDTHS * width, width),
        "norm.weight": (width,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.attention.qkv.weight": (3 * width, width),
            f"layers.{layer}.attention.out.weight": (width, width),
            f"layers.{layer}.mlp.gate.weight": (hidden, width),
            f"layers.{layer}.mlp.up.weight": (hidden, width),
            f"layers.{layer}.mlp.down.weight": (width, hidden),
            f"layers.{layer}.norm1.weight": (width,),
            f"layers.{layer}.norm2.weight": (width,),
        }
    return shapes


def size_bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.tensors().values())


def blank(state: State) -> State:
    """Fill every tensor with what no save holds; the same state."""
    for tensor in state.tensors().values():
        tensor.fill_(-1)
    return state


def values(state: State) -> dict[str, torch.Tensor]:
    """A copy of what it holds."""
    return {name: tensor.clone() for name, tensor in state.tensors().items()}


def equal(state: State, expected: dict[str, torch.Tensor]) -> bool:
    found = state.tensors()
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())
