"""Gradients that a phase finds, does not clear, and steps with.

A redo, and a successor, begin with zeroes there, so that such a step would be another one after a
failure. It is refused in the undisturbed run: hooks of the first phases of each function see
whether backward adds to what was there.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from outlast.errors import PhaseError
from outlast.worker.modules import Modules

STEPS_WATCHED = 3  # of each function
PHASES_WATCHED = 64  # of each function, where none of them steps


class _Found(NamedTuple):
    """A gradient at the start of a phase."""

    name: str
    gradient: weakref.ref[torch.Tensor]
    version: int

    def is_in(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether the parameter still has it, and it is not zero."""
        now = parameter.grad
        if now is None or now is not self.gradient():
            return False
        return bool((now.coalesce().values() if now.is_sparse else now).any())


class Leftovers:
    """Those of one worker's phases."""

    def __init__(self) -> None:
        self._steps = Counter[str]()
        self._phases = Counter[str]()
        self._found: dict[int, _Found] = {}
        self._reached: set[int] = set()  # backward has come to these
        self._used: dict[int, str] = {}  # ... and added to what they held

    @contextmanager
    def watched(self, key: str, modules: Modules) -> Iterator[None]:
        """Watch one attempt of function `key`."""
        handles = []
        if self._steps[key] < STEPS_WATCHED and self._phases[key] < PHASES_WATCHED:
            for name, parameter in modules.named_parameters():
                if parameter.grad is not None and parameter.requires_grad:
                    handles.append(self._watch(name, parameter, parameter.grad))
        self._phases[key] += bool(handles)
        self._reached.clear()
        self._used.clear()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._found.clear()

    def _watch(
        self, name: str, parameter: torch.nn.Parameter, gradient: torch.Tensor
    ) -> torch.utils.hooks.RemovableHandle:
        number = id(parameter)
        found = _Found(name, weakref.ref(gradient), gradient._version)  # noqa: SLF001 - torch's own counter of changes
        self._found[number] = found

        def reached(_new: torch.Tensor) -> None:
            if number in self._reached:
                return
            self._reached.add(number)
            now = parameter.grad
            if now is not None and now._version == found.version and found.is_in(parameter):  # noqa: SLF001 - as above
                self._used[number] = name

        return parameter.register_hook(reached)

    def must_not_be_used(self, key: str, optimizer: torch.optim.Optimizer) -> None:
        """Raises PhaseError where `optimizer` is about to step with such a gradient."""
        if not self._found:
            return
        self._steps[key] += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found = self._found.get(id(parameter))
                if found is None:
                    continue
                is_stale = id(parameter) not in self._reached and found.is_in(parameter)
                if is_stale or id(parameter) in self._used:
                    raise PhaseError(
                        f"{key} steps with a gradient of {found.name} that was there before it"
                        " began: a redo, or a replacement worker, begins with zeroes there; compute"
                        " all gradients of a step in its own phase, and clear those that are there"
                        " first (optimizer.zero_grad())"
                    )
