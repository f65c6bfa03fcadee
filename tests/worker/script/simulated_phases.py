"""Phases of a script without processes; detection and transfer of variables are real."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch import nn

from outlast import random_state
from outlast.checkpoint.format import codec
from outlast.errors import CodecError, PhaseError
from outlast.worker.phases.step_calls import step_key
from outlast.worker.script.repetitions import Repetition, RepetitionCheck
from outlast.worker.script.script_variables import ScriptVariables

HEAD = """
    import itertools, random, collections, functools, time
    import numpy as np, torch
    from torch import nn
    out = []
"""
NAME = "played"


class RefusedError(Exception):
    pass


class DiedError(Exception):
    """Death of the rank before a phase, with the contents of its slot."""

    def __init__(self, slot: bytes) -> None:
        super().__init__()
        self.slot = slot


class Session:
    """Simulation of a worker's actions around phases.

    `redo`: the phase that is refused once more. `die`: the phase before which the rank dies.
    `slot`, `begin`: the values that a successor gets. `fault`: between the first two attempts of
    a phase that is repeated, or within the second one, which is refused then.
    """

    def __init__(
        self,
        *,
        stop: bool = True,
        redo: int = -1,
        die: int = -1,
        slot: bytes = b"",
        begin: int = 0,
        fault: Literal["", "between", "within"] = "",
    ) -> None:
        self.notes: list[str] = []
        self.told: list[str] = []
        self.protected: list[Any] = [self]
        self.script = ScriptVariables(
            lambda: {id(part) for each in self.protected for part in _parts(each)},
            "stop" if stop else "warn",
            lambda text, warning=True: (self.notes if warning else self.told).append(text),
        )
        self._redo, self._die, self._slot, self._begin = redo, die, slot, begin
        self._settled: set[str] = set()
        self._refusing = False
        self._check = RepetitionCheck()
        self._fault: str = fault
        self._generation = 1
        self.attempts = 0
        self.index = 0

    def batches(self, count: int) -> Iterator[int]:
        for index in range(self._begin, count):
            self.index = index
            self.script.at_top()
            yield self.index

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        key, carried = step_key(function), self.script.carried
        self.script.begin_phase(key, function)
        if self._slot:
            self._settled.add(key)
            carried.restore(codec.decode(self._slot))
            self._slot = b""
        if self.index == self._die:
            raise DiedError(self._own())
        if key not in self._settled:
            self._settled.add(key)
            for _ in range(2):
                self._refuse(function, args)
                self.script.end_rehearsal(key)
            self.script.caches.trust_grown()
        if self.index == self._redo:
            self._refuse(function, args)
            self.script.remove_cache_entries()
            self.script.check_reopened()
        while True:
            before = random_state.snapshot(), self._own()
            self.attempts += 1
            result = function(*args)
            if not self._check.must_repeat(key, self.script.caches, self._look):
                break
            random_state.restore(before[0])
            carried.restore(codec.decode(before[1]))
            if self._fault == "within":
                self._refuse(function, args)
                self.script.remove_cache_entries()
            self._generation += bool(self._fault)
            self._fault = ""
        self._own()
        self.script.complete_phase(key)
        return result

    def _look(self) -> Repetition:
        choices = codec.encode({"random": random_state.snapshot(), "script": self._own()})
        return Repetition(self._generation, choices, {}, {})

    def _own(self) -> bytes:
        carried = self.script.carried
        try:
            return codec.encode(carried.state())
        except CodecError:
            carried.check()
            return codec.encode(carried.state())

    def _refuse(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        before, states = self._own(), random_state.snapshot()
        self._refusing = True
        with contextlib.suppress(RefusedError):
            function(*args)
        self._refusing = False
        random_state.restore(states)
        self.script.carried.restore(codec.decode(before))

    def step(self) -> None:
        """Make the optimizer's step behind the gate."""
        if self._refusing:
            raise RefusedError


class Plain(Session):
    """Session without actions: the script's own results."""

    def batches(self, count: int) -> Iterator[int]:
        yield from range(count)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def _parts(value: Any) -> list[Any]:
    return [value, *value.modules()] if isinstance(value, nn.Module) else [value]


def play(text: str, session: Session) -> list[Any]:
    """Run a script in a new module; return its `out`."""
    module = types.ModuleType(NAME)
    module.__file__ = "<script>"
    sys.modules[NAME] = module
    vars(module)["session"] = session
    try:
        source = textwrap.dedent(HEAD) + textwrap.dedent(text)
        exec(compile(source, "<script>", "exec"), vars(module))
    finally:
        del sys.modules[NAME]
    return vars(module)["out"]


LOOP = """
        for i in session.batches(7):
            session.run(step, i)
        """


def refusal(text: str) -> str:
    """Play a script, with a loop where it has none; return the message of its refusal."""
    try:
        play(text if "session.run" in text else text + LOOP, Session())
    except PhaseError as refused:
        return str(refused)
    raise AssertionError("the script was not refused")
