"""Sentinel for gradients that are not finite: looked at before each optimizer's step, told with the
vote, and answered by all ranks alike (controller/sentinels/nonfinite_rule.py has the rule).

A rank that finds one casts a ballot that no other rank has. The exchange that follows any unequal
vote carries the words of all ranks; in a healthy step nothing is exchanged.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from msgspec.structs import replace
from torch.optim import Optimizer

from outlast import events
from outlast.config import WorkerSettings
from outlast.controller.sentinels.nonfinite_rule import (
    NEXT,
    NanPolicy,
    NonFiniteDecision,
    NonFiniteWord,
    advice,
    decide,
    parse_nan,
)
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.phase_attempt import PhaseAttempt
from outlast.worker.sentinels.handled_numbers import CodeSource, HandledNumbers
from outlast.worker.sentinels.nonfinite_case import NonFiniteCase
from outlast.worker.sentinels.nonfinite_exceptions import (
    CHECK,
    NonFiniteExceptions,
    write_finding,
)
from outlast.worker.sentinels.nonfinite_gradients import (
    WHOLE,
    GradientLook,
    ModuleOutputs,
    has_own_step,
    nonfinite_weight,
)
from outlast.worker.sentinels.saved_batches import SampleSearch, save_batch
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_status import WorkerStatus


class NonFiniteOwner(Protocol):
    """The phase runner, as the sentinel uses it."""

    def protected_state(self) -> ProtectedState:
        """Return the protected state."""
        ...

    @property
    def script(self) -> CodeSource:
        """Return the script's variables."""
        ...

    def try_alone(self, call: Callable[[], Any], key: str) -> None:
        """Run a phase's function without the other ranks, and undo it."""
        ...

    def report_fault(self, detail: str, kind: events.FaultKind, *, repeats: bool = False) -> None:
        """Report a fault that closes this generation."""


