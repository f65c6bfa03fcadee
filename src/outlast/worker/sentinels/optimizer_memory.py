"""Memory of optimizers' state: it waits on the host while a phase computes that has run out of
memory again and again, and it is reserved before the vote behind which it is first made.

    attempt ── state to the host ── forward, backward ── state back ── vote ── step

It is back before the vote, where an allocation that fails is still undone, and where replicas
compare it. The same tensors get other memory, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from outlast.worker.state.tensor_digests import local_shard

_SMALL_BYTES = 1 << 12  # not worth a copy
_HOST = torch.device("cpu")


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device."""
    return tensor.to(device, copy=True)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is not in the host's memory."""
    return tensor.device.type not in ("cpu", "meta")


class StateOffload:
    """State of optimizers that is on the host for a while. `is_far`: which tensors move."""

    def __init__(
        self,
        is_far: Callable[[torch.Tensor], bool] = is_on_device,
        move: Callable[[torch.Tensor, torch.device], torch.Tensor] = move,
    ) -> None:
        self._is_far, self._move = is_far, move
        self._away: list[tuple[torch.Tensor, torch.device]] = []

    @torch.no_grad()
    def put_away(self, optimizers: Iterable[Optimizer]) -> int:
        """Move the state to the host; return the bytes on the device that are free now."""
        size_bytes = 0
        for tensor in _tensors(optimizers):
            if not self._is_far(tensor) or tensor.nbytes < _SMALL_BYTES:
                continue
            device, copy = tensor.device, self._move(tensor.data, _HOST)
            size_bytes += tensor.nbytes
            self._away.append((tensor, device))
            tensor.data = copy
        return size_bytes

    @torch.no_grad()
    def bring_back(self) -> None:
        """Move what is on the host back. Raises torch.OutOfMemoryError; then the rest stays."""
        while self._away:
            tensor, device = self._away[-1]
            tensor.data = self._move(tensor.data, device)
            self._away.pop()


def _tensors(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """Yield tensors of states that have their memory alone, so that it can be another."""
    found: dict[int, list[torch.Tensor]] = {}
    for optimizer in optimizers:
        for values in optimizer.state.values():
            for value in values.values() if isinstance(values, dict) else ():
                if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                    shard = local_shard(value)
                    found.setdefault(shard.untyped_storage().data_ptr(), []).append(shard)
    for shards in found.values():
        if len(shards) == 1 and shards[0].untyped_storage().nbytes() == shards[0].nbytes:
            yield shards[0]


class StateReserve:
    """Allocates, before an optimizer's first step, what that step will need to make its state: an
    allocation that fails behind the vote would leave a torn rank."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def take(self, optimizer: Optimizer) -> None:
        """Allocate and free as much memory as the state will take, once for each optimizer. Raises
        torch.OutOfMemoryError, or RuntimeError of the host's allocator."""
        number = id(optimizer)
        if number in self._known or not type(optimizer).__module__.startswith("torch."):
            return  # another class may need less
        reserved = [
            torch.empty_like(local_shard(parameter))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and not optimizer.state.get(parameter)
            for _ in range(_state_tensors(group))
        ]
        del reserved  # a device's allocator keeps the blocks for the step
        self._known.add(number)


def _state_tensors(group: dict[str, Any]) -> int:
    """Return how many tensors of its size an optimizer keeps for a parameter: by the settings that
    torch's optimizers have, at most two."""
    if "betas" in group or "rho" in group:
        return 2
    return int(bool(group.get("momentum"))) + int("alpha" in group)
