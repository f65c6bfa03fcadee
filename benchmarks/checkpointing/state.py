"""What every engine saves: a transformer's weights in bfloat16, Adam's moments in float32.

216 tensors; 1.58 GB at the size that the field is measured with.
"""

from __future__ import annotations

import math

import torch

LAYERS = 10
VOCABULARY_WIDTHS = 32
BYTES_A_WIDTH_SQUARED = 1502
STEP_WIDTH = 64
FULL_MB = 1580

State = dict[str, torch.Tensor]


def make(size_mb: float, seed: int = 0) -> State:
    """About `size_mb` of it; 216 tensors whatever the size."""
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
    dice = torch.Generator().manual_seed(seed)
    state: State = {}
    for name, shape in shapes.items():
        drawn = torch.empty(shape).normal_(generator=dice)
        state[f"model.{name}"] = drawn.to(torch.bfloat16)
        state[f"adam.m.{name}"] = drawn.mul(0.01)
        state[f"adam.v.{name}"] = drawn.square_().mul_(0.001)
    return state


def size_bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def blank(state: State) -> State:
    """The same tensors, present in memory, holding nothing of it."""
    return {name: torch.full_like(tensor, -1) for name, tensor in state.items()}


def equal(one: State, other: State) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)
