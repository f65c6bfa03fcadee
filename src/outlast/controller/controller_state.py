"""State of the controller, and turns that change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Literal

import msgspec

from outlast import events
from outlast.config import Limits
from outlast.controller import state_parts as parts
from outlast.controller.audit.audit_records import AuditState
from outlast.controller.inputs import Action, AnyEntry, AppendJournal, Emit, Send
from outlast.controller.member_tables import (
    AgentRecord,
    Findings,
    HostReleases,
    Members,
    NetworkCuts,
    NodePlacement,
    NoticePlans,
    PartnerQuery,
    UnitRecord,
    WorkerRecord,
)
from outlast.controller.recovery.recovery_policy import DEFAULT, Means, RecoveryPolicy
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.controller.sentinels.straggler_rows import StragglerWatch
from outlast.controller.state_parts import MODES, Mode
from outlast.errors import InvariantError
from outlast.transport import messages

MigrateOn = Literal["", "now", "drain"]  # severity from which on a finding moves a seat; "": none
S_NS = 1_000_000_000
OF_DEVICES = {"arithmetic", "gpu"}  # entries of a fingerprint that need a device


def differing_facts(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Return the settings in which two fingerprints differ, as text.

    Entries of a device are compared if `theirs` has them: a spare may get its device with its seat.
    """
    keys = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    known = [key for key in keys if key in theirs or key not in OF_DEVICES]
    return "; ".join(f"{key}: {theirs.get(key)} against {ours.get(key)}" for key in known)


