"""Bodies of a script's loop over batches as attempts at a phase.

A phase is a function, which is run again where it is refused. The body of a `for` statement cannot
be called, but its loop can give it the same batch again. The phase runs on a stack of its own (a
greenlet), and waits there while the script's body runs:

| the script's stack | the phase's stack |
|---|---|
| `next(loader)` draws a batch | an attempt begins, and waits for the body |
| the body runs; its optimizer votes and steps | |
| behind the step: code between phases | the phase is complete; its stack ends |
| the step was refused: the body ends without it | |
| `next(loader)` gives the same batch again | undo, recovery, and the next attempt |

What a refused body does behind its step is undone with the attempt, as far as it is in variables
that a phase restores, or in parameters of `averages`. What it prints is dropped.
"""

from __future__ import annotations

import atexit
import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from outlast.errors import StepRefused, UsageError
from outlast.integrations.framework_loop import FrameworkLoop, import_framework
from outlast.worker.groups import is_transport_error
from outlast.worker.script.value_paths import suspended

_greenlet = import_framework("greenlet", (3, 1))


class LoopBody:
    """Body of a script's loop, which may run several times with one batch."""

    def __init__(self, loop: FrameworkLoop, step: str) -> None:
        """`step`: the script's call that ends a step, for messages."""
        self._loop, self._step = loop, step
        self._worker = loop.session._worker
        self._worker.phases.step_redo.can_call_again = False
        atexit.register(self._close)
        self._script: Any = None  # stacks
        self._phase: Any = None  # None: no attempt is under way
        self._output: redirect_stdout[io.StringIO] | None = None
        self._refusal: BaseException | None = None  # of the attempt under way
        self.averages: list[nn.Module] = []  # protected, and changed behind the step
        self._undo = ExitStack()  # of what a refused body does to them

    @property
    def is_open(self) -> bool:
        """Return whether an attempt is under way."""
        return self._phase is not None

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch, each until its step is committed."""
        for batch in self._loop.session.batches(loader):
            self._script, self._phase = _greenlet.getcurrent(), _greenlet.greenlet(self._run)
            given = self._switch(batch)
            try:
                while given is not None:
                    self._refusal = None
                    yield given[0]
                    if not self.is_open:
                        break
                    given = self._switch(self._end())
                else:
                    self._worker.phases.joining.must_not_read_weights()
            finally:
                self._speak()

    def _switch(self, sent: Any) -> tuple[Any] | None:
        """Continue the phase until it needs the body: return its batch, None at its end."""
        suspended.append(sys._getframe())
        try:
            given = self._phase.switch(sent)
        finally:
            suspended.pop()
        if given is None:
            self._phase = None
        return given

    def _run(self, batch: Any) -> None:
        """Run the phase, on its own stack."""
        self._loop.run(_body, lambda: self._attempt(batch))

    def _attempt(self, batch: Any) -> None:
        """Let the script run the body."""
        if (refusal := self._script.switch((batch,))) is not None:
            raise refusal

    def vote(self, optimizer: Optimizer) -> bool:
        """Vote on the step under way; return whether the optimizer may step."""
        if not self.is_open:
            raise UsageError(
                f"{self._step} outside of a loop over a DataLoader of this module, or twice with"
                " one batch: a replacement worker could not find its place; step once with each"
            )
        try:
            if self._refusal is None:
                vote = self._worker.phases.gate.vote
                assert vote is not None
                vote(optimizer)
        except StepRefused as refused:
            self.refuse(refused)
        return self._refusal is None

    def refuse(self, error: BaseException) -> None:
        """Refuse the attempt under way, in which a collective has ended by `error`. Raise the error
        if other ranks are not its cause."""
        if not (self.is_open and (isinstance(error, StepRefused) or is_transport_error(error))):
            raise error
        if self._refusal is None:
            self._refusal = error
            parameters = [p for each in self.averages for p in each.parameters()]
            # Otherwise the undo takes them for weights that the attempt has changed.
            self._undo.enter_context(_unsafe_preserve_version_counter(tuple(parameters)))
            self._undo.callback(_put_back, [(p, p.detach().clone()) for p in parameters])
        self._silence()

    def commit(self) -> bool:
        """Complete the phase, behind the optimizer's step; return False in a dry attempt."""
        if not self._loop.is_real:
            self._silence()
            return False
        self._switch(None)
        return True

    def _silence(self) -> None:
        if self._output is None:
            self._output = redirect_stdout(io.StringIO())
            self._output.__enter__()

    def _end(self) -> BaseException | None:
        """End a body that was not committed: return why, None for a dry one."""
        if self._output is None:
            raise UsageError(
                f"the loop's body has ended without {self._step}, and the other ranks wait for it:"
                " step with each batch"
            )
        self._speak()
        self._undo.close()
        return self._refusal

    def _speak(self) -> None:
        if self._output is not None:
            self._output.__exit__(None, None, None)
            self._output = None

    def _close(self) -> None:
        """End the phase's stack before the interpreter ends. Report a loop that the script has left
        in a refused step, if it has not ended by an error: a loop cannot tell, when it is left."""
        if self._phase is not None:
            self._worker.failed(
                UsageError(
                    "the script has left its loop in a step that was refused, and would have been"
                    " run again: leave it by manager.current_step()"
                )
            )
            self._phase.throw(_greenlet.GreenletExit)


@torch.no_grad()
def _put_back(parameters: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
    for parameter, value in parameters:
        parameter.copy_(value)


def _body() -> None:
    """Function of the phase, whose code is in the script's loop."""
