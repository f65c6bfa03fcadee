"""Phases: functions that are attempted and undone until one generation has completed them.

An attempt: copy the state that it may change (`UndoCopy`, and the slot `before:n`) -> run the
function -> at its first optimizer step, or at its end, write the slot `after:n+1` and vote -> apply
-> check that nothing random or rank-specific changed after the vote -> n+1 phases are complete.
Otherwise: undo, and another attempt. With an undo copy, optimizers step freely before the vote.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from msgspec.structs import replace
from torch.optim import Optimizer

from outlast.controller.fault_spec import Where
from outlast.errors import GroupError, StepRefused, UsageError
from outlast.events import Fault, FaultKind
from outlast.random_state import Generator
from outlast.worker.groups import GroupRegistry, fault_kind, is_transport_error
from outlast.worker.phases import commit_gate, phase_attempt
from outlast.worker.phases.catch_up import CatchUp
from outlast.worker.phases.lost_results import is_evidence
from outlast.worker.phases.phase_attempt import AttemptUndone, Kind, PhaseAttempt, WrittenWeights
from outlast.worker.phases.script_progress import LOST, ProgressSlots, ScriptProgress, keep_result
from outlast.worker.phases.step_redo import StepRedo
from outlast.worker.phases.step_rehearsal import StepRehearsal
from outlast.worker.phases.worker_recovery import WorkerRecovery
from outlast.worker.script.script_variables import ScriptVariables
from outlast.worker.sentinels.memory_sentinel import MemorySentinel, is_out_of_memory
from outlast.worker.sentinels.neighbour_replay import NeighbourReplay
from outlast.worker.sentinels.nonfinite_sentinel import NonFiniteSentinel
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
        watch: Callable[[Where], None],
        script: ScriptVariables,
        standalone: bool,
    ) -> None:
        self._status = status
        self._groups = groups
        self._recovery = recovery
        self._timeline = timeline
        self._place = place
        protected, note = self.protected_state, timeline.note_once
        self.slots = ProgressSlots(place, status, groups, protected, note)
        self._watch = watch
        self.script = script
        self._standalone = standalone
        self.protected: ProtectedState | None = None
        self.gate = commit_gate.CommitGate(self._is_protected, status.page.put_refusal)
        self.joining = CatchUp(status, groups, recovery, timeline, place, self)
        self.step_redo = StepRedo(status, place, self)
        self.on_record: Callable[[], None] = lambda: None
        self.save_on_request: Callable[[], None] = lambda: None
        self.before_vote: Callable[[bool], int] = lambda _compares: 0
        self.on_dispute: Callable[[], str] = lambda: ""
        self.idle_ranks: Callable[[Kind], frozenset[int]] = lambda _kind: frozenset()
        self.on_complete: Callable[[Kind], None] = lambda _kind: None
        self.aside = False  # True during a phase that the script did not call
        self.attempt: PhaseAttempt | None = None
        self.rehearsal = StepRehearsal(
            status, groups, self.joining, script, protected, standalone=standalone
        )
        self.nonfinite = NonFiniteSentinel(status, groups, timeline, self)
        self.memory = MemorySentinel(status, timeline, self, lambda: self.is_real)
        self.replays = NeighbourReplay(status, groups, timeline, self)
        self._recorded = False

    def _is_protected(self, optimizer: Any) -> bool:
        known = self.protected.optimizers.values() if self.protected else ()
        return any(optimizer is each for each in known)

    @property
    def is_real(self) -> bool:
        """False in dry runs and rehearsals."""
        return not (self._status.rehearsing or (self.attempt and self.attempt.dry))

    def generators(self) -> dict[str, Generator]:
        """Return the generators that a phase may draw from."""
        return self.protected.generators if self.protected else {}

    # --- one phase ---

    def run(
        self, call: Callable[[], Any], *, key: str, kind: Kind,
        function: Callable[..., Any] | None = None, undo: bool = False,
    ) -> Any:  # fmt: skip
        """Run `call`, which calls the script's `function`, as the next phase; return its result in
        the generation that completes it. `undo`: copy the state before."""
        commit_gate.must_not_nest("session.run", self.attempt)
        self.protected_state().check_unchanged()
        self.script.check_hooks(self.protected_state().tree.new_hook())
        self.gate.guarding = True
        self._groups.start_phases()
        if not self._recorded:
            self._recorded = True
            self.on_record()
        self.script.begin_phase(key, function)
        replayed = self.joining.replay(call, key, kind=kind)
        if replayed is not None:
            return replayed[0]
        while True:
            self.nonfinite.investigate(call, key)
            self.joining.prepare_phase(call, key)
            if self._status.requested and kind != "checkpoint":
                self.save_on_request()
                continue  # a successor takes its postponed dry steps first
            with suppress(AttemptUndone):
                if self.nonfinite.stays() and self.replays.examine(call, key):
                    return self.run_attempt(call, key, kind, undo)

    def _begin(self, key: str, kind: Kind, undo: bool) -> PhaseAttempt:
        protected, status = self.protected_state(), self._status
        if kind in ("step", "eval"):
            self.script.files.forget()  # those of an earlier attempt
        is_new = not protected.knows(key)
        exact = not is_new and self.script.writes_unversioned(key, protected.tree)
        whole = undo and not self._standalone
        copy = phase_attempt.UndoCopy(protected, key, everything=whole, exact=exact)
        everything = is_new or exact
        weights = None if undo else WrittenWeights(protected, everything=everything, turn=status.n)
        return PhaseAttempt(kind, key, copy, self._timeline.now_ns(), weights, has_copy=undo)

    def run_attempt(self, call: Callable[[], Any], key: str, kind: Kind, undo: bool) -> Any:
        """Run one attempt at the next phase. Raises AttemptUndone."""
        status = self._status
        self.memory.begin()
        attempt = self._begin(key, kind, undo)
        self.slots.write_before(attempt.undo.own_bytes)
        status.rehearsing = self.rehearsal.is_rehearsal(attempt)
        name = f"{kind} {key}" if kind in ("step", "eval") else kind
        state = "checkpoint" if kind == "checkpoint" else "dry" if status.rehearsing else "running"
        try:
            status.enter_attempt(state, name)
        except StepRefused:
            raise AttemptUndone from None
        self.step_redo.begin(attempt, call, self.slots.base)
        self._groups.presence.begin_phase(self.idle_ranks(kind), is_real=not status.rehearsing)
        try:
            with self._active(attempt), self._groups.phase():
                result = call()
                if not attempt.vote_ns:
                    attempt.result = keep_result(result)
                    self._vote_at_end(attempt)
                self._after_vote(attempt)
        except StepRefused as refused:
            self._on_refused(attempt, str(refused))
            raise AttemptUndone from None
        except Exception as error:  # noqa: BLE001 - classified below; nothing is swallowed
            self._on_failed(attempt, error)
            raise AttemptUndone from None
        finally:
            status.rehearsing = False
        self._watch("done")
        self._complete(attempt, result)
        return result

    @contextmanager
    def _active(self, attempt: PhaseAttempt) -> Iterator[None]:
        self.attempt = attempt
        self.gate.vote = self._vote_before_step
        self.gate.is_undoable = attempt.dry or attempt.has_copy
        try:
            if not self.gate.is_undoable:
                self.memory.put_away()
            with (
                self.rehearsal.leftovers.watched(attempt.key, self.protected_state().tree),
                self.nonfinite.attempt(attempt),
                self.replays.attempt(attempt),
            ):
                yield
        finally:
            self.attempt = self.gate.vote = None

    # --- the vote ---

    def _vote_before_step(self, optimizer: Optimizer) -> None:
        """Vote before a protected optimizer's step. Raises StepRefused where it may not step."""
        attempt = self.attempt
        assert attempt is not None
        if attempt.replayed:
            raise StepRefused("replayed")
        if not attempt.dry:
            self.rehearsal.leftovers.must_not_be_used(attempt.key, optimizer)
            self.protected_state().iterations.must_be_sharded(optimizer)
            self.joining.must_not_train_on_lost(optimizer)
        if not (self.gate.is_undoable or attempt.vote_ns):
            self.memory.before_vote(optimizer)
            commit_gate.prepare_vote(attempt, self.protected_state())
            self.rehearsal.rehearse(attempt, optimizer)
            self.nonfinite.look(attempt, optimizer)
            self.replays.record(attempt)
            self._vote(attempt, gated=True)
            commit_gate.note_uncounted_step(attempt, self._status.step, self._timeline.note_once)
        if not self.gate.is_undoable:
            self.nonfinite.before_step(attempt, optimizer)

    def _vote_at_end(self, attempt: PhaseAttempt) -> None:
        """Vote at the end of a phase in which no optimizer has stepped."""
        self.memory.before_vote()
        commit_gate.must_leave_no_gradient(attempt, self.protected_state())
        if attempt.kind == "eval":
            self.rehearsal.leftovers.must_not_be_read(attempt.key, self.script.refuse)
        commit_gate.prepare_vote(attempt, self.protected_state())
        if attempt.has_copy:
            self.rehearsal.rehearse(attempt)
        self.nonfinite.look_behind(attempt)
        self._vote(attempt, gated=False)
        self.rehearsal.ungated.add(attempt.key)

    def _vote(self, attempt: PhaseAttempt, *, gated: bool) -> None:
        """Vote on phase n+1, `gated` before an optimizer's step. Raises StepRefused, PhaseError."""
        protected, status = self.protected_state(), self._status
        local, place = protected.local, f"{status.n + 1} {attempt.kind} {attempt.key}"
        place += self.memory.place
        commit_gate.must_have_waited(self._groups.unfinished(), attempt)
        compares = gated or attempt.has_copy
        share = self.before_vote(compares)
        attempt.choices = protected.own_choices(attempt.key)
        attempt.is_gated = gated
        attempt.waits = local.must_wait(attempt.key) if gated else bool(local.differing)
        self.slots.write_after(attempt, aside=self.aside)
        ballot = f"{place} {local.ballot()}" if compares else place
        repeats = self.rehearsal.must_repeat(attempt)
        if repeats:  # a ballot that no other rank has: all repeat the phase
            ballot += f" again, rank {self._recovery.seat}"
        ballot += self.nonfinite.ballot() + (self.replays.ballot() if compares else "")
        status.enter_attempt("voting")
        try:
            self._watch("vote")
            agreed = self._groups.vote(ballot, share)
            status.await_lease()
        except (Exception, StepRefused) as error:  # noqa: BLE001 - after any error, it may be cast
            self._resolve_lost_vote(error)
        else:
            if repeats or self.nonfinite.is_raised or not agreed:
                status.enter("running")
                self._resolve_unequal_ballots(attempt, place)
        if compares:
            local.won()
        attempt.vote_ns = self._timeline.now_ns()
        status.won(self._step_after(attempt))
        self._groups.seal()
        protected.reducers.commit()
        protected.buffers.mark_vote()

    def _resolve_unequal_ballots(self, attempt: PhaseAttempt, place: str) -> None:
        """Agree with all ranks on the state that differs. Raises StepRefused or PhaseError."""
        protected, exchange = self.protected_state(), self._groups.gather_bytes
        note, word = self._timeline.note_once, self.nonfinite.word(attempt.reports)
        words = protected.local.dispute(place, replica_set(protected), exchange, note, word)
        attempt.disputed = True
        self.slots.forget_before()
        why = self.on_dispute() or self.nonfinite.conclude(words)
        raise StepRefused(why or "ranks differ in state other than weights, or a cache has grown")

    def _resolve_lost_vote(self, error: BaseException) -> None:
        """Wait for the controller's decision on a vote whose result this rank did not receive."""
        if self._standalone:
            raise error
        is_cut = isinstance(error, (GroupError, StepRefused)) or is_transport_error(error)
        self._status.report_prepared(self._fault(error, "transport" if is_cut else "raised"))
        if self._recovery.vote_outcome() == "redo":
            self._status.enter("running")
            raise StepRefused("the vote's result was lost and no rank has applied it")

    def _after_vote(self, attempt: PhaseAttempt) -> None:
        if attempt.dry:
            return
        self.protected_state().completed(attempt.key)
        self.script.complete_phase(attempt.key)
        self.script.carried.restore_ownerless(undone=False)
        commit_gate.must_not_have_chosen(attempt, self.protected_state().own_choices(attempt.key))
        commit_gate.must_have_waited(self._groups.unfinished(), attempt)

    def _step_after(self, attempt: PhaseAttempt) -> int:
        return self._status.step + (attempt.kind == "step")

    def _complete(self, attempt: PhaseAttempt, result: Any) -> None:
        status, n, step = self._status, self._status.n + 1, self._step_after(attempt)
        self.joining.reduced = self.joining.reduced or attempt.key in self.joining.rehearsed_here
        kept = attempt.result or keep_result(result)
        if kept == LOST:
            self._timeline.note_once(
                f"the result of {attempt.key} ({type(result).__name__}) cannot be recorded (above"
                " 64 KiB, or of a type without an encoding), so a replacement worker does not have"
                " it: return plain numbers, or report them inside the phase"
            )
        self.slots.write_end(attempt, None if kept == LOST else kept, aside=self.aside)
        if attempt.kind != "checkpoint":  # not a call of the script that a walk would answer
            self.joining.completed(kept, attempt.choices)  # which are unchanged since the vote
        self._timeline.phase(n, step, attempt.kind, attempt.begin_ns, attempt.vote_ns)
        self._timeline.metrics(step, attempt.reports)
        status.loss = attempt.reports.get("loss", status.loss)
        shared = attempt.kind in ("epoch", "draw", "checkpoint")
        known = kept if shared or is_evidence(result) else LOST
        self.step_redo.completed()
        self.nonfinite.completed(step, attempt)
        self.memory.completed(step, is_step=attempt.kind == "step")
        status.completed(step=step, result=known, shared=shared)
        self.on_complete(attempt.kind)

    # --- refused and failed attempts ---

    def _on_refused(self, attempt: PhaseAttempt, reason: str) -> None:
        n, step = self._status.n + 1, self._step_after(attempt)
        self._timeline.refused(n, step, attempt.kind, attempt.begin_ns, reason)
        if attempt.vote_ns:
            self.await_replacement(GroupError(reason), "torn")
        if why := self.memory.settle() or attempt.undo.put_back() or attempt.describe_written():
            self.await_replacement(GroupError(why), "broken")
        if not (attempt.rehearsed or (attempt.disputed and self.script.caches.repeated)):
            self.script.remove_cache_entries()
        if self.rehearsal.end(attempt):
            self.on_record()
        self._status.enter("idle")

    def _on_failed(self, attempt: PhaseAttempt, error: Exception) -> None:
        if self._standalone:
            raise error
        if attempt.vote_ns:
            self.await_replacement(error, "torn")
        self._status.enter("running")  # before the vote: nothing is undecided
        if self._status.is_open:
            fault = self._fault(error, kind := fault_kind(error))
            if is_out_of_memory(error):
                fault = replace(fault, kind="oom", detail=self.memory.failed(error))
            elif kind == "raised":
                fault = self.nonfinite.explain(fault, attempt.key, error, attempt.reports)
            self._status.report_fault(fault)
        self._on_refused(attempt, f"{type(error).__name__}: {error}"[:500])

    def await_replacement(self, error: BaseException, state: str, kind: str = "") -> NoReturn:
        """Report this process as torn or broken and wait to be killed; standalone, raise."""
        if self._standalone:
            raise error
        kind = kind or ("contract" if isinstance(error, UsageError) else "torn")
        self._status.report_loss(state, self._fault(error, kind))
        while True:  # the controller has this process killed; its deadline bounds this wait
            self._status.next_message(self._recovery.patience_s)

    def _fault(self, error: BaseException | str, kind: Any) -> Fault:
        detail, text, now_ns = str(error), "", self._timeline.now_ns()
        if isinstance(error, BaseException):
            detail = f"{type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error)) if kind != "transport" else ""
        return self._status.fault(kind, detail, text, self._recovery.seat, now_ns)

    # --- port of CatchUp ---

    @contextmanager
    def dry_attempt(self, key: str, *, replayed: bool = False) -> Iterator[None]:
        """Return a context in which phase function `key` runs and is undone."""
        copy, dry = phase_attempt.UndoCopy(self.protected_state()), not replayed
        now_ns = self._timeline.now_ns()
        attempt = PhaseAttempt("step", key, copy, now_ns, dry=dry, replayed=replayed)
        try:
            with self.script.dry(), self._active(attempt):
                yield
        finally:
            lost = copy.put_back() or copy.changed_parameter()
            self.script.remove_cache_entries()
            if replayed and lost:
                self.await_replacement(GroupError(f"{lost}, in a replay"), "broken")

    def report_fault(self, detail: str, kind: FaultKind, *, repeats: bool = False) -> None:
        """Report a fault that closes this generation; `repeats`: it would come again."""
        fault = self._fault(detail, kind)
        if repeats or kind == "nonfinite":  # found in an attempt, and reported behind it
            fault = replace(fault, repeats=repeats, state="running")
        self._status.report_fault(fault)

    def try_alone(self, call: Callable[[], Any], key: str) -> None:
        """Run a phase's function without the other ranks, and undo it."""
        self.joining.try_alone(call, key)

    def protected_state(self) -> ProtectedState:
        """Return the protected state, which exists inside a phase."""
        assert self.protected is not None
        return self.protected
