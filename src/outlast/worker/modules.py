"""The protected modules, walked once: every phase looks at all parameters and buffers, and torch's
own walk of a large model takes milliseconds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Modules:
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
        self.reducers = [
            part for _, part in self._parts if isinstance(part, DistributedDataParallel)
        ]

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

    def buffers(self) -> dict[str, torch.Tensor]:
        """All buffers now, by "module.name"."""
        return {
            f"{prefix}.{key}": buffer
            for prefix, part in self._parts
            for key, buffer in part._buffers.items()  # noqa: SLF001 - the same
            if buffer is not None
        }

    @property
    def settles_at_once(self) -> bool:
        """Whether one step and `rebuild` leave every DDP where a second step would."""
        return not any(part.static_graph or part.find_unused_parameters for part in self.reducers)

    def rebuild(self) -> None:
        """What DDP does at the start of its second step: put its buckets into the order in which
        the first one's gradients came."""
        for part in self.reducers:
            if part.reducer._rebuild_buckets():  # noqa: SLF001 - as DDP's own forward calls it
                part._has_rebuilt_buckets = True  # noqa: SLF001 - the same

    def flags(self) -> list[bool]:
        """Of each DDP, whether its next forward broadcasts buffers: a forward without gradients
        makes it skip that, and ranks that disagree wait for each other for ever."""
        return [part.require_forward_param_sync for part in self.reducers]

    def set_flags(self, flags: list[bool]) -> None:
        for part, flag in zip(self.reducers, flags, strict=True):
            part.require_forward_param_sync = flag
