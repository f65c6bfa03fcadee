"""Weights that an attempt writes before its vote, detected by digests.

`parameter.data.add_(...)`, a view through NumPy, or `set_()` move no version counter. All weights
and moments are digested in a function's rehearsals and its first step, and one window of one
parameter in each later attempt, in turn: what a phase writes only now and then is found with time.
"""

from __future__ import annotations

import torch
import xxhash

from outlast.checkpoint.format.codec import raw
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.tensor_digests import local_shard, weighted_sum

WINDOW_BYTES = 1 << 16

_Word = bytes | torch.Tensor


class WrittenWeights:
    """The weights at the start of an attempt. `everything`: of a function that is new here, else
    the window that is due in the `turn`-th attempt."""

    def __init__(self, protected: ProtectedState, *, everything: bool, turn: int) -> None:
        self._protected, self._everything = protected, everything
        self._words: dict[str, _Word] = {}
        self._parameter: torch.nn.Parameter | None = None
        if everything:
            self._words = {name: _word(tensor) for name, tensor in self._all()}
            return
        parameters = protected.tree.parameters()
        if not parameters:
            return
        parameter = parameters[turn % len(parameters)]
        width = WINDOW_BYTES // parameter.element_size()
        start = turn // len(parameters) * width % max(1, local_shard(parameter).numel())
        self._parameter, self._window = parameter, slice(start, start + width)
        self._words = {"": _word(local_shard(parameter).reshape(-1)[self._window])}

    def changed(self) -> str:
        """The name of a weight or moment that is not what it was; "" where there is none."""
        if self._parameter is not None:
            now = _word(local_shard(self._parameter).reshape(-1)[self._window])
            return "" if _same(self._words[""], now) else self._name()
        if self._everything:
            for name, tensor in self._all():
                if name in self._words and not _same(self._words[name], _word(tensor)):
                    return name
        return ""

    def _all(self) -> list[tuple[str, torch.Tensor]]:
        return _weights(self._protected) + _moments(self._protected)

    def _name(self) -> str:
        named = self._protected.tree.named_parameters()
        return next((name for name, each in named if each is self._parameter), "a parameter")


def _weights(protected: ProtectedState) -> list[tuple[str, torch.Tensor]]:
    return [(name, local_shard(parameter)) for name, parameter in protected.tree.named_parameters()]


def _moments(protected: ProtectedState) -> list[tuple[str, torch.Tensor]]:
    names = {id(parameter): name for name, parameter in protected.tree.named_parameters()}
    return [
        (f"{optimizer}.state.{names.get(id(parameter), '')}.{key}", local_shard(value))
        for optimizer, each in protected.optimizers.items()
        for parameter, values in each.state.items()
        for key, value in (values.items() if isinstance(values, dict) else ())
        if isinstance(value, torch.Tensor)
    ]


def _word(tensor: torch.Tensor) -> _Word:
    """A digest; on a device, where nobody waits for it yet, a tensor."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return xxhash.xxh3_64_digest(raw(tensor.contiguous()))
    return weighted_sum(tensor)


def _same(one: _Word, other: _Word) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return isinstance(one, bytes) and isinstance(other, bytes) and one == other
