"""Rehearsals: first attempts of each function, refused at their gate and compared."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from outlast.errors import StepRefused
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.catch_up import REHEARSALS, CatchUp
from outlast.worker.phases.commit_gate import LeftoverGradients
from outlast.worker.phases.phase_attempt import PhaseAttempt
from outlast.worker.script import repetitions
from outlast.worker.script.bytecode import reads_gradients
from outlast.worker.script.repetitions import RepetitionCheck
from outlast.worker.script.script_variables import ScriptVariables
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_status import WorkerStatus


class StepRehearsal:
    """Rehearsals of one worker; without a launcher (`standalone`) there are none."""

    def __init__(
        self,
        status: WorkerStatus,
        groups: GroupRegistry,
        joining: CatchUp,
        script: ScriptVariables,
        protected_state: Callable[[], ProtectedState],
        *,
        standalone: bool,
    ) -> None:
        self._status, self._groups, self._joining = status, groups, joining
        self._script = script
        self._protected_state = protected_state
        self._standalone = standalone
        self.check = RepetitionCheck()
        self.leftovers = LeftoverGradients(self._reads_gradients)
        self._optimizer: Optimizer | None = None  # that steps in the attempt under way
        self.ungated: set[str] = set()  # functions that have ended a phase without a step

    def rehearse(self, attempt: PhaseAttempt, optimizer: Optimizer | None = None) -> None:
        """Raise StepRefused in a function's first attempts, which are compared with each other, at
        the gate of `optimizer`."""
        self._optimizer = optimizer
        key, place = attempt.key, (self._status.opened, self._status.n)
        joining = self._joining
        is_new = not self._standalone and key not in joining.rehearsed_here
        if is_new or self.leftovers.is_due(key, place):
            joining.rehearsals[key] = joining.rehearsals.get(key, 0) + 1
            attempt.rehearsed = True
            self._compare(attempt)
            if joining.rehearsals[key] == REHEARSALS:
                reads = b"." * self._reads_gradients(key)
                self.leftovers.rehearsed(key, self._groups.gather_bytes(reads), place)
            raise StepRefused("rehearsal")
        if self.check.awaits(key):
            self._compare(attempt)
            self._script.caches.trust_grown()

    def _reads_gradients(self, key: str) -> bool:
        return any(map(reads_gradients, self._script.codes_of(key)))

    def is_rehearsal(self, attempt: PhaseAttempt) -> bool:
        """Return whether the attempt may be refused at its gate and must not be interrupted."""
        is_step = attempt.kind == "step" and attempt.key not in self.ungated
        is_gated = is_step or attempt.has_copy or attempt.key in self._joining.rehearsals
        is_new = is_gated and attempt.key not in self._joining.rehearsed_here
        return is_new and not self._standalone

    def must_repeat(self, attempt: PhaseAttempt) -> bool:
        """Return whether the attempt is repeated before it counts, since a cache has grown. The
        gradients of phases other than steps and evaluations do not repeat."""
        return attempt.kind in ("step", "eval") and self.check.must_repeat(
            attempt.key, self._script.caches, lambda: self._look(attempt)
        )

    def end(self, attempt: PhaseAttempt) -> bool:
        """Take note of a refused attempt; return whether its function is rehearsed by now."""
        key, rehearsed = attempt.key, self._joining.rehearsed_here
        if self._script.carried.restore_ownerless(undone=True):
            self.check.widened(key)
        if attempt.rehearsed and key not in rehearsed and self._script.end_rehearsal(key):
            self.check.widened(key)
        if attempt.rehearsed or attempt.disputed:
            self._protected_state().reducers.restore()  # as other ranks do at the opening
        if self._joining.rehearsals.get(key) == REHEARSALS and key not in rehearsed:
            rehearsed.add(key)
            return True
        return False

    def _compare(self, attempt: PhaseAttempt) -> None:
        """Compare the attempt's results with those of the previous attempt."""
        key, check, now = attempt.key, self.check, self._look(attempt)
        difference = check.rehearsed(key, now) if attempt.rehearsed else check.first_step(key, now)
        if difference is not None:
            zeroed = self._joining.rehearsals[key] > REHEARSALS
            self._script.differs(key, difference, zeroed=zeroed)

    def _look(self, attempt: PhaseAttempt) -> repetitions.Repetition:
        protected = self._protected_state()
        choices, named = protected.own_choices(attempt.key), protected.tree.named_parameters()
        others = set[int]()
        if self._optimizer is not None:  # else the phase may have stepped with any of them
            groups = self._optimizer.param_groups
            others = attempt.undo.gradients.untouched()
            others -= {id(parameter) for group in groups for parameter in group["params"]}
        computed = ((name, parameter) for name, parameter in named if id(parameter) not in others)
        return repetitions.look(self._status.opened, choices, attempt.reports, computed)
