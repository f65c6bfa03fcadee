"""Bits that `--fault flip` changes: in parameters and optimizer state, or in gradients."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable

import torch

from outlast.controller.fault_spec import FaultSpec, Where
from outlast.errors import ConfigError
from outlast.worker.state.audited_state import collect
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.tensor_digests import local_shard

# Places where a flip is one of a gradient: before its reduction, and after it.
_OF_GRADIENTS: tuple[Where, ...] = ("backward", "reduced", "vote")


def flip(protected: ProtectedState, spec: FaultSpec) -> None:
    """Flip bit `spec.bit` of the first tensor whose name matches `spec.tensor`.

    Raises ConfigError with the names of all tensors if none matches, or if the tensor is too small.
    """
    if spec.where == "backward":
        _flip_before_reduction(protected, spec)
    elif spec.where in _OF_GRADIENTS:
        named = ((f"{name}.grad", p.grad) for name, p in protected.audited)
        name, tensor = _match(spec, ((n, t) for n, t in named if t is not None))
        flip_bit(name, tensor, spec.bit)
    else:
        named = (pair for kind in collect(protected).values() for pair in kind.items())
        name, tensor = _match(spec, ((n, t) for n, t in named if isinstance(t, torch.Tensor)))
        flip_bit(name, tensor, spec.bit)


@torch.no_grad()
def flip_bit(name: str, tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of a tensor in place, counted in the order of its memory."""
    shard = local_shard(tensor).detach()
    if shard.layout is torch.sparse_coo:
        shard = shard._values()  # noqa: SLF001 - uncoalesced: its own memory
    if bit >= 8 * shard.nbytes:
        raise ConfigError(f"--fault flip: {name} has {8 * shard.nbytes} bits here, none is {bit}")
    if not shard.is_contiguous():  # dense, in another order of dimensions
        shard = shard.as_strided((math.prod(shard.shape),), (1,), shard.storage_offset())
    flat = shard.view(-1).view(torch.uint8)
    flat[bit // 8 : bit // 8 + 1] ^= 1 << bit % 8


def _match(spec: FaultSpec, named: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor]:
    known = [(name, tensor) for name, tensor in named if local_shard(tensor).numel()]
    for name, tensor in known:
        if fnmatch.fnmatchcase(name, spec.tensor):
            return name, tensor
        if fnmatch.fnmatchcase(name.removesuffix(".grad"), spec.tensor):
            return name, tensor
    names = ", ".join(name for name, _ in known)
    raise ConfigError(f"--fault flip: no replicated tensor matches {spec.tensor!r}; known: {names}")


def _flip_before_reduction(protected: ProtectedState, spec: FaultSpec) -> None:
    """Flip a bit of the gradient that this backward adds to a parameter: DDP reduces it after."""
    trained = ((name, p) for name, p in protected.audited if p.requires_grad)
    name, parameter = _match(spec, trained)

    def flipped(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        changed = gradient.clone()
        flip_bit(f"{name}.grad", changed, spec.bit)
        return changed

    handle = parameter.register_hook(flipped)