class ControllerState(parts.StatePart, kw_only=True):
    """Constants and parts; never changed after `handle` has returned it."""

    world: int
    spares: int
    limits: Limits
    policy: SavePolicy = SavePolicy()
    recovery: RecoveryPolicy = DEFAULT
    migrate_on: MigrateOn = ""
    placement: NodePlacement = NodePlacement()
    clock: parts.Clock = msgspec.field(default_factory=parts.Clock)
    inbox: parts.Inbox = msgspec.field(default_factory=parts.Inbox)
    members: Members = msgspec.field(default_factory=Members)
    partners: PartnerQuery = msgspec.field(default_factory=PartnerQuery)
    cuts: NetworkCuts = msgspec.field(default_factory=NetworkCuts)
    progress: parts.Progress = msgspec.field(default_factory=parts.Progress)
    units: UnitRecord = msgspec.field(default_factory=UnitRecord)
    incident: parts.IncidentRecord = msgspec.field(default_factory=parts.IncidentRecord)
    budgets: parts.Budgets = msgspec.field(default_factory=parts.Budgets)
    term: parts.Term = msgspec.field(default_factory=parts.Term)
    saves: parts.Saves = msgspec.field(default_factory=parts.Saves)
    intervals: parts.SaveIntervals = msgspec.field(default_factory=parts.SaveIntervals)
    findings: Findings = msgspec.field(default_factory=Findings)
    releases: HostReleases = msgspec.field(default_factory=HostReleases)
    notices: NoticePlans = msgspec.field(default_factory=NoticePlans)
    shared: parts.SharedValues = msgspec.field(default_factory=parts.SharedValues)
    ending: parts.Ending = msgspec.field(default_factory=parts.Ending)
    audit: AuditState = AuditState()
    reports: parts.AuditReports = msgspec.field(default_factory=parts.AuditReports)
    stragglers: StragglerWatch = msgspec.field(default_factory=StragglerWatch)

    @property
    def mode(self) -> Mode:
        """Return the present mode."""
        return self.clock.mode

    @property
    def generation(self) -> int:
        """Return the number of the present generation."""
        return self.progress.generation

    def generation_members(self) -> Iterator[WorkerRecord]:
        """Return seated workers to which this generation was announced, even if given up."""
        generation = self.generation
        return (
            worker
            for worker in self.members.workers.values()
            if worker.seat >= 0 and worker.member == generation
        )

    def occupants(self) -> list[WorkerRecord]:
        """Return the workers of all seats but absent ones, by seat."""
        return [self.members.workers[name] for name in self.members.seats if name]

    def occupant(self, seat: int) -> WorkerRecord | None:
        """Return the worker that has this seat, or None."""
        return self.members.workers.get(self.members.seats[seat])

    def warm_spares(self) -> list[WorkerRecord]:
        """Return the workers that wait inside init() and may take any empty seat."""
        known = self.members.fingerprint
        return [
            worker
            for worker in self.members.usable_spares()
            if worker.hello is not None
            and (known is None or not differing_facts(known, worker.hello.fingerprint))
        ]

    def cold_spares(self) -> list[WorkerRecord]:
        """Return the workers without a seat that are still starting, the oldest first."""
        return [worker for worker in self.members.usable_spares() if worker.hello is None]

    def is_new(self) -> bool:
        """Return whether the job has never completed a phase: its failures may be permanent."""
        return self.saves.checkpoint is None and max(self.progress.reached[0], self.progress.n) == 0

    def validate(self) -> None:
        """Check the invariants of the state; the simulator and the tests do so after every turn.

        Raises InvariantError with all that do not hold.
        """
        steps = zip(self.clock.path, self.clock.path[1:], strict=False)
        broken = [f"no transition from {a} to {b}" for a, b in steps if b not in MODES[a].following]
        seated = {
            worker.name: worker.seat for worker in self.members.workers.values() if worker.seat >= 0
        }
        checks = {
            f"{len(self.members.seats)} seats in a world of {self.world}": (
                self.mode in ("unborn", "stopping", "ended")
                or len(self.members.seats) == self.world
            ),
            "two workers have one seat": len(set(seated.values())) == len(seated),
            "the indexes of workers are wrong": self.members.has_right_indexes(),
            "a worker without a seat counts as a donor": self.members.spares_hold_no_state(),
            "seats and workers differ": all(
                seat < len(self.members.seats) and self.members.seats[seat] in ("", name)
                for name, seat in seated.items()
            ),
            "ranks connect across an empty seat": (
                self.mode != "connecting"
                or all(
                    (name in self.members.workers) != (seat in self.progress.absent)
                    for seat, name in enumerate(self.members.seats)
                )
            ),
            "an absent rank has a worker": all(
                self.mode in ("stopping", "ended") or not self.members.seats[seat]
                for seat in self.progress.absent
            ),
            "a part of a unit is absent": not any(
                0 < len(set(self.progress.absent).intersection(unit)) < len(unit)
                for unit in (self.units.units if self.progress.absent else ())
            ),
            "the end and the mode differ": (
                (self.ending.result is not None) == (self.mode in ("stopping", "ended"))
            ),
            "a shared value is made twice": not self.shared.making.keys()
            & self.shared.stored.keys(),
            "a transfer leaves the world": all(
                0 <= seat < self.world for transfer in self.progress.transfers for seat in transfer
            ),
            "an incident has no number": 0 <= self.incident.number <= self.incident.count,
            "a fault belongs to no incident": not self.incident.faults or self.incident.number > 0,
            "a finding that is over is noted": set(self.findings.unmoved)
            <= self.findings.warned.keys(),
            "a restart is not counted": (
                self.saves.searches == 0 or self.budgets.restarts > 0 or self.term.number > 1
            ),
            "time runs backwards": self.clock.since_ns <= self.clock.now_ns,
        }
        broken += [text for text, holds in checks.items() if not holds]
        if broken:
            raise InvariantError(f"mode {self.mode}, generation {self.generation}: {broken}")

    def means(self, now_ns: int) -> Means:
        """Return what conditions and budgets of the policy are compared with."""
        return Means(
            warm=len(self.warm_spares()),
            step_s=self.saves.step_s,
            rungs=self.budgets.rungs,
            failed=self.budgets.failed,
            now_ns=now_ns,
        )

    def respawns_left(self) -> int:
        """Return how many workers may still be started without progress."""
        return self.budgets.respawns_left(int(self.limits.respawns_max), self.progress.reached[0])


_NOTES_IN_FULL = 16


