"""Invariants of a simulated run, and of its ending.

A rank's state is modelled as chains: `model` (replicated) after phase n, and `own` (what differs by
rank) after phase n and again after the script's code that follows it. A phase applied twice,
skipped, or applied to another rank's state gives another number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

from outlast.controller import inputs
from outlast.controller.controller_state import ControllerState
from outlast.controller.planned_migration import UNLIMITED
from outlast.controller.recovery.recovery_policy import DEFAULT
from outlast.errors import InvariantError
from outlast.telemetry.committed_history import CommittedPhase
from outlast.testing.absent_ranks.rank_histories import (
    RankHistories,
    TrainedShare,
    mix,
    own_of,
    own_tail,
)
from outlast.testing.absent_ranks.shrink_options import RESPAWNS_AMPLE
from outlast.testing.fault_plan import ATTEMPTS_AMPLE, NO_OWNER, NOTICES, FaultPlan
from outlast.transport import messages


class SimFailure(AssertionError):  # noqa: N818 - a failed assertion with a story
    """A broken invariant; the message names the seed and lists the last events."""


def model_step(model: int, n: int) -> int:
    """Return the replicated state after phase n."""
    return mix(model, n, 1)


class RunInvariants:
    """Records all durable facts of a run and checks every new one against them."""

    def __init__(self, world: int, moves_max: int = DEFAULT.moves_max) -> None:
        self.world = world
        self._moves_max = moves_max
        self.last = -1  # the run's last phase, once it is known
        self.decided = 0  # the newest generation that a decision is durable for
        self.opened: set[int] = set()
        self.decided_n = 0
        self.is_start = True  # the newest generation starts all ranks
        self.stepped: set[str] = set()  # workers that have committed a phase
        self.shared: dict[str, bytes] = {}
        self.moved: dict[inputs.FindingKey, str] = {}  # finding -> worker that it moved
        self.seated: dict[str, int] = {}  # worker -> its seat
        self.slots_left: dict[int, set[str]] = {}  # seat -> slots that its lost workers have left
        self.wrong: dict[int, int] = {}  # models that a flipped bit led to: the flip's number
        self.history: list[CommittedPhase] = []
        self.refused = 0  # frames of lower terms that agents refused
        self._obeyed: dict[str, int] = {}  # agent -> the highest term
        self._applied: dict[tuple[int, int], set[int]] = {}  # (generation, n) -> ranks
        self._committed = 0  # the newest phase that all ranks have applied
        self._applied_in = 0  # the newest generation in which a phase was applied
        self.condemned: set[str] = set()  # workers that an audit found wrong
        self.tell: Callable[[str], str] = lambda text: text
        self._models = [mix(0)]
        self.histories = RankHistories(world, self.fail)

    def fail(self, text: str) -> NoReturn:
        """Raise SimFailure with the story of the run."""
        raise SimFailure(self.tell(text))

    def model(self, n: int) -> int:
        """Return the correct replicated state after phase n."""
        while len(self._models) <= n:
            self._models.append(model_step(self._models[-1], len(self._models)))
        return self._models[n]

    def flip(self, model: int) -> int:
        """Return the model with a flipped bit, and record it as wrong."""
        self.wrong[model ^ 1] = len(self.wrong)
        return model ^ 1

    def after(self, model: int, n: int) -> int:
        """Return the replicated state after phase n; a wrong one stays wrong."""
        flipped = model_step(model, n)
        if model in self.wrong:
            self.wrong[flipped] = self.wrong[model]
        return flipped

    def own(self, seat: int, n: int) -> int:
        """Return the rank's own state before phase n+1."""
        return self.histories.own(seat, n)

    def present(self, generation: int) -> set[int]:
        """Return the ranks that are present in a generation."""
        return self.histories.present(generation)

    def agree(self, n: int, present: Collection[int], shares: Mapping[int, TrainedShare]) -> None:
        """Check the shares of the ranks that have agreed on phase n."""
        self.histories.agree(n, present, shares)

    def stands(self, name: str, seat: int, n: int, model: int, own: int) -> None:
        """Check the state of a worker before phase n+1 of its seat."""
        if model != self.model(n) and model not in self.wrong:
            self.fail(f"{name} at rank {seat} has another model than the one after phase {n}")
        if own != self.own(seat, n):
            self.fail(f"{name} at rank {seat} has another own state than after phase {n}")

    def state(self, state: ControllerState) -> None:
        """Check the invariants of the controller's state."""
        try:
            state.validate()
        except InvariantError as error:
            self.fail(str(error))

    def slots(self, body: messages.Seat) -> None:
        """Check that a joiner receives its rank's state at the position that it takes."""
        before, after = body.slots.get(f"before:{body.n}"), body.slots.get(f"after:{body.n}")
        if before is None and after is None:
            self.fail(
                f"rank {body.seat} was seated before phase {body.n + 1} without its own state"
            )
        if any(key.startswith("left:") for key in body.slots):
            self.histories.check_return(body)
            return
        if before is not None and own_of(before) != self.own(body.seat, body.n):
            self.fail(f"rank {body.seat} received a wrong before:{body.n}")
        if after is not None and own_tail(own_of(after), body.n) != self.own(body.seat, body.n):
            self.fail(f"rank {body.seat} received a wrong after:{body.n}")

    def left_behind(self, body: messages.WorkerLostReport) -> None:
        """Record the slots of a lost worker."""
        seat = self.seated.get(body.worker, -1)
        self.slots_left.setdefault(seat, set()).update(body.slots)

    def durable(
        self, entry: inputs.AnyEntry, checkpoint: messages.Checkpointed | None = None
    ) -> None:
        """Check a journal entry and record it. `checkpoint`: where a start would begin."""
        match entry:
            case inputs.DecisionMade():
                if entry.generation <= self.decided:
                    self.fail(f"generation {entry.generation} was decided after {self.decided}")
                if entry.verdict == "start":
                    self.slots_left = {}
                    self._committed = entry.n
                elif entry.n < self._committed - (entry.copy is not None):
                    self.fail(f"all ranks committed phase {self._committed}, {entry.n} is decided")
                elif entry.copy is not None:  # a phase may be taken back, and redone
                    self._committed = min(self._committed, entry.n)
                elif entry.n < self.decided_n:
                    self.fail(f"phase {entry.n} was decided after phase {self.decided_n}")
                self.decided, self.decided_n = entry.generation, entry.n
                self.histories.decide(entry, checkpoint)
                workers = [name for name in entry.seats if name]
                if len(set(workers)) != len(workers):
                    self.fail(f"a worker has two seats: {entry.seats}")
            case inputs.Opened():
                if entry.generation in self.opened:
                    self.fail(f"generation {entry.generation} opened twice")
                if entry.generation != self.decided:
                    self.fail(f"generation {entry.generation} opened after {self.decided}")
                self.opened.add(entry.generation)
            case inputs.SharedValueStored():
                if self.shared.get(entry.name, entry.value) != entry.value:
                    self.fail(f"the shared value {entry.name!r} changed")
                self.shared[entry.name] = entry.value
            case inputs.RankMigrated():
                if self.moved.setdefault(entry.finding, entry.worker) != entry.worker:
                    self.fail(f"{entry.worker} is moved by the finding of another worker: {entry}")
                limited = {
                    worker
                    for finding, worker in self.moved.items()
                    if finding.check not in UNLIMITED
                }
                if len(limited) > self._moves_max:  # by hour; simulated runs are shorter
                    self.fail(f"more than {self._moves_max} workers were moved: {self.moved}")

    def sent(self, body: messages.AnyBody) -> None:
        """Check that the content of an outgoing frame is durable."""
        if isinstance(body, (messages.Decide, messages.Seat)) and body.generation > self.decided:
            self.fail(f"{type(body).__name__}({body.generation}) was sent before it was durable")
        if isinstance(body, messages.Open) and body.generation not in self.opened:
            self.fail(f"Open({body.generation}) was sent before it was durable")
        if isinstance(body, messages.SharedValueReply) and self.shared.get(body.name) != body.value:
            self.fail(f"the shared value {body.name!r} was sent before it was durable")
        if isinstance(body, messages.Seat) and not body.first:
            self.slots(body)

    def obeys(self, agent: str, term: int) -> None:
        """Check that an agent obeys no lower term after a higher one."""
        if term < self._obeyed.get(agent, 0):
            self.fail(f"{agent} obeyed term {term} after term {self._obeyed[agent]}")
        self._obeyed[agent] = term

    def applies(
        self, name: str, generation: int, n: int, shares: Mapping[int, TrainedShare]
    ) -> None:
        """Check that a worker may commit phase n in this generation, with these shares of ranks."""
        self.histories.apply(n, shares)
        self.stepped.add(name)
        if generation < self._applied_in:
            self.fail(
                f"{name} committed phase {n} in generation {generation}, and another worker"
                f" one in {self._applied_in}: two groups commit"
            )
        self._applied_in = generation
        if name in self.condemned:
            self.fail(f"{name} committed phase {n} after an audit had found it wrong")
        if generation < self.decided:
            self.fail(
                f"{name} committed phase {n} in generation {generation}, though {self.decided} was"
                " decided already"
            )

    def completes(self, name: str, generation: int, n: int, model: int) -> None:
        """Record that a rank has completed phase n."""
        self.history.append(CommittedPhase(name, self.seated[name], generation, n, (model,)))
        ranks = self._applied.setdefault((generation, n), set())
        ranks.add(self.seated[name])
        if ranks >= self.present(generation):
            self._committed = max(self._committed, n)


