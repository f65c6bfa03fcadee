"""Phases: a function that is run, put back, and run again until one generation has completed it.

The life of an attempt: remember what it may touch (`UndoCopy`, and the slot `before:n`) -> run the
function -> at its first optimizer step, or at its end, write the slot `after:n+1` and vote -> apply
-> check that nothing random or rank-specific changed after the vote -> n+1 phases are complete.
Otherwise: undo, and another attempt. With an undo copy, optimizers step freely before the vote.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.optim import Optimizer

from outlast.controller.fault_spec import Where
from outlast.errors import GroupError, PhaseError, StepRefused, UsageError
from outlast.events import Fault
from outlast.random_state import Generator
from outlast.transport.worker_page import Page
from outlast.worker.groups import GroupRegistry, is_transport_error
from outlast.worker.phases import commit_gate
from outlast.worker.phases.catch_up import REHEARSALS, CatchUp, is_evidence
from outlast.worker.phases.leftover_gradients import LeftoverGradients
from outlast.worker.phases.phase_attempt import (
    AttemptUndone,
    Kind,
    PhaseAttempt,
    UndoCopy,
    WrittenWeights,
)
from outlast.worker.phases.script_progress import LOST, ProgressSlots, ScriptProgress, keep_result
from outlast.worker.phases.worker_recovery import WorkerRecovery
from outlast.worker.script import repetitions
from outlast.worker.script.repetitions import RepetitionCheck
from outlast.worker.script.script_variables import ScriptVariables
from outlast.worker.state.audited_state import replica_set
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_status import WorkerStatus


class PhaseRunner:
    """Runs phases for one worker. `watch` is called at named points (fault injection)."""

    def __init__(
        self,
        *,
        status: WorkerStatus,
        groups: GroupRegistry,
        recovery: WorkerRecovery,
        timeline: WorkerEvents,
        place: ScriptProgress,
        page: Page,
        watch: Callable[[Where], None],
        script: ScriptVariables,
        alone: bool,
    ) -> None:
        self._status, self._groups, self._recovery = status, groups, recovery
        self._timeline, self._place = timeline, place
        self._slots = ProgressSlots(page, place, status, self._need_protected, self._note_once)
        self._watch, self.script, self._alone = watch, script, alone
        self.protected: ProtectedState | None = None
        self.gate = commit_gate.CommitGate(self._is_protected)
        self.joining = CatchUp(
            status=status, groups=groups, recovery=recovery, timeline=timeline, place=place,
            protected=self._need_protected, dry_attempt=self._dry_attempt,
            trouble=lambda detail, kind: status.report_fault(self._fault(detail, kind)),
            retire=lambda error, kind="": self._retire(error, "broken", kind),
        )  # fmt: skip
        self.on_record: Callable[[], None] = lambda: None
        self.save_as_asked: Callable[[], None] = lambda: None
        self.before_vote: Callable[[], None] = lambda: None
        self.on_complete: Callable[[Kind], None] = lambda _kind: None
        self.aside = False  # a phase that the script did not call is being made
        self.attempt: PhaseAttempt | None = None
        self._rehearsals: dict[str, int] = {}
        self._repetitions = RepetitionCheck()
        self._leftovers = LeftoverGradients(script.reads_gradients)
        self._ungated: set[str] = set()  # functions that have ended a phase without a step
        self._noted: set[str] = set()
        self._recorded = False

    def _is_protected(self, optimizer: Any) -> bool:
        optimizers = self.protected.optimizers.values() if self.protected else ()
        return any(optimizer is o for o in optimizers)

    @property
    def is_real(self) -> bool:
        """False in dry runs and rehearsals."""
        return not (self._status.rehearsing or (self.attempt is not None and self.attempt.dry))

    def generators(self) -> dict[str, Generator]:
        """Return the generators that a phase may draw from."""
        return self.protected.generators if self.protected else {}

    # --- one phase ---

    def run(
        self, call: Callable[[], Any], *, key: str, kind: Kind,
        function: Callable[..., Any] | None = None, undo: bool = False,
    ) -> Any:  # fmt: skip
        """Run `call`, which calls the script's `function`, as the next phase; returns what it
        returned in the generation that has it. `undo`: copy the state before."""
        if self.attempt is not None:
            raise PhaseError(f"session.run inside session.run ({key} inside {self.attempt.key})")
        assert self.protected is not None
        self.protected.check_unchanged()
        self.gate.guarding = True
        self._groups.start_phases()
        if not self._recorded:
            self._recorded = True
            self.on_record()
        if function is not None:
            self.script.meet(key, function)
        replayed = self.joining.replay(call, key, kind=kind)
        if replayed is not None:
            return replayed[0]
        while True:
            self.joining.arrive(call, key)
            if self._status.requested and kind != "checkpoint":
                self.save_as_asked()
                continue  # to take the dry steps that a successor put off, and look again
            try:
                return self._try(call, key, kind, undo)
            except AttemptUndone:
                continue

    def _begin(self, key: str, kind: Kind, undo: bool) -> PhaseAttempt:
        protected = self._need_protected()
        kept = UndoCopy(protected, key, everything=undo and not self._alone)
        attempt = PhaseAttempt(kind, key, kept, self._timeline.now_ns(), has_copy=undo)
        if not undo:
            new = not protected.knows(key)
            attempt.weights = WrittenWeights(protected, everything=new, turn=self._status.n)
        return attempt

    def _try(self, call: Callable[[], Any], key: str, kind: Kind, undo: bool) -> Any:
        status, attempt = self._status, self._begin(key, kind, undo)
        self._slots.write_before(attempt.undo.own_bytes)
        status.rehearsing = not self._alone and self._is_rehearsal(attempt)
        name = f"{kind} {key}" if kind in ("step", "eval") else kind
        try:
            if kind == "checkpoint":
                status.enter_attempt("checkpoint", name)
            else:
                status.enter_attempt("dry" if status.rehearsing else "running", name)
        except StepRefused:
            raise AttemptUndone from None
        try:
            with self._inside(attempt), self._groups.phase():
                result = call()
                if not attempt.vote_ns:
                    self._vote_at_end(attempt)
                self._after_vote(attempt)
        except StepRefused as refused:
            self._refused(attempt, str(refused))
            raise AttemptUndone from None
        except Exception as error:  # noqa: BLE001 - classified below; nothing is swallowed
            self._failed(attempt, error)
            raise AttemptUndone from None
        finally:
            status.rehearsing = False
        self._watch("done")
        self._complete(attempt, result)
        return result

    def _note_once(self, text: str, about: str = "") -> None:
        if (about or text) not in self._noted:
            self._noted.add(about or text)
            self._timeline.note(text)

    @contextmanager
    def _inside(self, attempt: PhaseAttempt) -> Iterator[None]:
        self.attempt, self.gate.ask = attempt, self._ask
        self.gate.is_free = attempt.dry or attempt.has_copy
        try:
            with self._leftovers.watched(attempt.key, self._need_protected().tree):
                yield
        finally:
            self.attempt, self.gate.ask = None, None

    # --- the vote ---

    def _ask(self, optimizer: Optimizer) -> None:
        """A protected optimizer wants to step: returns when it may, raises otherwise."""
        attempt = self.attempt
        assert attempt is not None
        if not attempt.dry:
            self._leftovers.must_not_be_used(attempt.key, optimizer)
        if not (self.gate.is_free or attempt.vote_ns):
            self._settle(attempt)
            self._rehearse(attempt)
            self._vote(attempt, gated=True)

    def _vote_at_end(self, attempt: PhaseAttempt) -> None:
        """No optimizer's step has brought the vote."""
        commit_gate.must_leave_no_gradient(attempt, self._need_protected())
        if attempt.kind == "eval":
            self._leftovers.must_not_be_read(attempt.key, self.script.refuse)
        self._settle(attempt)
        if attempt.has_copy:
            self._rehearse(attempt)
        self._vote(attempt, gated=False)
        self._ungated.add(attempt.key)

    def _settle(self, attempt: PhaseAttempt) -> None:
        commit_gate.must_not_have_written(attempt)
        self._need_protected().reducers.settle()

    def _rehearse(self, attempt: PhaseAttempt) -> None:
        """Raises StepRefused in a function's first attempts, which are compared with each other."""
        key, place = attempt.key, (self._status.opened, self._status.n)
        is_new = not self._alone and key not in self.joining.settled
        if is_new or self._leftovers.is_due(key, place):
            self._rehearsals[key] = self._rehearsals.get(key, 0) + 1
            attempt.rehearsed = True
            self._compare(attempt)
            if self._rehearsals[key] == REHEARSALS:
                reads = b"." * self.script.reads_gradients(key)
                self._leftovers.rehearsed(key, self._groups.gather_bytes(reads), place)
            raise StepRefused("rehearsal")
        if self._repetitions.awaits(key):
            self._compare(attempt)

    def _compare(self, attempt: PhaseAttempt) -> None:
        """Hold what the attempt has computed against the attempt before it."""
        protected, key, kept = self._need_protected(), attempt.key, self._repetitions
        choices, named = protected.own_choices(), protected.tree.named_parameters()
        now = repetitions.look(self._status.opened, choices, attempt.reports, named)
        found = kept.rehearsed(key, now) if attempt.rehearsed else kept.first_step(key, now)
        if found is not None:
            self.script.differs(key, found, zeroed=self._rehearsals[key] > REHEARSALS)

    def _is_rehearsal(self, attempt: PhaseAttempt) -> bool:
        """Return whether the attempt may be refused at its gate and must not be cut half-way."""
        is_step = attempt.kind == "step" and attempt.key not in self._ungated
        is_gated = is_step or attempt.has_copy or attempt.key in self._rehearsals
        return is_gated and attempt.key not in self.joining.settled

    def _vote(self, attempt: PhaseAttempt, *, gated: bool) -> None:
        """Returns when phase n+1 is won; `gated` before an optimizer steps, else at the phase's
        end. Raises StepRefused; PhaseError for a broken contract."""
        protected, local = self._need_protected(), self._need_protected().local
        commit_gate.must_have_waited(self._groups.unfinished(), attempt)
        self.before_vote()
        status, n = self._status, self._status.n + 1
        attempt.choices = protected.own_choices()
        attempt.is_gated = gated
        attempt.waits = local.must_wait(attempt.key) if gated else bool(local.differing)
        self._slots.write_after(attempt, aside=self.aside)
        place = f"{n} {attempt.kind} {attempt.key}"
        compares = gated or attempt.has_copy
        ballot = f"{place} {local.ballot()}" if compares else place
        status.enter_attempt("voting")
        try:
            self._watch("vote")
            agreed = self._groups.vote(ballot)
        except (Exception, StepRefused) as error:  # noqa: BLE001 - whatever it is: the yes may be out
            self._undecided(error)
        else:
            if not agreed:
                status.enter("running")
                self._dispute(attempt, place)
        if compares:
            local.won()
        attempt.vote_ns = self._timeline.now_ns()
        status.won(self._step_after(attempt))
        self._groups.seal()
        protected.reducers.commit()
        protected.buffers.mark_vote()

    def _dispute(self, attempt: PhaseAttempt, place: str) -> None:
        """The ballots were not the same: all ranks find out why, and begin the phase again where
        what they hold beside the weights differs."""
        protected = self._need_protected()
        if not protected.local.dispute(
            place, replica_set(protected), self._groups.gather_bytes, self._note_once
        ):
            raise PhaseError(
                f"the ranks do not stand in the same phase: this one votes on phase"
                f" {self._status.n + 1} ({attempt.key}, {attempt.kind}); every rank must make the"
                " same calls of session.run in the same order"
            )
        attempt.disputed = True
        self._slots.forget_before()
        raise StepRefused("the ranks have agreed on what differs by rank")

    def _undecided(self, error: BaseException) -> None:
        """The yes may have reached the others: nothing but the decision says what came of it."""
        if self._alone:
            raise error
        is_cut = isinstance(error, (GroupError, StepRefused)) or is_transport_error(error)
        self._status.report_prepared(self._fault(error, "transport" if is_cut else "raised"))
        if self._recovery.vote_outcome() == "redo":
            self._status.enter("running")
            raise StepRefused("the vote's answer was lost and nobody has applied")

    def _after_vote(self, attempt: PhaseAttempt) -> None:
        if attempt.dry:
            return
        self._need_protected().completed(attempt.key)
        self.script.completed(attempt.key)
        commit_gate.must_not_have_chosen(attempt, self._need_protected().own_choices())
        commit_gate.must_have_waited(self._groups.unfinished(), attempt)

    def _step_after(self, attempt: PhaseAttempt) -> int:
        return self._status.step + (attempt.kind == "step")

    def _complete(self, attempt: PhaseAttempt, result: Any) -> None:
        status, n, step = self._status, self._status.n + 1, self._step_after(attempt)
        self.joining.reduced = self.joining.reduced or attempt.key in self.joining.settled
        kept = keep_result(result)
        if kept == LOST:
            self._note_once(
                f"what {attempt.key} returns ({type(result).__name__}) cannot be written down (more"
                " than 64 KiB, or a type of its own), and no successor can know it: return plain"
                " numbers, or report them inside the phase"
            )
        self._slots.write_end(attempt, None if kept == LOST else kept, aside=self.aside)
        if attempt.kind != "checkpoint":  # no call of the script's, which a walk would answer
            self.joining.completed(kept)
        self._timeline.phase(n, step, attempt.kind, attempt.begin_ns, attempt.vote_ns)
        self._timeline.metrics(step, attempt.reports)
        status.loss = attempt.reports.get("loss", status.loss)
        shared = attempt.kind in ("epoch", "draw", "checkpoint")
        known = kept if shared or is_evidence(result) else LOST
        status.completed(step=step, result=known, shared=shared)
        self.on_complete(attempt.kind)

    # --- what did not work ---

    def _refused(self, attempt: PhaseAttempt, reason: str) -> None:
        self._timeline.refused(
            self._status.n + 1, self._step_after(attempt), attempt.kind, attempt.begin_ns, reason
        )
        if attempt.vote_ns:
            self._retire(GroupError(reason), "torn")
        if why := attempt.undo.put_back():
            self._retire(GroupError(why), "broken")
        key, settled = attempt.key, self.joining.settled
        if attempt.rehearsed and key not in settled and self.script.rehearsed(key):
            self._repetitions.widened(key)
        if attempt.rehearsed or attempt.disputed:
            self._need_protected().reducers.restore()  # as other ranks do at the opening
        if self._rehearsals.get(key) == REHEARSALS and key not in settled:
            settled.add(key)
            self.on_record()
        self._status.enter("idle")

    def _failed(self, attempt: PhaseAttempt, error: Exception) -> None:
        if self._alone:
            raise error
        if attempt.vote_ns:
            self._retire(error, "torn")
        self._status.enter("running")  # an error before the vote was cast: nothing is undecided
        if self._status.is_open:
            kind = "transport" if is_transport_error(error) else "raised"
            if isinstance(error, UsageError) and kind == "raised":
                kind = "contract"
            self._status.report_fault(self._fault(error, kind))
        self._refused(attempt, f"{type(error).__name__}: {error}"[:500])

    def _retire(self, error: BaseException, state: str, kind: str = "") -> NoReturn:
        """This process cannot go on: say so, and wait to be replaced."""
        if self._alone:
            raise error
        kind = kind or ("contract" if isinstance(error, UsageError) else "torn")
        self._status.report_loss(state, self._fault(error, kind))
        while True:  # the controller has us killed; its deadline bounds this wait
            self._status.next_message(self._recovery.patience_s)

    def _fault(self, error: BaseException | str, kind: Any) -> Fault:
        detail, text = error, ""
        if isinstance(error, BaseException):
            detail = f"{type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error)) if kind != "transport" else ""
        return self._status.fault(
            kind, str(detail), text, self._recovery.seat, self._timeline.now_ns()
        )

    # --- a successor's way in ---

    @contextmanager
    def _dry_attempt(self, key: str) -> Iterator[None]:
        attempt = PhaseAttempt(
            "step", key, UndoCopy(self._need_protected()), self._timeline.now_ns(), dry=True
        )
        try:
            with self._inside(attempt):
                yield
        finally:
            attempt.undo.put_back()

    def _need_protected(self) -> ProtectedState:
        assert self.protected is not None
        return self.protected
