"""Gradients that a phase finds, does not clear, and steps with.

A redo, and a successor, begin with zeroes there, so that such a step would be another one after a
failure. It is refused in the undisturbed run: hooks of the first phases of each function see
whether backward adds to what was there. Where the script's own code reads `.grad`, hooks cannot
see what for: there the second step of the function is rehearsed once, and what it computes from
zeroes compared.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from outlast.errors import PhaseError
from outlast.worker.state.protected_modules import ProtectedModules

STEPS_WATCHED = 3  # of each function
PHASES_WATCHED = 64  # of each function, where none of them steps


class _Found(NamedTuple):
    """A gradient at the start of a phase."""

    name: str
    parameter: weakref.ref[torch.nn.Parameter]
    gradient: weakref.ref[torch.Tensor]
    version: int

    def is_left(self, *, unchanged: bool = False) -> bool:
        """Return whether its parameter still has it, and it is not zero."""
        parameter = self.parameter()
        now = None if parameter is None else parameter.grad
        if now is None or now is not self.gradient():
            return False
        if unchanged and now._version != self.version:  # noqa: SLF001 - torch's own counter of changes
            return False
        return bool((now.coalesce().values() if now.is_sparse else now).any())


class LeftoverGradients:
    """Those of one worker's phases. `reads`: whether a function's own code reads gradients."""

    def __init__(self, reads: Callable[[str], bool] = lambda _key: False) -> None:
        self._reads = functools.cache(reads)
        self._steps = Counter[str]()
        self._phases = Counter[str]()
        self._found: dict[int, _Found] = {}
        self._had: set[int] = set()  # there when backward came to the parameter
        self._reached: set[int] = set()  # backward has given these a gradient
        self._used: dict[int, str] = {}  # ... and added to what they held
        self._by_hand: dict[str, tuple[int, int]] = {}  # the generation and phase of a rehearsal

    def rehearsed(self, key: str, flags: Iterable[bytes], place: tuple[int, int]) -> None:
        """Function `key` was rehearsed in this generation and phase; `flags`: of each rank,
        whether its code reads gradients."""
        if any(flags):
            self._by_hand[key] = place

    def is_due(self, key: str, place: tuple[int, int]) -> bool:
        """Return whether its next step is to be rehearsed: once, the same on all ranks. Ranks that
        came with another generation would know nothing of it."""
        before = self._by_hand.get(key, place)
        if before == place:
            return False
        del self._by_hand[key]
        return before[0] == place[0]

    @contextmanager
    def watched(self, key: str, modules: ProtectedModules) -> Iterator[None]:
        """Watch one attempt of function `key`."""
        handles: list[torch.utils.hooks.RemovableHandle] = []
        if self._steps[key] < STEPS_WATCHED and self._phases[key] < PHASES_WATCHED:
            for name, parameter in modules.named_parameters():
                if parameter.grad is not None and parameter.requires_grad:
                    handles += self._watch(name, parameter, parameter.grad)
        self._phases[key] += bool(handles)
        self._had.clear()
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
    ) -> list[torch.utils.hooks.RemovableHandle]:
        number = id(parameter)
        found = _Found(name, weakref.ref(parameter), weakref.ref(gradient), gradient._version)  # noqa: SLF001 - torch's own counter of changes
        self._found[number] = found

        def reached(_new: torch.Tensor) -> None:
            self._had.discard(number)
            if found.is_left(unchanged=True):
                self._had.add(number)

        def added(_parameter: torch.Tensor) -> None:  # not where autograd.grad came by
            if number in self._had and number not in self._reached:
                self._used[number] = name
            self._reached.add(number)

        return [
            parameter.register_hook(reached),
            parameter.register_post_accumulate_grad_hook(added),
        ]

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
                # Written to by hand, it may be a new one: the rehearsal of the second step tells.
                is_stale = id(parameter) not in self._reached and found.is_left(
                    unchanged=self._reads(key)
                )
                if is_stale or id(parameter) in self._used:
                    raise PhaseError(
                        f"{key} steps with a gradient of {found.name} that was there before it"
                        " began: a redo, or a replacement worker, begins with zeroes there; compute"
                        " all gradients of a step in its own phase, and clear those that are there"
                        " first (optimizer.zero_grad())"
                    )

    def must_not_be_read(self, key: str, refuse: Callable[[str, str], None]) -> None:
        """Call `refuse` where a phase that does not step may have read such a gradient."""
        if not (self._found and self._reads(key)):
            return
        for found in self._found.values():
            if found.is_left(unchanged=True):
                refuse(
                    f"{key} reads .grad while {found.name} has a gradient of another phase, which"
                    " a redo, or a worker that takes a rank over, does not have",
                    "read gradients in the phase that computes them, and clear them there",
                )
                return
