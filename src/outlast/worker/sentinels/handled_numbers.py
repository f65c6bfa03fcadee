"""Numbers that are not finite and that the script handles itself, so that no optimizer would apply
them: a device that makes one changes the training all the same.

| the script | sign before the vote |
|---|---|
| has a GradScaler that skips the step | its infinities |
| leaves the step out | none has stepped in a function in which one has before |
| cleans gradients | this rank's own contribution; gradients behind backward, of a close view |
| masks a loss | outputs of models, of a close view; a reported loss |

A phase with a sign is run again, once, and accepted then, whatever it gives. Functions whose code
may handle such numbers, or that leave out steps with numbers that are finite, have a close view.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from outlast.controller.sentinels.nonfinite_rule import NO_STEP, NonFiniteDecision, NonFiniteWord
from outlast.worker.groups.work_handles import opaque
from outlast.worker.phases.phase_attempt import PhaseAttempt
from outlast.worker.script.bytecode import handles_nonfinite
from outlast.worker.sentinels.nonfinite_case import NonFiniteCase
from outlast.worker.sentinels.nonfinite_gradients import (
    WHOLE,
    GradientLook,
    OwnContribution,
    nonfinite_gradient,
    takes_hooks,
)
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.tensor_digests import local_shard
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_status import WorkerStatus

_AGAIN = 10  # finite phases of a function that pay for one that is run again and gives the same
DEBT_MAX = 32 * _AGAIN
_SCALER = "gradient under a GradScaler"


class CodeSource(Protocol):
    """The script's variables, as the sentinel uses them."""

    def codes_of(self, key: str) -> list[CodeType]:
        """Return the script's code that a phase of `key` can run."""
        ...


class CloseView:
    """Outputs of models, and gradients behind each backward, in one attempt. `look`: returns the
    result of `nonfinite_gradient`."""

    def __init__(self, look: Callable[[], str]) -> None:
        self._look = look
        self._is_on = self._is_queued = False
        self._outputs: list[tuple[str, torch.Tensor]] = []
        self.gradient = ""  # that was not finite behind a backward

    @contextmanager
    def watched(self, modules: Mapping[str, nn.Module], *, is_on: bool) -> Iterator[None]:
        """Watch the outermost modules in one attempt, if the view `is_on`."""
        self._is_on, self._is_queued, self.gradient = is_on, False, ""
        self._outputs.clear()
        handles = [
            module.register_forward_hook(opaque(self._hook(name)))
            for name, module in modules.items()
            if is_on and takes_hooks(module)
        ]
        try:
            yield
        finally:
            self._is_on = False
            for handle in handles:
                handle.remove()

    def reach_backward(self) -> None:
        """Look at all gradients once this backward has ended, behind the reductions of DDP and
        FSDP2, which end in such callbacks themselves."""
        if self._is_on and not self._is_queued:
            self._is_queued = True
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue]
            engine.queue_callback(lambda: engine.queue_callback(self._look_behind))

    def _look_behind(self) -> None:
        self._is_queued = False
        try:
            self.gradient = self.gradient or self._look()
        except (RuntimeError, TypeError):  # a type without norms; a note says so before the vote
            self._is_on = False

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Mapping):
                output = tuple(output.values())
            for each in output if isinstance(output, (tuple, list)) else [output]:
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    with torch.no_grad():
                        self._outputs.append((f"output of {name}", local_shard(each).isnan().any()))
                    each.register_hook(opaque(lambda _gradient: self.reach_backward()))

        return look

    def output(self) -> str:
        """Return the first output that had a NaN, "" if none had."""
        return next((name for name, is_nan in self._outputs if is_nan), "")


