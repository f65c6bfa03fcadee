"""State of the controller, and turns that change a private copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from outlast import events
from outlast.config import Limits
from outlast.controller import state_parts as parts
from outlast.controller.audit.audit_records import AuditState
from outlast.controller.inputs import Action, AnyEntry, AppendJournal, Emit, Send
from outlast.controller.save_schedule.save_tiers import SavePolicy
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


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of an agent: its host, incarnation, lease and last message."""

    name: str
    incarnation: int
    host: str
    capacity: int
    lease_ns: int
    renewed_ns: int
    connected: bool = True  # frames reach it
    lapsed: bool = False  # its lease expired: it has no workers

    def until_ns(self) -> int:
        """Return the time at which its workers count as lost unless it renews its lease."""
        return self.renewed_ns + self.lease_ns


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process that the controller has not seen reaped."""

    name: str
    agent: str
    since_ns: int  # when it was spawned, later the time of the last request to it
    seat: int = -1
    is_spare: bool = False  # started without a seat
    hello: messages.WorkerHello | None = None
    member: int = 0  # the newest generation that was announced to it
    whole: bool = False  # was in an open generation: holds its seat's state
    status: messages.Status | None = None  # its newest answer to a Close
    seated: int = 0  # the generation of its Seat
    ready: int = 0  # the newest generation for which it sent Ready
    joined: messages.Joined | None = None
    finished: bool = False
    fault: events.Fault | None = None  # why it was given up
    killed_ns: int = 0  # when Kill was sent; 0: not given up
    kills: int = 0
    missing_ns: int = 0  # its agent came back without it; 0: not missing
    is_blocked: bool = False  # its interpreter lock is held: it cannot answer now
    preparing: bool = False  # Prepare was sent: unfit for a start of all ranks
    stand_in: int = -1  # of Prepare: the rank for which it builds device meshes
    is_hot: bool = False  # prepared, and waits for a seat
    fits: tuple[int, ...] = ()  # the ranks that it can take when it is hot; (): all
    calls: bytes = b""  # of Recorded


class Members(parts.StatePart, kw_only=True):
    """Agents, workers, and the seats that workers have (membership)."""

    agents: dict[str, AgentRecord] = msgspec.field(default_factory=dict)
    workers: dict[str, WorkerRecord] = msgspec.field(default_factory=dict)
    seats: tuple[str, ...] = ()  # worker by seat, "" for an empty one
    abandoned_slots: dict[int, dict[str, bytes]] = msgspec.field(
        default_factory=dict
    )  # seat -> slots of its lost occupants
    fingerprint: dict[str, str] | None = None  # of the first start; every worker must have it
    spawned: int = 0  # workers started in this term
    greeted_ns: int = 0  # when the first worker of this term sent Hello; 0: none has
    refill_due: bool = False  # replace spares once this generation completes a phase
    stays_warm: bool = False  # hot spares are not prepared any more: one failed, or ranks differ

    def change(self, name: str, **changes: Any) -> WorkerRecord:
        """Replace fields of one worker's record."""
        worker = self.workers[name] = replace(self.workers[name], **changes)
        return worker

    def keep_warm(self) -> None:
        """Prepare no spares any more."""
        self.stays_warm = True

    def assign(self, seat: int, name: str) -> None:
        """Give a seat to a worker; "" empties it."""
        self.seats = (*self.seats[:seat], name, *self.seats[seat + 1 :])

    def vacate(self, name: str) -> None:
        """Empty the seat of a worker."""
        self.seats = tuple("" if one == name else one for one in self.seats)

    def set_seats(self, seats: tuple[str, ...], slots: dict[int, dict[str, bytes]]) -> None:
        """Set all seats, with the slots that were left for them."""
        self.seats = seats
        self.abandoned_slots = slots

    def keep_slots(self, seat: int, slots: dict[str, bytes]) -> None:
        """Keep the slots of a lost worker for its successor."""
        self.abandoned_slots[seat] = {**self.abandoned_slots.get(seat, {}), **slots}

    def settle_fingerprint(self, fingerprint: dict[str, str]) -> dict[str, str]:
        """Return the run's fingerprint; the first start fixes it."""
        if self.fingerprint is None:
            self.fingerprint = fingerprint
        return self.fingerprint

    def refill_later(self) -> None:
        """Fill the spares up when the generation that opens has completed a phase."""
        self.refill_due = True

    def excuse(self, later: Callable[[int], int]) -> None:
        """Move all start times of waits by a stall of the launcher."""
        for agent in tuple(self.agents.values()):
            self.agents[agent.name] = replace(agent, renewed_ns=later(agent.renewed_ns))
        for worker in tuple(self.workers.values()):
            self.change(
                worker.name,
                since_ns=later(worker.since_ns),
                killed_ns=later(worker.killed_ns),
                missing_ns=later(worker.missing_ns),
            )
        self.greeted_ns = later(self.greeted_ns)


