"""Course of an incident, from its first event to the last phase that it interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from outlast.controller.recovery.recovery_policy import FROM_A_COPY
from outlast.controller.recovery.root_fault import root_fault
from outlast.events import (
    AnyEvent,
    CheckpointSaved,
    Connected,
    Decided,
    Fault,
    FaultInjected,
    GenerationClosed,
    GenerationOpened,
    JoinerReady,
    Noticed,
    PhaseDone,
    Reported,
    RunEnded,
    RunStarted,
    ScriptUnmanaged,
    Transferred,
    WorkerLost,
    WorkerSeated,
)
from outlast.telemetry.job_progress import CommittedProgress, ProgressTrail

Phase = Literal[
    "notice",  # the fault itself, where its time is known, until it is noticed
    "report",  # until the last worker of the generation has severed its groups and answered
    "decide",  # until the decision is durable
    "join",  # until the last new worker is started, seated, and has built its model
    "connect",  # until all groups of the new generation stand
    "transfer",  # until the state has moved and the generation opens
    "redo",  # until every seat has committed the interrupted phase
]
PHASES: tuple[Phase, ...] = get_args(Phase)
# Phase that the next failure interrupts, by the recovery's last event.
_UNDER_WAY: dict[type, Phase] = {
    Noticed: "report",
    GenerationClosed: "report",
    Reported: "report",
    Decided: "join",
    WorkerSeated: "join",
    JoinerReady: "join",
    Connected: "transfer",
}
_ENDS: dict[type, Phase] = {
    Reported: "report",
    WorkerSeated: "join",
    JoinerReady: "join",
    Connected: "connect",
}


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """Replacement of a seat's worker: the former and the present one."""

    seat: int
    old: str
    new: str