def _is_scarce(plan: FaultPlan, ledger: RunInvariants, end: inputs.EndRun) -> bool:
    """Return whether a run ended for lack of workers, and its ranks could not have left: they may
    not, all were lost, or those that were not have not completed a phase."""
    options = plan.shrinking
    if options is None:
        return False
    may_leave = options.root < 0 and not options.needs_all and plan.shard_sets == 1
    if end.cause is not None and "had room" in end.cause.detail:
        return ledger.is_start or not (may_leave and end.n)
    few = options.respawns_max < RESPAWNS_AMPLE
    return few and not (may_leave and end.n)


def check_ending(plan: FaultPlan, ledger: RunInvariants, end: inputs.EndRun) -> None:
    """Raise SimFailure unless the run is done, or one of its faults explains its end."""
    if end.outcome == "done":
        if end.n != ledger.last:
            ledger.fail(f"done at phase {end.n} of {ledger.last}")
        return
    if end.cause is not None and end.cause.detail == NO_OWNER and plan.takes_over:
        return
    if plan.waits or plan.early:
        ledger.fail(
            f"{end.outcome}: {end.cause.detail if end.cause else ''}, unexplained by any fault"
        )
    if end.cause is None:
        ledger.fail(f"{end.outcome} without a cause")
        return
    kinds = {what for _, what in plan.timed}
    if end.outcome == "interrupted" and not kinds & {"stop", *NOTICES}:
        ledger.fail("interrupted, though no end was requested")
    if end.outcome == "interrupted":
        return
    if end.cause.kind == "diverged" and plan.flips:
        return  # no majority, and no copy from before
    if _is_scarce(plan, ledger, end):
        return
    if end.cause.kind == "storage" and plan.policy.stop and plan.fails:
        return  # a save failed, and the policy is to stop
    if "before its first step" in end.cause.detail:
        if end.cause.worker in ledger.stepped:
            ledger.fail(f"{end.cause.detail}: the worker had committed steps")
        return
    deeds = {strike.deed for strike in plan.strikes}
    accidents = deeds <= {"kill", "wait"} and kinds <= {"kill", "pair"} and plan.bug_at < 0
    if plan.attempts_max < ATTEMPTS_AMPLE and not accidents:
        return
    if end.outcome == "user_error" and end.cause.n >= ledger.last:
        return  # its exit code was not 0, but the run was done
    ledger.fail(f"{end.outcome}: {end.cause.detail}, though the run could have continued")