class HandledNumbers:
    """Phases of one worker with numbers that the script handles."""

    def __init__(
        self,
        status: WorkerStatus,
        timeline: WorkerEvents,
        protected_state: Callable[[], ProtectedState],
        share: Callable[[], tuple[int, int]],
    ) -> None:
        """`share`: of a pass over gradients by equal replicas."""
        self._status, self._timeline, self._share = status, timeline, share
        self._protected_state = protected_state
        self.sign = ""  # of this attempt
        self._is_local = self._raised = False
        self._case = NonFiniteCase()
        self._debts = Counter[str]()  # by function: phases that were run again, and not yet paid
        self._close: dict[str, bool] = {}  # by function: it has a close view
        self._scaled: set[int] = set()  # optimizers that have stepped under a GradScaler, by `id`
        self._look = GradientLook()
        self._view = CloseView(self._look_at_all)
        self.own = OwnContribution(self._view.reach_backward)

    def _look_at_all(self) -> str:
        protected = self._protected_state()
        optimizers = {id(each): each for each in protected.optimizers.values()}
        reducers = protected.tree.reducers
        is_alike = reducers and all(each.require_backward_grad_sync for each in reducers)
        share = self._share() if is_alike else WHOLE
        return self._look.first("", optimizers, share, protected)

    @contextmanager
    def attempt(self, attempt: PhaseAttempt, script: CodeSource) -> Iterator[None]:
        """Watch one attempt."""
        self.sign, self._is_local, self._raised = "", False, False
        protected, key = self._protected_state(), attempt.key
        is_phase = attempt.kind in ("step", "eval") and not (attempt.dry or attempt.replayed)
        if is_phase and key not in self._close and protected.knows(key):
            self._close[key] = any(map(handles_nonfinite, script.codes_of(key)))
        is_close = is_phase and (self._close.get(key, False) or self.is_accepted)
        with self._view.watched(protected.modules, is_on=is_close):
            yield

    # --- before the vote ---

    def without_scaled(
        self, stepping: Mapping[int, Optimizer], optimizer: Optimizer
    ) -> dict[int, Optimizer]:
        """Return `stepping` without those that a GradScaler will unscale, or skip, after
        `optimizer`."""
        return {
            number: each
            for number, each in stepping.items()
            if each is optimizer or number not in self._scaled
        }

    def look(
        self, attempt: PhaseAttempt, stepping: Mapping[int, Optimizer], optimizer: Optimizer | None
    ) -> str:
        """Look for a sign, and return it. `stepping`: optimizers that step in this function, or
        have before; `optimizer`: the one that is about to step, None at the end of a phase without
        a vote."""
        if attempt.kind != "step" and not (attempt.kind == "eval" and stepping):
            return ""
        self.sign = self._local_sign(attempt.reports)
        self._is_local = bool(self.sign)
        self.sign = self.sign or self._sign(attempt, stepping, optimizer)
        is_indebted = self._debts[attempt.key] >= DEBT_MAX
        self._raised = bool(self.sign) and not self.is_accepted and not is_indebted
        if self.sign and is_indebted:
            name = attempt.key.partition(":")[0]
            self._timeline.note_once(
                f"many phases of {name} have numbers that are not finite (now: the {self.sign}),"
                f" and the same when they are run again; {name} handles them. At most one in"
                f" {_AGAIN} is run again from here on: what a device adds to others is not found",
                f"many {name}",
            )
        return self.sign

    def _local_sign(self, reports: Mapping[str, float]) -> str:
        if not self.own.is_finite():
            return "contribution to gradients"
        if output := self._view.output():
            return output
        return "" if math.isfinite(reports.get("loss", 0.0)) else "loss that was reported"

    def _sign(
        self, attempt: PhaseAttempt, stepping: Mapping[int, Optimizer], optimizer: Optimizer | None
    ) -> str:
        steps = attempt.undo.scaler_steps
        fused = getattr(optimizer, "found_inf", None)
        is_scaled = steps.has_infinity() or (fused is not None and bool(local_shard(fused).item()))
        if is_scaled or (optimizer is None and not attempt.has_copy and steps.has_ended()):
            return _SCALER
        if optimizer is not None:
            unscaled = self.without_scaled(stepping, optimizer)
            others = [each for number, each in stepping.items() if number not in unscaled]
            if nonfinite_gradient(_gradients(others)):
                return _SCALER
        if gradient := self._view.gradient:
            return gradient
        is_missing = optimizer is None and not attempt.has_copy and stepping
        return NO_STEP if is_missing and not self._close.get(attempt.key) else ""

    @property
    def is_accepted(self) -> bool:
        """Return whether the phase is run again for a sign, and counts then."""
        return self._case.n == self._status.n

    @property
    def is_raised(self) -> bool:
        """Return whether this rank's ballot is meant to differ from all others."""
        return self._raised

    @property
    def is_local(self) -> bool:
        """Return whether the sign is of this rank alone, before any reduction."""
        return self._is_local

    # --- behind an unequal vote ---

    def accept(self, decision: NonFiniteDecision, words: Mapping[int, NonFiniteWord]) -> None:
        """Take the decision that the phase is run again, and counts then."""
        if self.is_accepted:
            return
        concerned = decision.culprits or [seat for seat, word in words.items() if word.handled]
        places = {words[seat].place: None for seat in concerned}
        is_known = any(word.is_accepted for word in words.values())  # by ranks that report it
        mine = None if is_known else decision
        self._case = NonFiniteCase(self._status.n, decision=mine, words={**words}, places=places)

    # --- behind the vote ---

    def stepped(self, attempt: PhaseAttempt, optimizer: Optimizer) -> None:
        """Note whether an optimizer that steps does so under a GradScaler."""
        if attempt.undo.scaler_steps.unscales(optimizer):
            self._scaled.add(id(optimizer))

    def completed(self, step: int, attempt: PhaseAttempt) -> None:
        """Report what came of a phase that was run again."""
        case, self._case = self._case, NonFiniteCase()
        key, sign = attempt.key, self.sign
        if case.n != self._status.n:
            if attempt.kind in ("step", "eval") and not sign:
                self._debts[key] -= self._debts[key] > 0
            return
        decision = case.decision
        if sign == NO_STEP:
            self._close[key] = True
        elif sign:
            self._debts[key] += _AGAIN
        if decision is None:
            return
        is_repeated = self._is_local if decision.culprits else sign not in ("", NO_STEP)
        if decision.detail == NO_STEP:
            self._note_steps(step, sign, decision)
        elif not is_repeated:
            is_first = self._timeline.seat == decision.reporter
            case.report_cure(self._timeline, decision, step, is_first=is_first)
        elif self._timeline.seat == decision.reporter and not attempt.undo.scaler_steps.has_ended():
            name = key.partition(":")[0]
            self._timeline.note_once(
                f"step {step}: {decision.detail}, and the same when the step was run again: the"
                f" data or the model, as it seems; {name} handles it, and such a step counts",
                f"handled by {name}",
            )

    def _note_steps(self, step: int, sign: str, decision: NonFiniteDecision) -> None:
        if not sign and self._timeline.seat == decision.reporter:
            self._timeline.note(
                f"step {step}: {NO_STEP}; run again from the same state, one has: a transient error"
                " of a device, or a choice that does not repeat (a clock, a file)"
            )


def _gradients(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    for each in optimizers:
        for group in each.param_groups:
            yield from (("", p.grad) for p in group["params"] if p.grad is not None)
