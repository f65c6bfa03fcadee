"""Reads of weights by code that a replacement worker repeats when it has others.

| code | the new worker of a rank that was lost | its weights then |
|---|---|---|
| between an epoch's beginning and its loop over batches | in that epoch | those of the draw |
| between a draw and a complete phase | behind that phase's vote | those behind the phase |

Seen are the forward passes of protected modules and their `state_dict`, between phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from outlast.worker.groups.work_handles import opaque
from outlast.worker.script.bytecode import is_call_of_script


class WeightReads:
    """Watch over protected modules, until the next phase."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def watch(self, modules: Iterable[nn.Module], on_read: Callable[[], None]) -> None:
        """Call `on_read` when the script's code computes with a module, or takes its state."""
        self.end()

        def read(*_: Any) -> None:
            if is_call_of_script():
                self.end()
                on_read()

        hook = opaque(read)
        for part in {part for module in modules for part in module.modules()}:
            if not isinstance(part, torch.jit.ScriptModule):  # it refuses hooks
                self._handles.append(part.register_forward_pre_hook(hook))
                self._handles.append(part.register_state_dict_pre_hook(hook))

    def end(self) -> None:
        """Stop watching: a phase, or other code, begins."""
        while self._handles:
            self._handles.pop().remove()