class ControllerState(parts.StatePart, kw_only=True):
    """Constants and parts; never changed after `handle` has returned it."""

    world: int
    spares: int
    limits: Limits
    policy: SavePolicy = SavePolicy()
    migrate_on: MigrateOn = ""
    clock: parts.Clock = msgspec.field(default_factory=parts.Clock)
    inbox: parts.Inbox = msgspec.field(default_factory=parts.Inbox)
    members: Members = msgspec.field(default_factory=Members)
    progress: parts.Progress = msgspec.field(default_factory=parts.Progress)
    incident: parts.IncidentRecord = msgspec.field(default_factory=parts.IncidentRecord)
    budgets: parts.Budgets = msgspec.field(default_factory=parts.Budgets)
    term: parts.Term = msgspec.field(default_factory=parts.Term)
    saves: parts.Saves = msgspec.field(default_factory=parts.Saves)
    intervals: parts.SaveIntervals = msgspec.field(default_factory=parts.SaveIntervals)
    findings: parts.Findings = msgspec.field(default_factory=parts.Findings)
    shared: parts.SharedValues = msgspec.field(default_factory=parts.SharedValues)
    ending: parts.Ending = msgspec.field(default_factory=parts.Ending)
    audit: AuditState = AuditState()

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
        return (
            worker
            for worker in self.members.workers.values()
            if worker.seat >= 0 and worker.member == self.generation
        )

    def occupant(self, seat: int) -> WorkerRecord | None:
        """Return the worker that has this seat, or None."""
        return self.members.workers.get(self.members.seats[seat])

    def warm_spares(self) -> list[WorkerRecord]:
        """Return the workers that wait inside init() and may take any empty seat."""
        return [
            worker
            for worker in self.members.workers.values()
            if worker.seat < 0
            and worker.hello is not None
            and not worker.killed_ns
            and not worker.missing_ns
            and (
                self.members.fingerprint is None
                or not differing_facts(self.members.fingerprint, worker.hello.fingerprint)
            )
        ]

    def cold_spares(self) -> list[WorkerRecord]:
        """Return the workers without a seat that are still starting, the oldest first."""
        return [
            worker
            for worker in self.members.workers.values()
            if worker.seat < 0
            and worker.hello is None
            and not worker.killed_ns
            and not worker.missing_ns
        ]

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
            "seats and workers differ": all(
                seat < len(self.members.seats) and self.members.seats[seat] in ("", name)
                for name, seat in seated.items()
            ),
            "ranks connect across an empty seat": (
                self.mode != "connecting"
                or all(name in self.members.workers for name in self.members.seats)
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
            "a restart is not counted": self.saves.searches == 0 or self.budgets.restarts > 0,
            "time runs backwards": self.clock.since_ns <= self.clock.now_ns,
        }
        broken += [text for text, holds in checks.items() if not holds]
        if broken:
            raise InvariantError(f"mode {self.mode}, generation {self.generation}: {broken}")

    def respawns_left(self) -> int:
        """Return how many workers may still be started without progress."""
        return self.budgets.respawns_left(int(self.limits.respawns_max), self.progress.reached[0])


_NOTES_IN_FULL = 16


class ControllerTurn:
    """One turn of the controller: a private copy of the state, and the actions so far.

    Each call of `handle` creates and discards one.
    """

    def __init__(self, state: ControllerState) -> None:
        self.state = state.copy()
        self.actions: list[Action] = []

    @property
    def now_ns(self) -> int:
        """Return the time of the newest input."""
        return self.state.clock.now_ns

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
        return events.Fault(
            kind=kind,
            detail=detail,
            worker=worker.name,
            seat=worker.seat,
            host=agent.host if agent else "",
            n=worker.status.n if worker.status else -1,
            t_ns=self.now_ns,
        )
