"""Catch-up of a successor: the walk through its script, and its dry steps.

During the walk, calls of completed phases return the results that the seat's last worker recorded.
Inside the loop the job's state is adopted before the script continues, so that code between two
phases (for example a save of the model) sees the job's weights instead of the initial ones. It is
adopted again at the end, because such code (a scheduler's step) has then run twice. A copy is of a
draw, behind which no code has run: its state is adopted there for the last time.

Results of a phase that died with their worker, as the successor sees them:

| result | value |
|---|---|
| floating-point number, tensor | NaN, to print and to count with: a comparison rolls the job back |
| array | NaN |
| None | None |
| container | the same container of these |
| anything else | `LostResult`: its use rolls the job back to a copy |
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, Protocol

from torch.optim import Optimizer

from outlast.checkpoint.format import codec
from outlast.errors import GroupError, StepRefused
from outlast.events import FaultKind
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.lost_results import LostResult, has_nan_gradients, is_lost, placeholder
from outlast.worker.phases.phase_attempt import deep_copy
from outlast.worker.phases.script_progress import LOST, ReplayWalk, ScriptProgress
from outlast.worker.phases.step_redo import ScriptObjects, StepRedo
from outlast.worker.phases.worker_recovery import WorkerRecovery
from outlast.worker.script.script_variables import ScriptVariables
from outlast.worker.sentinels.collective_tape import CollectiveTape
from outlast.worker.state import generator_states
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_status import WorkerStatus

REHEARSALS = 2
AT_DRAW_BYTES_MAX = 256 << 10  # of a rank's own state, beside the position of a batch


class CatchUpOwner(Protocol):
    """The phase runner, as CatchUp uses it."""

    script: ScriptVariables
    step_redo: StepRedo

    def protected_state(self) -> ProtectedState:
        """Return the protected state."""
        ...

    def dry_attempt(self, key: str, *, replayed: bool = False) -> AbstractContextManager[None]:
        """Return a context in which phase function `key` runs and is undone."""
        ...

    def report_fault(self, detail: str, kind: FaultKind) -> None:
        """Report a fault that closes this generation."""
        ...

    def await_replacement(self, error: BaseException, state: str, kind: str = "") -> NoReturn:
        """Report this process as torn or broken and wait to be killed. With `kind="unknown"` no
        replacement could have the lost value, and the job rolls back to a copy."""
        ...


class CatchUp:
    """Catch-up of one worker. A worker that starts with the job has no walk and rehearses."""

    def __init__(
        self,
        status: WorkerStatus,
        groups: GroupRegistry,
        recovery: WorkerRecovery,
        timeline: WorkerEvents,
        place: ScriptProgress,
        owner: CatchUpOwner,
    ) -> None:
        self._status = status
        self._groups = groups
        self._recovery = recovery
        self._timeline = timeline
        self._place = place
        self._owner = owner
        self.walk: ReplayWalk | None = None
        self.result_lost = False  # the script holds a dry run's result until the walk is over
        self.rehearsed_here: set[str] = set()  # keys of functions that this process has rehearsed
        self.rehearsed_elsewhere: set[str] = set()  # keys of functions that others have rehearsed
        self.rehearsals: dict[str, int] = {}  # of functions, in this generation or to their end
        self._noted_large = False
        self.reduced = False  # DDP's reducers were used since this generation was opened

    # --- the walk ---

    def recover(self) -> None:
        """Recover until this worker is in an open generation with the job's state."""
        while not self._status.is_open:
            self._recovery.recover()
            self.reduced = False
            self._timeline.generation = self._status.opened
            for key in self.rehearsals.keys() - self.rehearsed_here:
                self.rehearsals[key] = 0  # a joiner has none: all ranks rehearse together
            self._owner.script.check_reopened()
            self._owner.step_redo.run()

    def prepare_phase(self, call: Callable[[], Any], key: str) -> None:
        """Recover, take the dry steps of the next phase, and end the walk."""
        self._must_not_pass_lost(call)
        self.recover()
        if not self._status.requested:
            self._take_dry_step(call, key, joins=True)
            if key in self.rehearsed_here and not self._owner.protected_state().reducers.is_ready:
                self._owner.await_replacement(
                    GroupError(
                        f"the dry step of {key} did not count the gradients of a static graph, as"
                        " the other ranks' first step has done"
                    ),
                    "broken",
                )
        self.join()

    def join(self) -> None:
        """Recover and end the walk, if there is one."""
        self.recover()
        walk = self.walk
        if walk is None:
            return
        self._recovery.adopt_staged_state()
        self._recovery.staged = None
        if not walk.after and not walk.slot.at_draw:
            self.restore_walked()
        self.walk = None
        self.result_lost = False
        self._owner.protected_state().local.kept = frozenset()

    def leave_loop(self) -> bool:
        """Return whether this worker has the job's state at the end of the loop: it takes it over,
        unless completed phases follow the loop. The walk goes on to the next phase, since the
        others' state there has what the script does before it."""
        walk = self.walk
        if walk is None or walk.remaining:
            return walk is None
        self.recover()
        protected = self._owner.protected_state()
        here = codec.decode(protected.own_choices())
        self._recovery.adopt_staged_state()
        if not walk.after and not walk.slot.at_draw:
            self.restore_walked()
            protected.restore_choices(here)
            generator_states.restore(here["random"], protected.generators)
        return True

    def begin_from_copy(self) -> None:
        """Take over the state of a copy that was made at this draw, for the last time: what the
        script changes before its next phase has happened on no rank yet."""
        self._recovery.adopt_staged_state()
        self._recovery.staged = None
        self.restore_walked()

    def restore_walked(self) -> None:
        """Restore the rank's own state at the point of the walk where it was recorded."""
        assert self.walk is not None
        # Without the last result, the script's code after that phase has computed wrong values.
        keep = not (self.walk.after and self.walk.last_result == LOST)
        self._owner.protected_state().restore_own(self.walk.slot.own, keep=keep)

    def at_draw(self) -> bytes:
        """Return the rank's own state that script code around a draw may read; b"" if it exceeds
        AT_DRAW_BYTES_MAX, since it is then not recorded a second time."""
        return self._if_small(self._owner.protected_state().own_choices())

    def _if_small(self, own: bytes) -> bytes:
        if len(own) <= AT_DRAW_BYTES_MAX:
            return own
        if not self._noted_large:
            self._noted_large = True
            self._timeline.note(
                f"the rank's own state takes {len(own) >> 10} KiB, more than the"
                f" {AT_DRAW_BYTES_MAX >> 10} that are kept at each draw and after each phase: a"
                " replacement worker repeats the loop code before a phase, without restoring what"
                " that code changed; change such state inside the phase"
            )
        return b""

    def completed(self, result: bytes, choices: bytes) -> None:
        """Record the result of a phase, and the `own_choices` behind it, for the walk of a
        successor."""
        self._place.add(result, self._if_small(choices) if self._place.in_loop else b"")

    def restore_drawn(self, own: bytes) -> None:
        """Restore the state that `at_draw` returned, since the script repeats what it computed
        between the draw and the completed phases. If `own` is empty, restore the state before the
        next phase."""
        assert self.walk is not None
        choices = own or codec.decode(self.walk.slot.own)["choices"]
        self._owner.protected_state().restore_choices(codec.decode(choices))

    def replay(self, call: Callable[[], Any], key: str, *, kind: str) -> tuple[Any] | None:
        """Return the result of the next phase that was complete before this worker joined; None at
        the end of the walk."""
        walk = self.walk
        step = walk.next() if walk is not None else None
        if walk is None or step is None:
            return None
        recorded, own, is_last = step
        dry = self._take_dry_step(call, key)
        value = dry[0] if dry else None
        if recorded != LOST:
            value = codec.decode(recorded)
        elif kind in ("step", "eval"):
            dry = dry or self._run_dry(call, key)
            use = self._use_of(key)
            value = placeholder(dry[0], use) if dry else LostResult(use)
            self.result_lost = True
            self._owner.protected_state().local.lost_key = key
            self._timeline.note(
                f"the result of {key} from before this worker took over the rank was lost with the"
                " previous worker; the script sees NaN in place of its numbers, and the job rolls"
                " back if it compares them"
            )
        if own:
            self.restore_drawn(own)
            generator_states.restore(
                codec.decode(own)["random"], self._owner.protected_state().generators
            )
        self._place.add(recorded, own)
        self._status.step += kind == "step"
        if is_last and walk.after:
            self.restore_walked()
            self._timeline.metrics(self._status.step, walk.slot.reports)
        return (value,)

    def must_not_train_on_lost(self, optimizer: Optimizer) -> None:
        """Do not return if the script got NaN in place of a lost result, and the gradients of an
        optimizer that is about to step are NaN: the job rolls back instead."""
        key = self._owner.protected_state().local.lost_key
        if key and has_nan_gradients(optimizer):
            self._use_of(key)()

    def _must_not_pass_lost(self, call: Callable[[], Any]) -> None:
        """Do not return if an argument of a phase is a lost number, or NaN behind one."""
        key = self._owner.protected_state().local.lost_key
        values = (*call.args, *call.keywords.values()) if isinstance(call, partial) else ()
        if key and any(map(is_lost, values)):
            self._use_of(key)()

    def must_not_read_weights(self) -> NoReturn:
        """Do not return where the script reads weights that no rank has any more."""
        text = (
            "the script reads weights between a draw and a step that was complete before this"
            " worker took over the rank: they are those behind the step, and no rank has others; to"
            " keep the step, read them in a phase, or behind the step"
        )
        self._owner.await_replacement(GroupError(text), "broken", kind="unknown")

    def _use_of(self, key: str) -> Callable[[], NoReturn]:
        """Return the function that is called when the script uses a lost result of `key`."""

        def use() -> NoReturn:
            text = (
                f"the script uses the result of {key}, which was lost with the worker of this rank"
                " between the vote and the return; to keep a flag, put it into session.state before"
                " optimizer.step()"
            )
            self._owner.await_replacement(GroupError(text), "broken", kind="unknown")

        return use

    # --- dry steps ---

    def warm_up(self, call: Callable[[], Any], key: str) -> None:
        """Take a dry step of a function before this worker has a seat."""
        self._run_dry(call, key)
        if self._status.state == "dry":  # else the function has asked for its rank
            self._status.enter("waiting")
        if self._owner.protected_state().reducers.is_ready:
            self.rehearsed_here.add(key)

    def try_alone(self, call: Callable[[], Any], key: str) -> None:
        """Run a phase's function without the other ranks, and undo it."""
        self._run_dry(call, key)
        self._status.enter("idle")

    def replay_inputs(
        self, call: Callable[[], Any], key: str, own: bytes, tape: CollectiveTape
    ) -> str:
        """Run a phase's function up to its vote on another rank's arguments and `own` state, with
        the answers of a tape, and undo all of it. Return why that is not possible, else ""."""
        protected = self._owner.protected_state()
        objects, why = ScriptObjects(protected), ""
        self._status.enter("dry")
        try:
            with self._owner.dry_attempt(key, replayed=True), self._groups.phase():
                protected.restore_own(own)
                with tape.running(self._groups, protected):
                    call()
        except StepRefused:
            pass  # at its vote; else the tape has the reason
        except Exception as error:  # noqa: BLE001 - whatever it is, it is undone, and reported
            why = f"it raised {type(error).__name__}: {error}"[:300]
        objects.put_back()
        protected.reducers.restore()
        self._status.enter("idle")
        return why or tape.why

    def _take_dry_step(
        self, call: Callable[[], Any], key: str, *, joins: bool = False
    ) -> tuple[Any] | None:
        """Take a dry step of a function that other ranks have rehearsed, which warms up kernels,
        allocators and compilers. If the other ranks' static graphs have had their first backward in
        this generation (another function also steps), open a new generation for all ranks."""
        if key not in self.rehearsed_elsewhere or key in self.rehearsed_here:
            return None
        result = self._run_dry(call, key, joins=joins)
        self.rehearsed_here.add(key)
        if (
            self._status.opened
            and self.reduced
            and self._owner.protected_state().reducers.is_static
        ):
            detail = f"{key} also steps: after its dry steps, all ranks start in a new generation"
            self._owner.report_fault(detail, "unsettled")
        return result

    def _run_dry(
        self, call: Callable[[], Any], key: str, *, joins: bool = False
    ) -> tuple[Any] | None:
        """Run a phase's function without the other ranks and undo all its changes. Return its
        result, None if it raised. Reducers are restored to their state at the opening of the
        generation. `joins`: the caller adopts the staged state, if there is one."""
        begin_ns = self._timeline.now_ns()
        result: tuple[Any] | None = None
        kept = None
        local = self._owner.protected_state().local
        slot_kept = local.kept
        if self._status.opened and (self._recovery.staged is None or slot_kept):
            kept = deep_copy(self._owner.protected_state().replicated(), "cpu")
        self._status.enter("dry")
        try:
            with self._owner.dry_attempt(key), self._groups.phase(), self._groups.dry():
                result = (call(),)
        except Exception as error:  # noqa: BLE001 - caused by substituted answers of collectives
            self._on_dry_step_failed(key, error)
        finally:
            if kept is not None:
                local.kept = frozenset()
                self._owner.protected_state().adopt(kept)
                local.kept = slot_kept
            elif not joins:
                self._recovery.adopt_staged_state()
        reducers = self._owner.protected_state().reducers
        if self._status.opened and not (self.reduced and reducers.is_static):
            reducers.restore()
        self._timeline.dry_steps(key, begin_ns)
        return result

    def _on_dry_step_failed(self, key: str, error: Exception) -> None:
        """Note that a dry step raised; its changes are undone."""
        text = f"a dry step of {key} raised {type(error).__name__}: {error}"[:500]
        self._timeline.note(f"{text}; this worker continues without it")