class CopyAvailable(msgspec.Struct, frozen=True, kw_only=True):
    """State transferred from one seat to another."""

    donor: int
    joiner: int
    size_bytes: int
    seconds: float


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One interruption of the job. Numbers count from 1 over the run's life.

    `phases_ms` add up to `total_ms`. `state`: recovered | stopped (the run ended with it) | died
    (its launcher died during it, and a later one resumed the run) | open (no event ends it: the
    run is still recovering, or its launcher died).
    """

    number: int
    t_ns: int  # time of the fault where it is known, else of its detection
    faults: tuple[Fault, ...]
    how: tuple[str, ...]  # how each was noticed
    state: str
    verdict: str = ""
    rung: str = ""
    reason: str = ""
    rule: str = ""  # of the policy that chose the rung
    generation_from: int = 0
    generation_to: int = 0
    n: int = -1
    step: int = -1  # the interrupted step, or the last step before another interrupted phase
    where: str = ""  # location of the cause's worker, in words
    kind: str = ""  # of the interrupted phase: a PhaseKind, or "" where no event has it
    is_managed: bool = True  # False: the script had no session, its steps are not known
    redone: bool = True  # the interrupted phase was undone; else every survivor had completed it
    checkpoint_step: int = -1  # where a start from the newest checkpoint would begin; -1: none
    committed_steps_lost: int = 0
    replaced: tuple[Replacement, ...] = ()
    copies: tuple[CopyAvailable, ...] = ()
    phases_ms: dict[Phase, float] = {}
    total_ms: float = 0.0

    @property
    def cause(self) -> Fault:
        """The fault that explains the others, chosen as by the controller."""
        return _cause(self.faults)

    @property
    def is_drain(self) -> bool:
        """True for a request to end the run, which drained; nothing failed."""
        return self.is_request and any(fault.kind == "requested" for fault in self.faults)

    @property
    def is_request(self) -> bool:
        """True for a request to drain or to save a checkpoint; nothing failed."""
        return all(fault.is_wish for fault in self.faults)

    @property
    def echoes(self) -> tuple[Fault, ...]:
        """Broken connections that follow from the known loss of a peer."""
        if all(fault.kind == "transport" for fault in self.faults):
            return ()
        return tuple(fault for fault in self.faults if fault.kind == "transport")

    @property
    def others(self) -> tuple[Fault, ...]:
        """Faults other than the cause and its echoes."""
        known = (self.cause, *self.echoes)
        return tuple(fault for fault in self.faults if not any(fault is other for other in known))


def _cause(faults: Sequence[Fault]) -> Fault:
    return root_fault(tuple(faults)) or faults[0]


class IncidentCourse:
    """State of an incident while its events are processed."""

    def __init__(self, number: int, noticed: Noticed, before: StateBefore) -> None:
        self.number = number
        self.faults: list[Fault] = []
        self.how: list[str] = []
        self.generation_from = noticed.generation
        self.reached = before.reached.copy()
        self.trail = before.trail.copy()
        self.checkpoint_step = before.checkpoint_step
        self.present = self.everybody = frozenset(range(before.world))
        self.is_managed = before.is_managed
        self.after_the_last = False
        self.regained: set[int] = set()  # seats back at the phase all had reached before
        self.regained_ns = 0
        self.decided: Decided | None = None
        self.decided_step = 0  # farthest of its decisions: a rank of it may have died in applying
        self.opened: GenerationOpened | None = None
        self.copies: list[Transferred] = []
        self.replaced: dict[int, Replacement] = {}
        self.state = "open"
        self.ns: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        self.t_begin_ns = before.broke_ns(noticed)
        self.at_ns = noticed.t_ns
        self.ns["notice"] = noticed.t_ns - self.t_begin_ns
        self.last: type = Noticed
        self.waiting: set[int] = set()

    def take(self, event: AnyEvent) -> None:
        if self.opened is None or self.decided is None or self.decided.rung not in FROM_A_COPY:
            self.trail.take(event)  # after a restart, the same numbers are other phases
        if isinstance(event, Noticed):
            self.faults.append(event.fault)
            self.how.append(event.how)
        if isinstance(event, Noticed | GenerationClosed):
            self._pass(_UNDER_WAY[self.last], event)
        elif isinstance(event, Reported | JoinerReady | Connected):
            self._pass(_ENDS[type(event)], event)
        elif isinstance(event, WorkerSeated) and _UNDER_WAY.get(self.last) == "join":
            self._pass("join", event)
        elif isinstance(event, Decided):
            self._pass("decide", event)
            self._decide(event)
        elif isinstance(event, Transferred):
            self.copies.append(event)
        elif isinstance(event, GenerationOpened):
            self._pass("transfer" if self.last is Connected else "connect", event)
            self.opened = event
            self.waiting = set(self.present)
            if not self.is_managed or self.target <= event.n:
                self.finish()
        elif isinstance(event, PhaseDone):
            self._done(event)

    @property
    def target(self) -> int:
        """Number of the interrupted phase; the incident ends when it is committed."""
        assert self.decided is not None and self.opened is not None
        if self.decided.verdict == "commit":
            return self.decided.n
        return max(self.decided.n, self.reached.n) + 1

    def stop(self, ended: RunEnded) -> None:
        if self.opened is not None and ended.outcome == "done":
            # It broke behind the last phase, and was over when the generation opened, or, after a
            # roll back, when all had the last one again.
            self.after_the_last = True
            self.ns["redo"] += max(0, self.regained_ns - self.at_ns)
            self.finish()
            return
        self._pass(_UNDER_WAY.get(self.last, "redo"), ended)
        self.state = "stopped"

    def _pass(self, phase: Phase, event: AnyEvent) -> None:
        """Add the time since the last mark to `phase`."""
        self.ns[phase] += max(0, event.t_ns - self.at_ns)
        self.at_ns = max(self.at_ns, event.t_ns)
        self.last = type(event)

    def _decide(self, event: Decided) -> None:
        self.decided = event
        self.present = self.everybody.difference(event.absent)
        self.decided_step = max(self.decided_step, event.step if event.rung != "stop" else 0)
        for seat, old, new in event.replaced:
            if new:  # else the seat is not filled again: the run stops, or all ranks restart
                first = self.replaced[seat].old if seat in self.replaced else old
                self.replaced[seat] = Replacement(seat=seat, old=first, new=new)

    def _done(self, event: PhaseDone) -> None:
        if self.opened is None:
            self.reached.take(event)
            return
        if event.n >= self.reached.n and not self.regained_ns:
            self.regained.add(event.seat)
            if self.regained >= self.present:
                self.regained_ns = event.t_ns
        if event.n < self.target or event.seat not in self.waiting:
            return
        self.waiting.discard(event.seat)
        self._pass("redo", event)
        if not self.waiting:
            self.finish()

    def break_off(self, noticed: Noticed) -> None:
        """End the incident: the next one began before its redo."""
        self._pass("redo", noticed)
        self.finish()

    def finish(self) -> None:
        self.state, self.waiting = "recovered", set()

    def result(self) -> Incident:
        decided, opened = self.decided, self.opened
        went_on = decided if decided and decided.rung != "stop" else None
        farthest = max(self.reached.step, self.decided_step)
        n, step, redone = self._interrupted(went_on) if self.is_managed else (-1, -1, False)
        return Incident(
            number=self.number,
            t_ns=self.t_begin_ns,
            faults=tuple(self.faults),
            how=tuple(self.how),
            state=self.state,
            **{name: getattr(decided, name, "") for name in ("verdict", "rung", "reason", "rule")},
            generation_from=self.generation_from,
            generation_to=opened.generation if opened else 0,
            n=n if not self.is_managed else went_on.n if went_on else self.reached.n,
            step=step,
            where=self._where(step),
            kind=self.trail.kind(n),
            is_managed=self.is_managed,
            redone=redone,
            checkpoint_step=self.checkpoint_step,
            committed_steps_lost=max(0, farthest - went_on.step) if went_on else 0,
            replaced=tuple(self.replaced[seat] for seat in sorted(self.replaced)),
            copies=msgspec.convert(self.copies, tuple[CopyAvailable, ...], from_attributes=True),
            phases_ms={phase: ns / 1e6 for phase, ns in self._spent_ns().items()},
            total_ms=sum(self._spent_ns().values()) / 1e6,
        )

    def _where(self, step: int) -> str:
        if not self.is_managed:
            return "in the script (no session)"
        if self.after_the_last:
            return "after the last step"
        if all(fault.is_wish for fault in self.faults):
            return f"after step {self.reached.step}"
        return self.trail.where(_cause(self.faults), step)

    def _interrupted(self, decided: Decided | None) -> tuple[int, int, bool]:
        """Return the interrupted phase, its step, and whether its state was undone."""
        n, step = self.reached.place
        if decided is not None:
            n, step = max(n, decided.n), max(step, decided.step)
        committed = decided is not None and decided.verdict == "commit"
        if self.after_the_last or committed or _cause(self.faults).n == n - 1 >= 0:
            return n, step, False
        return n + 1, step + (self.trail.kind(n + 1) in ("", "step")), True

    def _spent_ns(self) -> dict[Phase, int]:
        """Return the time of the transfer: that of the slowest copy; the rest was connecting."""
        both_ns = self.ns["connect"] + self.ns["transfer"]
        slowest_s = max((copy.seconds for copy in self.copies), default=0.0)
        transfer_ns = min(both_ns, int(slowest_s * 1e9))
        return {**self.ns, "transfer": transfer_ns, "connect": both_ns - transfer_ns}


class StateBefore:
    """State of the run when an incident begins."""

    def __init__(self) -> None:
        self.world = 0
        self.reached = CommittedProgress()
        self.trail = ProgressTrail()
        self.checkpoint_step = -1
        self.is_managed = True
        self.injected_ns: dict[str, int] = {}

    def take(self, event: AnyEvent) -> None:
        self.reached.take(event)
        self.trail.take(event)
        if isinstance(event, RunStarted):
            self.world = event.world
            self.checkpoint_step = event.resumed_step
            self.is_managed = True
        elif isinstance(event, ScriptUnmanaged):
            self.is_managed = False
        elif isinstance(event, CheckpointSaved):
            self.checkpoint_step = event.step
        elif isinstance(event, PhaseDone):
            self.injected_ns.pop(event.worker, None)  # it continued: the fault did not break it
        elif isinstance(event, WorkerLost) and event.seat < 0:
            self.injected_ns.pop(event.worker, None)  # a spare: its loss interrupts no rank
        elif isinstance(event, FaultInjected):
            self.injected_ns[event.worker] = event.t_ns

    def broke_ns(self, noticed: Noticed) -> int:
        """Return the time of the fault, as early as any record shows."""
        newest_ns = max(self.injected_ns.values(), default=0)
        injected_ns = self.injected_ns.get(noticed.fault.worker, newest_ns)
        self.injected_ns.clear()
        times_ns = [t_ns for t_ns in (injected_ns, noticed.fault.t_ns) if 0 < t_ns <= noticed.t_ns]
        return min(times_ns, default=noticed.t_ns)
