"""State of the controller, and one turn that changes a private copy of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from outlast import events
from outlast.config import Limits
from outlast.controller.audit.audit_records import AuditState
from outlast.controller.inputs import Action, AnyEntry, AppendJournal, Emit, Send
from outlast.controller.modes import MODES, Mode
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.controller.state_parts import (
    Ending,
    Findings,
    SaveIntervals,
    Saves,
    SharedValues,
    StatePart,
    Term,
)
from outlast.errors import InvariantError
from outlast.transport import messages

MigrateOn = Literal["", "now", "drain"]  # severity from which on a finding moves a seat; "": none
S_NS = 1_000_000_000


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An agent: its host, incarnation, lease and last message."""

    name: str
    incarnation: int
    host: str
    capacity: int
    lease_ns: int
    renewed_ns: int
    connected: bool = True  # its connection stands: frames reach it
    lapsed: bool = False  # its lease ran out: it has no workers

    def until_ns(self) -> int:
        """Return the time at which its workers count as lost, unless it renews its lease before."""
        return self.renewed_ns + self.lease_ns


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process that has not been reaped, as far as the controller knows."""

    name: str
    agent: str
    since_ns: int  # when it was spawned, later when it was last asked for something
    seat: int = -1
    is_spare: bool = False  # born without a seat
    hello: messages.WorkerHello | None = None
    member: int = 0  # the newest generation that it has been told of
    whole: bool = False  # has stood in an open generation: holds its seat's state
    status: messages.Status | None = None  # its newest answer to a Close
    seated: int = 0  # the generation of its Seat
    ready: int = 0  # the newest generation that it has said Ready to
    joined: messages.Joined | None = None
    finished: bool = False
    fault: events.Fault | None = None  # why it was given up
    killed_ns: int = 0  # when Kill was sent; 0: not given up
    kills: int = 0
    missing_ns: int = 0  # its agent came back without it; 0: not missing
    is_blocked: bool = False  # its interpreter lock is held: it cannot answer now


class ControllerState(StatePart, kw_only=True):
    """Everything; never changed after `handle` has returned it."""

    world: int
    spares: int
    limits: Limits
    now_ns: int = 0
    mode: Mode = "unborn"
    path: tuple[Mode, ...] = ()  # modes of the newest turn, with the one before it
    since_ns: int = 0  # when this mode began
    generation: int = 0
    n: int = 0  # where the generation stands: before phase n+1
    step: int = 0
    first: bool = True  # the generation's members all start; nobody joins
    opened: bool = False  # this generation has been open
    seats: tuple[str, ...] = ()
    agents: dict[str, AgentRecord] = msgspec.field(default_factory=dict)
    workers: dict[str, WorkerRecord] = msgspec.field(default_factory=dict)
    seqs: dict[str, int] = msgspec.field(default_factory=dict)
    abandoned_slots: dict[int, dict[str, bytes]] = msgspec.field(
        default_factory=dict
    )  # seat -> slots of its lost occupants
    fingerprint: dict[str, str] | None = None
    transfers: tuple[tuple[int, int], ...] = ()
    verdict: str = ""
    incident: int = 0  # the open one; 0: none
    incidents: int = 0  # numbers given so far
    faults: tuple[events.Fault, ...] = ()  # of the open incident
    causes: tuple[events.Fault, ...] = ()  # of the generations that made no progress
    newest: tuple[events.Fault, ...] = ()  # of this generation
    attempts: dict[str, int] = msgspec.field(
        default_factory=dict
    )  # generations without progress, by what would recur ("": nothing)
    restarts: int = 0  # restarts in a row without a phase or a checkpoint beyond the next two
    restarted_at: int = -1  # the farthest phase heard of at the newest restart
    restarted_from: int = -1  # the farthest checkpoint at a restart
    greeted_ns: int = 0  # when the first worker of this term said Hello; 0: nobody has
    reached: tuple[int, int] = (0, 0)  # the farthest (n, step) heard of
    spawned: int = 0
    respawns: int = 0  # workers started beyond the first ones, with no phase completed between
    early_deaths: dict[int, int] = msgspec.field(
        default_factory=dict
    )  # seat -> accidents before its seat, since one opened
    refill_due: bool = False  # spares are to be filled up once this generation completes a phase
    respawned_at: int = -1  # the farthest phase heard of when the newest of them was started
    spares_failed: int = 0  # spares in a row that died young, since the generation opened
    policy: SavePolicy = SavePolicy()
    migrate_on: MigrateOn = ""
    term: Term = msgspec.field(default_factory=Term)
    saves: Saves = msgspec.field(default_factory=Saves)
    intervals: SaveIntervals = msgspec.field(default_factory=SaveIntervals)
    findings: Findings = msgspec.field(default_factory=Findings)
    shared: SharedValues = msgspec.field(default_factory=SharedValues)
    ending: Ending = msgspec.field(default_factory=Ending)
    audit: AuditState = AuditState()
    wake_ns: int = 0
    dropped: int = 0

    def copy(self) -> ControllerState:
        """Return a state of its own for one turn; its path begins with the present mode."""
        fresh = super().copy()
        fresh.path = (self.mode,)
        return fresh

    def members(self) -> Iterator[WorkerRecord]:
        """Seated workers that have been told of the current generation, given up or not."""
        return (
            worker
            for worker in self.workers.values()
            if worker.seat >= 0 and worker.member == self.generation
        )

    def occupant(self, seat: int) -> WorkerRecord | None:
        """Return the worker that has this seat, or None."""
        return self.workers.get(self.seats[seat])

    def warm_spares(self) -> list[WorkerRecord]:
        """Workers that wait inside init() without a seat, fit for any."""
        return [
            worker
            for worker in self.workers.values()
            if worker.seat < 0
            and worker.hello is not None
            and not worker.killed_ns
            and not worker.missing_ns
            and (self.fingerprint is None or worker.hello.fingerprint == self.fingerprint)
        ]

    def cold_spares(self) -> list[WorkerRecord]:
        """Workers without a seat that are still starting, the oldest first."""
        return [
            worker
            for worker in self.workers.values()
            if worker.seat < 0
            and worker.hello is None
            and not worker.killed_ns
            and not worker.missing_ns
        ]

    def is_new(self) -> bool:
        """Return whether this job has never completed a phase, so that a failure may be a permanent
        one."""
        return self.saves.checkpoint is None and max(self.reached[0], self.n) == 0

    def validate(self) -> None:
        """Check the invariants of the state; the simulator and the tests do so after every turn.

        Raises InvariantError with all that do not hold.
        """
        steps = zip(self.path, self.path[1:], strict=False)
        broken = [f"no transition from {a} to {b}" for a, b in steps if b not in MODES[a].following]
        seated = {worker.name: worker.seat for worker in self.workers.values() if worker.seat >= 0}
        checks = {
            f"{len(self.seats)} seats in a world of {self.world}": (
                self.mode in ("unborn", "stopping", "ended") or len(self.seats) == self.world
            ),
            "two workers have one seat": len(set(seated.values())) == len(seated),
            "seats and workers differ": all(
                seat < len(self.seats) and self.seats[seat] in ("", name)
                for name, seat in seated.items()
            ),
            "ranks connect across an empty seat": (
                self.mode != "connecting" or all(name in self.workers for name in self.seats)
            ),
            "the end and the mode differ": (
                (self.ending.result is not None) == (self.mode in ("stopping", "ended"))
            ),
            "a shared value is made twice": not self.shared.making.keys()
            & self.shared.stored.keys(),
            "a transfer leaves the world": all(
                0 <= seat < self.world for transfer in self.transfers for seat in transfer
            ),
            "an incident has no number": 0 <= self.incident <= self.incidents,
            "a restart is not counted": self.saves.searches == 0 or self.restarts > 0,
            "time runs backwards": self.since_ns <= self.now_ns,
        }
        broken += [text for text, holds in checks.items() if not holds]
        if broken:
            raise InvariantError(f"mode {self.mode}, generation {self.generation}: {broken}")

    def respawns_left(self) -> int:
        """Workers that may still be started without progress; any phase completed since the
        newest one was started gives all of them back."""
        spent = self.respawns if self.reached[0] <= self.respawned_at else 0
        return max(0, int(self.limits.respawns_max) - spent)


_NOTES_IN_FULL = 16


class ControllerTurn:
    """One turn of the controller: a private copy of the state, and the actions so far. One call of
    `handle` makes it and throws it away."""

    def __init__(self, state: ControllerState, now_ns: int) -> None:
        self.state = state.copy()
        self.now_ns = now_ns
        self.actions: list[Action] = []

    def send(self, worker: WorkerRecord, body: messages.AnyBody) -> None:
        """Add a message to one worker."""
        self.actions.append(Send(agent=worker.agent, worker=worker.name, body=body))

    def tell(self, agent: str, body: messages.AgentBody) -> None:
        """Add a message to one agent."""
        self.actions.append(Send(agent=agent, worker="", body=body))

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
        """Count a frame that is not acted on; say so, ever more rarely when there are many."""
        state = self.state
        state.dropped += 1
        count = state.dropped
        if count <= _NOTES_IN_FULL or count & (count - 1) == 0:
            sender = envelope.worker or envelope.agent
            kind = type(envelope.body).__name__
            self.note(f"frame {kind} of {sender} dropped: {why} ({count} so far)", level="info")

    def enter(self, mode: Mode) -> None:
        """Change the mode, and note the time."""
        self.state.mode = mode
        self.state.path = (*self.state.path, mode)
        self.state.since_ns = self.now_ns

    def change(self, name: str, **changes: Any) -> WorkerRecord:
        """Replace fields of one worker's record."""
        worker = replace(self.state.workers[name], **changes)
        self.state.workers[name] = worker
        return worker

    def kill(self, name: str, fault: events.Fault) -> None:
        """Give a worker up: Kill now, Lost follows. The first reason stays."""
        worker = self.state.workers[name]
        if worker.killed_ns:
            return
        worker = self.change(name, killed_ns=self.now_ns, kills=1, fault=worker.fault or fault)
        self.tell(worker.agent, messages.Kill(worker=name, reason=fault.detail))

    def blame(self, worker: WorkerRecord, kind: events.FaultKind, detail: str) -> events.Fault:
        """A fault that the controller itself found at a worker."""
        agent = self.state.agents.get(worker.agent)
        return events.Fault(
            kind=kind,
            detail=detail,
            worker=worker.name,
            seat=worker.seat,
            host=agent.host if agent else "",
            n=worker.status.n if worker.status else -1,
            t_ns=self.now_ns,
        )