class NonFiniteSentinel:
    """Sentinel of one worker; without a launcher it does nothing."""

    def __init__(
        self,
        status: WorkerStatus,
        groups: GroupRegistry,
        timeline: WorkerEvents,
        owner: NonFiniteOwner,
    ) -> None:
        self._status, self._groups, self._timeline = status, groups, timeline
        self._owner = owner
        self._policy = NanPolicy(watches=False)
        self._run_dir = Path()
        self._device = ""
        self._batch: Callable[[], Any] = lambda: None  # the newest batch of the loop
        self._outputs = ModuleOutputs()
        self._case = NonFiniteCase()
        self.exceptions = NonFiniteExceptions(status)
        self._skipped = 0  # batches in a row
        self._found = ""
        self._is_custom = False
        self._is_behind = False  # weights were looked at, behind several steps
        self._is_blind = False
        self.share: Callable[[], tuple[int, int]] = lambda: WHOLE  # of a pass by equal replicas
        self._look = GradientLook()
        state = owner.protected_state
        self._handled = HandledNumbers(status, timeline, state, lambda: self.share())
        self._own = self._handled.own
        self._stepping: dict[str, dict[int, Optimizer]] = {}  # by function, those behind one vote
        self._due: NonFiniteDecision | None = None  # to be looked into before the next attempt

    def configure(self, settings: WorkerSettings | None, batch: Callable[[], Any]) -> None:
        """Take the settings of the run, and how to get the newest batch of the loop. `watch` is to
        follow."""
        self._batch = batch
        self._own.unwatch()
        if settings is not None:
            self._policy, self._run_dir = parse_nan(settings.nan), Path(settings.run_dir)

    def watch(self, protected: ProtectedState, device: torch.device) -> None:
        """Watch this rank's own contributions to gradients, on its device."""
        self._device = "cpu" if device.type == "cpu" else f"GPU {device.index or 0}"
        if self._policy.watches:
            self._own.watch(protected.modules)

    @contextmanager
    def attempt(self, attempt: PhaseAttempt) -> Iterator[None]:
        """Watch one attempt; one that is run again, closely."""
        self._found, self._is_behind = "", False
        self._look.forget()
        self._own.clear()
        if not self._policy.watches:
            yield
            return
        is_again = self._case.n == self._status.n or self.exceptions.failures
        modules = self._owner.protected_state().modules if is_again else {}
        with self._handled.attempt(attempt, self._owner.script), self._outputs.watched(modules):
            yield

    # --- before the vote ---

    def look(self, attempt: PhaseAttempt, optimizer: Optimizer) -> None:
        """Look at the gradients of the optimizer that is about to step, and of those that step
        behind the same vote in this function. A GradScaler skips its optimizers by itself; a fused
        one that has `found_inf` does so in its step."""
        key, protected = attempt.key, self._owner.protected_state()
        known = {**self._stepping.get(key, {}), id(optimizer): optimizer}
        if not hasattr(optimizer, "found_inf"):
            stepping = self._handled.without_scaled(known, optimizer)
            self._is_custom = any(map(has_own_step, stepping.values()))
            self._find(lambda: self._look.first(key, stepping, self.share(), protected))
        self._look_for_signs(attempt, known, optimizer)

    def look_behind(self, attempt: PhaseAttempt) -> None:
        """Look at the weights that a phase with an undo copy leaves: gradients in it may be tried
        and dropped. If its batch is skipped, all of that is undone."""
        undo, known = attempt.undo, self._stepping.get(attempt.key, {})
        if attempt.has_copy:
            self._is_custom, self._is_behind = False, True
            if self._course == "skip":
                undo.put_back_training()
            self._find(lambda: nonfinite_weight(self._owner.protected_state(), undo.weights()))
        self._look_for_signs(attempt, known, None)

    def _look_for_signs(
        self, attempt: PhaseAttempt, known: dict[int, Optimizer], optimizer: Optimizer | None
    ) -> None:
        if not self._found:
            self._checked(lambda: self._handled.look(attempt, known, optimizer))

    def _find(self, look: Callable[[], str]) -> None:
        self._found = self._checked(look)

    def _checked(self, look: Callable[[], str]) -> str:
        """Return what was found; "" where nothing is looked at."""
        if not self._policy.watches or self._is_blind or self._course:
            return ""
        try:
            return look()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:  # a type without norms: it cannot tell
            self._is_blind = True
            self._timeline.note_once(
                f"gradients cannot be checked for numbers that are not finite ({error});"
                " training goes on without this check",
                CHECK,
            )
            return ""

    def explain(
        self, fault: events.Fault, key: str, error: Exception, reports: Mapping[str, float]
    ) -> events.Fault:
        """Count an attempt that an exception of the script has ended before the vote; return its
        fault, with what was not finite, if anything was."""
        if not self._policy.watches:
            return fault
        protected = self._owner.protected_state()
        stepping = self._stepping.get(key) or {id(o): o for o in protected.optimizers.values()}
        try:
            found = self._look.first(key, stepping, WHOLE, protected)
            is_own, evidence = self._evidence(reports)
        except (RuntimeError, TypeError):  # nobody can tell: the exception itself is the cause
            return fault
        mine = replace(self._mine, found=found or evidence, is_own=is_own, evidence=evidence)
        text = self.exceptions.add(self._timeline.seat, mine, error)
        if text and self.exceptions.failures > 1:
            step, rank = self._status.step + 1, self._timeline.seat
            text += f"; {save_batch(self._run_dir, step, rank, self._batch())}"
        detail = f"{fault.detail[:800]}; {text}"
        return replace(fault, kind=CHECK, detail=detail) if text else fault

    def stays(self) -> bool:
        """Return whether this rank goes on here; it asks for another device if it shall not."""
        why = self.exceptions.request(self._timeline.seat) if self._policy.reruns else ""
        if why:
            self._owner.report_fault(why, CHECK)
        return not why

    @property
    def _course(self) -> str:
        return self._case.course if self._case.n == self._status.n else ""

    @property
    def is_raised(self) -> bool:
        """Return whether this rank's ballot is meant to differ from all others."""
        return bool(self._found) or self._handled.is_raised

    def ballot(self) -> str:
        """Return what this rank's ballot has besides the place."""
        if self._course:
            return f" {self._course}"
        return f" not finite, rank {self._timeline.seat}" if self.is_raised else ""

    def word(self, reports: Mapping[str, float]) -> bytes:
        """Return this rank's word for the exchange behind an unequal vote."""
        if not self._policy.watches:
            return b""
        if self._look.is_partial:
            self._found = self._look.again(self._owner.protected_state())
        sign = "" if self._found else self._handled.sign
        is_own, evidence = self._evidence(reports) if self._found or sign else (False, "")
        is_known = self._case.n == self._status.n
        word = replace(
            self._mine,
            tries=self._case.tries if is_known else 0,
            found=self._found,
            is_own=is_own or bool(sign and self._handled.is_local),
            backward=max(0, self._own.first_nonfinite()) if is_own and self._is_behind else 0,
            evidence=evidence,
            course="skip" if self._course == "skip" else "apply" if self._course else "",
            skipped=self._skipped,
            is_custom=self._is_custom,
            places=tuple(self._case.places) if is_known else (),
            moved=tuple(self._case.moved) if is_known else (),
            handled=sign,
            is_accepted=self._handled.is_accepted,
        )
        return msgspec.msgpack.encode(word)

    def _evidence(self, reports: Mapping[str, float]) -> tuple[bool, str]:
        """Return whether this rank's own contribution is not finite, and by what."""
        loss, output = reports.get("loss", 0.0), self._outputs.first_nonfinite()
        is_own = not self._own.is_finite() or not math.isfinite(loss)
        if not self._own.has_run:  # FSDP2 reduces without autograd's hooks
            is_own = is_own or bool(output)
        if output or not math.isfinite(loss):
            return is_own, output or f"loss={loss}"
        return is_own, "its own contribution, before the reduction" if is_own else ""

    # --- behind an unequal vote ---

    def conclude(self, words: Sequence[bytes]) -> str:
        """Take the words of all present ranks; return what happens next, "" if nothing does."""
        seats = self._groups.presence.of(range(self._groups.world))
        decoded = {
            seat: msgspec.msgpack.decode(word, type=NonFiniteWord) if word else NonFiniteWord()
            for seat, word in zip(seats, words, strict=True)
        }
        decision = decide(decoded, self._policy)
        if decision is None:
            return ""
        if decision.course == "accept":
            self._handled.accept(decision, decoded)
            return f"{decision.detail}: {NEXT['accept']}"
        if self._case.n != self._status.n:
            self._case = NonFiniteCase(self._status.n)
        case = self._case
        known = case.course
        case.tries, case.decision, case.words = decision.tries, decision, decoded
        concerned = decision.culprits or [seat for seat, word in decoded.items() if word.found]
        places = [place for word in decoded.values() for place in word.places]
        case.places |= dict.fromkeys([*places, *(decoded[seat].place for seat in concerned)])
        case.moved.update(*(word.moved for word in decoded.values()))
        if decision.course in ("skip", "apply"):
            case.course = decision.course
        text = f"{decision.detail or 'decided before'}: {NEXT[decision.course]}"
        if decision.course == "move" and self._timeline.seat in decision.culprits:
            self._owner.report_fault(text, CHECK)
        elif decision.course in ("skip", "apply", "stop") and not known:
            self._due = decision if self._timeline.seat == decision.reporter else None
        return text

    def investigate(self, call: Callable[[], Any], key: str) -> None:
        """Save the batch of a decision, look for the sample, and report both; between attempts,
        while the other ranks wait for this one."""
        decision, self._due = self._due, None
        if decision is None or not self._status.is_open:
            return
        step = self._status.step + 1
        batch = save_batch(self._run_dir, step, self._timeline.seat, self._batch())
        sample = ""
        if self._case.tries > 1 and not self._owner.protected_state().reducers.is_static:
            sample = SampleSearch(lambda each: self._is_finite(each, key)).describe(call)
        cause = self._case.cause(decision, self._policy)
        parts = [f"step {step}: {decision.detail}", cause, batch, sample]
        text = "; ".join(filter(None, parts))
        if decision.course == "stop":
            self._owner.report_fault(f"{text}{advice(self._policy)}", CHECK, repeats=True)
        elif decision.course == "apply":
            self._timeline.note_once(
                f"{text}; the optimizer has a step of its own, which may handle this, so that it"
                " steps; to stop or to skip such batches, give --nan stop or --nan skip:K",
                "applied",
            )
        else:
            write_finding(self._timeline, self._mine, "warn", text)

    @property
    def _mine(self) -> NonFiniteWord:
        """This rank's place."""
        return NonFiniteWord(
            worker=self._timeline.worker, host=platform.node(), device=self._device
        )

    def _is_finite(self, call: Callable[[], Any], key: str) -> bool:
        self._owner.try_alone(call, key)
        return self._own.is_finite() and not self._outputs.first_nonfinite()

    # --- behind the vote ---

    def before_step(self, attempt: PhaseAttempt, optimizer: Optimizer) -> None:
        """Let an optimizer step without gradients, which changes nothing, if the batch is skipped;
        every step behind a vote comes here."""
        self._stepping.setdefault(attempt.key, {})[id(optimizer)] = optimizer
        self._handled.stepped(attempt, optimizer)
        if self._course == "skip":
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def connected(self, joiners: Collection[int]) -> None:
        """Note which ranks go on elsewhere, since a generation is connected."""
        self.exceptions.connected(joiners)
        if self._case.decision is not None:
            self._case.moved |= set(joiners).intersection(self._case.decision.culprits)

    def completed(self, step: int, attempt: PhaseAttempt) -> None:
        """Report what came of a case, since its phase is complete here."""
        self._handled.completed(step, attempt)
        is_gated = attempt.is_gated or attempt.has_copy
        case, self._case = self._case, NonFiniteCase()
        if self.exceptions.failures:
            seats = self._groups.presence.of(range(self._groups.world))
            self.exceptions.report_cure(self._timeline, step, seats)
        if case.n != self._status.n or case.decision is None:
            self._skipped = 0 if is_gated else self._skipped
            return
        seats = self._groups.presence.of(range(self._groups.world))
        is_first = self._timeline.seat == min(set(seats) - case.moved, default=seats[0])
        self._skipped = case.decision.skipped + 1 if case.course == "skip" else 0
        if case.course == "skip" and is_first:
            self._timeline.emit(
                events.BatchSkipped(
                    t_ns=self._timeline.now_ns(),
                    worker=self._timeline.worker,
                    seat=case.decision.reporter,
                    step=step,
                    row=self._skipped,
                    detail=case.decision.detail,
                )
            )
        elif not case.course:
            case.report_cure(self._timeline, case.decision, step, is_first=is_first)