class ControllerTurn:
    """One turn of the controller: the state, which it changes, and the actions so far.

    Each call of `apply_all` creates and discards one.
    """

    def __init__(self, state: ControllerState) -> None:
        self.state = state
        self.actions: list[Action] = []
        self._rooms: list[tuple[int, str]] = []  # a heap of (-room, agent), of earlier in this turn
        state.clock.begin_turn()

    @property
    def now_ns(self) -> int:
        """Return the time of the newest input."""
        return self.state.clock.now_ns

    def send(self, worker: WorkerRecord, body: messages.AnyBody) -> None:
        """Add a message to one worker."""
        self.actions.append(Send(agent=worker.agent, workers=(worker.name,), body=body))

    def send_all(self, workers: Iterable[WorkerRecord], body: messages.AnyBody) -> None:
        """Add one message to several workers: one for each agent, which passes it on."""
        by_agent: dict[str, list[str]] = {}
        for worker in workers:
            by_agent.setdefault(worker.agent, []).append(worker.name)
        for agent, names in by_agent.items():
            self.actions.append(Send(agent=agent, workers=tuple(names), body=body))

    def tell(self, agent: str, body: messages.AgentBody) -> None:
        """Add a message to one agent."""
        self.actions.append(Send(agent=agent, workers=(), body=body))

    def roomiest_agent(self) -> AgentRecord | None:
        """Return the agent with most room, the first by name among equal ones; None without room.

        N workers that start in one turn cost O(N log A) for A agents.
        """
        members = self.state.members
        for is_last in (False, True):
            while self._rooms:
                room, name = self._rooms[0]
                if -room == members.room(members.agents[name]) > 0:
                    return members.agents[name]
                heappop(self._rooms)
                if (room := members.room(members.agents[name])) > 0:
                    heappush(self._rooms, (-room, name))
            if not is_last:
                found = ((-members.room(agent), agent.name) for agent in members.agents.values())
                self._rooms = [each for each in found if each[0] < 0]
                heapify(self._rooms)
        return None

    def emit(self, event: events.AnyEvent) -> None:
        """Add an event of the run."""
        self.actions.append(Emit(event=event))

    def journal(self, entry: AnyEntry) -> None:
        """Add a journal entry, which is durable before any later action is carried out."""
        self.actions.append(AppendJournal(entry=entry))

    def note(
        self,
        text: str,
        worker: str = "",
        seat: int = -1,
        level: Literal["info", "warning"] = "warning",
    ) -> None:
        """Add a note to the run's events."""
        self.emit(events.Note(t_ns=self.now_ns, worker=worker, seat=seat, text=text, level=level))

    def drop(self, envelope: messages.MessageEnvelope, why: str) -> None:
        """Count a dropped frame; note it, ever more rarely when there are many."""
        count = self.state.inbox.count_dropped()
        if count <= _NOTES_IN_FULL or count & (count - 1) == 0:
            sender = envelope.worker or envelope.agent
            kind = type(envelope.body).__name__
            self.note(f"frame {kind} of {sender} dropped: {why} ({count} so far)", level="info")

    def enter(self, mode: Mode) -> None:
        """Change the mode, and note the time."""
        self.state.clock.enter(mode)

    def change(self, name: str, **changes: Any) -> WorkerRecord:
        """Replace fields of one worker's record."""
        return self.state.members.change(name, **changes)

    def kill(self, name: str, fault: events.Fault) -> None:
        """Give up a worker: send Kill; Lost follows. The first fault is kept."""
        worker = self.state.members.workers[name]
        if worker.killed_ns:
            return
        worker = self.change(name, killed_ns=self.now_ns, kills=1, fault=worker.fault or fault)
        self.tell(worker.agent, messages.Kill(worker=name, reason=fault.detail))

    def blame(self, worker: WorkerRecord, kind: events.FaultKind, detail: str) -> events.Fault:
        """Return a fault that the controller itself found at a worker."""
        agent = self.state.members.agents.get(worker.agent)
        status = worker.status  # of an earlier generation: its place then
        is_new = status is not None and status.generation == self.state.generation
        return events.Fault(
            kind=kind,
            detail=detail,
            worker=worker.name,
            seat=worker.seat,
            host=agent.host if agent else "",
            n=status.n if status is not None and is_new else -1,
            t_ns=self.now_ns,
        )
