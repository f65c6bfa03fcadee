"""Protected modules, their parameters, buffers and hooks, walked once."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_DENSE, _SPARSE = 1, 2  # kinds of gradients


class ProtectedModules:
    """All parts of the named modules. What modules are given later is found by `refresh`."""

    def __init__(self, named: Mapping[str, nn.Module]) -> None:
        self._named = named
        self._walk()

    def _walk(self) -> None:
        self._parts = [
            (prefix, part)
            for name, module in self._named.items()
            for prefix, part in module.named_modules(prefix=name)
        ]
        self._children = self._present_children()
        found = [part for _, part in self._parts if isinstance(part, DistributedDataParallel)]
        self.reducers = list({id(part): part for part in found}.values())

    @property
    def parts(self) -> list[nn.Module]:
        """Every module in them, they themselves included."""
        return [part for _, part in self._parts]

    def modes(self) -> bytes:
        """Of each module whether it trains, of each parameter whether it wants a gradient."""
        trains = bytes(part.training for _, part in self._parts)
        return trains + bytes(p.requires_grad for p in self.parameters())

    def set_modes(self, modes: bytes) -> None:
        """Be as `modes` said. Another number of modules changes nothing."""
        parameters = self.parameters()
        if len(modes) != len(self._parts) + len(parameters) or modes == self.modes():
            return
        for (_, part), trains in zip(self._parts, modes, strict=False):
            part.training = bool(trains)
        for parameter, wants in zip(parameters, modes[len(self._parts) :], strict=True):
            parameter.requires_grad_(bool(wants))

    def gradients(self) -> bytes:
        """Return for each parameter whether it has a gradient: 1, or 2 for a sparse one."""
        return bytes(
            0 if p.grad is None else _SPARSE if p.grad.is_sparse else _DENSE
            for p in self.parameters()
        )

    def set_gradients(self, gradients: bytes) -> None:
        """Have zeroes where `gradients` said that there was a gradient and there is none, and None
        where there was none. Another number of parameters changes nothing."""
        parameters = self.parameters()
        if len(gradients) != len(parameters) or gradients == self.gradients():
            return
        for parameter, kind in zip(parameters, gradients, strict=True):
            if not kind:
                parameter.grad = None
            elif parameter.grad is None:
                layout = torch.sparse_coo if kind == _SPARSE else torch.strided
                parameter.grad = torch.zeros_like(parameter.detach(), layout=layout)

    def _present_children(self) -> list[int]:
        return [id(child) for _, part in self._parts for child in part._modules.values()]  # noqa: SLF001 - no copy

    def refresh(self) -> None:
        """Look again, where a part was added, replaced or taken away."""
        if self._present_children() != self._children:
            self._walk()

    def parameters(self) -> list[nn.Parameter]:
        """All parameters now; one that several parts share comes several times."""
        return [
            parameter
            for _, part in self._parts
            for parameter in part._parameters.values()  # noqa: SLF001 - the same
            if parameter is not None
        ]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters now, by "module.name"."""
        return [
            (f"{prefix}.{key}", parameter)
            for prefix, part in self._parts
            for key, parameter in part._parameters.items()  # noqa: SLF001 - the same
            if parameter is not None
        ]

    def buffers(self) -> dict[str, torch.Tensor]:
        """All buffers now, by "module.name"."""
        return {
            f"{prefix}.{key}": buffer
            for prefix, part in self._parts
            for key, buffer in part._buffers.items()  # noqa: SLF001 - the same
            if buffer is not None
        }

    @property
    def is_sharded(self) -> bool:
        """Return whether FSDP holds some part."""
        fsdp = sys.modules.get("torch.distributed.fsdp")  # not there: nobody has wrapped anything
        if fsdp is None:
            return False
        kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
        return any(isinstance(part, kinds) for _, part in self._parts)

    def flags(self) -> list[bool]:
        """Of each DDP, whether its next forward broadcasts buffers: a forward without gradients
        makes it skip that, and ranks that disagree wait for each other for ever."""
        return [part.require_forward_param_sync for part in self.reducers]

    def set_flags(self, flags: list[bool]) -> None:
        """Set DDP's `require_forward_param_sync` of every reducer, in the order of `flags`."""
        for part, flag in zip(self.reducers, flags, strict=True):
            part.require_forward_param_sync = flag
