"""Modes and parts of the controller's state: each part is written by one module alone.

`docs/protocol.md` shows the modes and transitions; a test holds both equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from functools import cache
from itertools import chain
from typing import Literal, NamedTuple, Self

import msgspec

from outlast import events
from outlast.controller.audit.audit_records import ReplicaDigests
from outlast.controller.inputs import DecisionMade, EndDecided, EndRun, FailedWorker, Succession
from outlast.controller.recovery.recovery_policy import HOUR_NS
from outlast.controller.save_schedule.save_intervals import Schedule
from outlast.controller.save_schedule.save_tiers import RunMeasurements
from outlast.transport import messages

Mode = Literal[
    "unborn",
    "awaiting",
    "gathering",
    "connecting",
    "open",
    "closing",
    "clearing",
    "verifying",
    "stopping",
    "ended",
]


class ModeRow(NamedTuple):
    """Meaning of a mode, its exit condition, and the modes that may follow."""

    meaning: str
    ends: str
    following: tuple[Mode, ...]


MODES: dict[Mode, ModeRow] = {
    "unborn": ModeRow("no term has begun", "BeginTerm", ("awaiting", "gathering")),
    "awaiting": ModeRow(
        "a later term waits for the agents of the old generation",
        "all of them have reported, or one lease has passed; and no stray lives",
        ("open", "closing", "gathering", "stopping"),
    ),
    "gathering": ModeRow(
        "seats are filled; workers send Hello and Ready",
        "every seat has a worker that is ready",
        ("connecting", "closing", "verifying", "stopping"),
    ),
    "connecting": ModeRow(
        "workers connect and move state",
        "every worker has sent Joined, with equal digests",
        ("open", "closing", "stopping"),
    ),
    "open": ModeRow(
        "phases run",
        "a failure, a request, a planned move, or every script has ended",
        ("closing", "stopping"),
    ),
    "closing": ModeRow(
        "every worker answers with its Status, or is reaped",
        "all have answered; then the recovery ladder decides",
        ("gathering", "clearing", "closing", "stopping"),
    ),
    "clearing": ModeRow(
        "a restart waits until every worker with a seat is reaped",
        "none is left",
        ("verifying", "stopping"),
    ),
    "verifying": ModeRow(
        "a restart waits for the newest complete checkpoint",
        "CheckpointFound, or its deadline",
        ("gathering", "stopping"),
    ),
    "stopping": ModeRow("workers leave or are killed", "every worker is reaped", ("ended",)),
    "ended": ModeRow("the run is over", "", ()),
}


CAUSES_MAX, FAILED_MAX = 64, 256  # faults without progress; failed workers


class StatePart(msgspec.Struct, kw_only=True):
    """Base of the parts: tables may change in place, everything inside them is frozen."""

    def copy(self) -> Self:
        """Return a part of its own for one turn: tables and parts copied, frozen entries shared."""
        fresh = copy(self)
        for name in _copied_fields(type(self)):
            setattr(fresh, name, getattr(self, name).copy())
        return fresh


@cache
def _copied_fields(part: type[StatePart]) -> tuple[str, ...]:
    """Return the fields of tables and of parts."""
    fields = [(each.name, each.default_factory) for each in msgspec.structs.fields(part)]
    return tuple(
        name
        for name, make in fields
        if make in (dict, list) or (isinstance(make, type) and issubclass(make, StatePart))
    )


class Clock(StatePart, kw_only=True):
    """Time, begin of the present mode, and next wake-up."""

    now_ns: int = 0
    mode: Mode = "unborn"
    path: tuple[Mode, ...] = ()  # modes of the newest turn, with the one before it
    since_ns: int = 0  # when this mode began
    wake_ns: int = 0  # time of the newest Wake: no deadline is earlier
    regime: tuple[str, int, int, int] = ("", 0, 0, 0)  # as when all deadlines were computed

    def begin_turn(self) -> None:
        """Begin a path of modes with the present one."""
        self.path = (self.mode,)

    def advance(self, t_ns: int) -> None:
        """Advance to the time of an input, never backwards."""
        self.now_ns = max(t_ns, self.now_ns)

    def enter(self, mode: Mode) -> None:
        """Change the mode, and note the time."""
        self.mode = mode
        self.path = (*self.path, mode)
        self.since_ns = self.now_ns

    def later(self, t_ns: int, gap_ns: int) -> int:
        """Return a past time moved by a stall of the launcher; 0 stays."""
        return min(t_ns + gap_ns, self.now_ns) if t_ns else 0

    def excuse(self, gap_ns: int) -> None:
        """Extend the present mode by the launcher's stall."""
        self.since_ns = self.later(self.since_ns, gap_ns)

    def wake_at(self, t_ns: int, regime: tuple[str, int, int, int]) -> None:
        """Record the next wake-up."""
        self.wake_ns, self.regime = t_ns, regime


class Inbox(StatePart, kw_only=True):
    """Sequence numbers of received frames, and the count of dropped ones."""

    seqs: dict[str, int] = {}  # sender -> its newest number
    dropped: int = 0

    def take(self, sender: str, seq: int) -> bool:
        """Record a frame's number. Return False if it is not newer than the sender's last."""
        if seq <= self.seqs.get(sender, 0):
            return False
        self.seqs[sender] = seq
        return True

    def forget(self, sender: str) -> None:
        """Forget a sender that is lost, or counts from 1 again."""
        self.seqs.pop(sender, None)

    def count_dropped(self) -> int:
        """Count a dropped frame; return how many there are."""
        self.dropped += 1
        return self.dropped


class Progress(StatePart, kw_only=True):
    """The generation, the phase before which it stands, and the farthest phase reported."""

    generation: int = 0
    n: int = 0  # the generation stands before phase n+1
    step: int = 0
    verdict: str = ""  # commit, redo or start
    first: bool = True  # all of its members start; none joins
    opened: bool = False  # this generation has been open
    transfers: tuple[tuple[int, int], ...] = ()  # (donor, joiner) by rank
    reached: tuple[int, int] = (0, 0)  # the farthest (n, step) reported
    base: messages.Checkpointed | None = None  # copy to rebuild shards without a replica from
    since: int = 0  # the generation that completed phase n, or the start of all ranks
    rebuilt: tuple[int, ...] = ()  # the ranks that read their shards from it
    joining: tuple[int, ...] = ()  # seats whose workers receive Seat in this generation
    straggler: int = 0  # the seat that was last found to be waited for
    absent: tuple[int, ...] = ()  # seats without a worker, while the others go on (shrinking)
    asked_back: int = 0  # the generation in which a rank was asked to stop, so that they come back

    def begin_generation(
        self, n: int, step: int, verdict: str, base: messages.Checkpointed | None = None
    ) -> None:
        """Begin the next generation before phase n+1; `base`: copy to rebuild lost shards from."""
        self.since = self.since_of(n) if verdict != "start" else self.generation + 1
        self.generation += 1
        self.n, self.step, self.verdict = n, step, verdict
        self.base, self.rebuilt = base, ()
        self.first, self.opened = verdict == "start", False

    def since_of(self, n: int) -> int:
        """Return the generation that completed phase n; its members alone know the state then."""
        return self.generation if n > self.n else self.since

    def have_all(self, world: int, has: Callable[[int], bool]) -> bool:
        """Return whether all seats but absent ones have what is waited for; it begins at the seat
        that lacked it last time, so that N answers cost O(N) and not O(N^2)."""
        for seat in chain(range(self.straggler, world), range(min(self.straggler, world))):
            if not has(seat) and seat not in self.absent:
                self.straggler = seat
                return False
        return True

    def let_go(self, seats: Iterable[int]) -> None:
        """Set the seats that have no worker from now on."""
        self.absent = tuple(sorted(seats))

    def ask_back(self) -> None:
        """Record that a rank was asked to stop, so that absent ones come back."""
        self.asked_back = self.generation

    def seat_later(self, seats: Iterable[int]) -> None:
        """Set the seats whose workers receive Seat in this generation."""
        self.joining = tuple(seats)

    @property
    def rebuilds(self) -> bool:
        """Return whether the decision to rebuild shards stands: its generation was never open."""
        return self.base is not None and not self.opened

    def restore(self, decision: DecisionMade, *, opened: bool) -> None:
        """Take over a generation of an earlier term; the newest one comes last."""
        is_start = decision.verdict == "start"
        self.since = decision.generation if is_start else self.since_of(decision.n)
        self.generation, self.n, self.step = decision.generation, decision.n, decision.step
        self.base, self.absent = decision.copy, decision.absent
        self.first = decision.verdict == "start"
        self.opened = opened
        self.reach(decision.n, decision.step)

    def reach(self, n: int, step: int) -> None:
        """Record how far a worker has come."""
        self.reached = max(self.reached, (n, step))

    def connect(
        self, transfers: tuple[tuple[int, int], ...], rebuilt: tuple[int, ...] = ()
    ) -> None:
        """Set the transfers of state from whole ranks to joiners, and the ranks that rebuild."""
        self.transfers, self.rebuilt = transfers, rebuilt

    def open(self) -> None:
        """Record that the generation has been open."""
        self.opened = True


class IncidentRecord(StatePart, kw_only=True):
    """The open incident and its faults (incident_response)."""

    number: int = 0  # 0: none is open
    count: int = 0  # numbers given so far
    faults: tuple[events.Fault, ...] = ()  # of the open incident
    newest: tuple[events.Fault, ...] = ()  # of this generation
    early: tuple[tuple[str, events.Fault], ...] = ()  # of a term that cannot act yet, with `how`


class Budgets(StatePart, kw_only=True):
    """Failed attempts, restarts and respawns since the newest progress."""

    attempts: dict[str, int] = {}  # generations without progress, by what recurs ("": nothing)
    causes: tuple[events.Fault, ...] = ()  # of the generations that made no progress
    restarts: int = 0  # restarts in a row without a phase or a checkpoint beyond the next two
    restarted_at: int = -1  # the farthest phase reported at the newest restart
    restarted_from: int = -1  # the farthest checkpoint at a restart
    respawns: int = 0  # workers started beyond the first ones, with no phase completed between
    respawned_at: int = -1  # the farthest phase reported when the newest of them was started
    early_deaths: dict[int, int] = {}  # seat -> early deaths since a generation opened
    spares_failed: int = 0  # spares in a row that died young, since a generation opened
    rungs: tuple[tuple[str, str, int], ...] = ()  # as in Means, of an hour
    failed: tuple[FailedWorker, ...] = ()  # likewise

    def end_attempts(self, faults: tuple[events.Fault, ...]) -> None:
        """End the row of failed generations: one has completed a phase."""
        self.attempts, self.causes = {}, faults

    def count_attempt(self, key: str, faults: tuple[events.Fault, ...]) -> None:
        """Count a generation without progress; `key`: what would recur."""
        self.attempts[key] = self.attempts.get(key, 0) + 1
        self.causes = tuple(dict.fromkeys((*self.causes, *faults)))[-CAUSES_MAX:]

    def count_restart(self, farthest: int, origin: int) -> None:
        """Count a restart from phase `origin`; any progress since the last one starts from 1."""
        progress = farthest > self.restarted_at or origin > self.restarted_from
        self.restarts = 1 if progress else self.restarts + 1
        self.restarted_at = max(farthest, self.restarted_at)
        self.restarted_from = max(origin, self.restarted_from)
        self.respawns = 0

    def respawns_left(self, respawns_max: int, reached: int) -> int:
        """Return how many workers may still be started; a completed phase resets the budget."""
        return max(0, respawns_max - (self.respawns if reached <= self.respawned_at else 0))

    def count_respawn(self, respawns_max: int, reached: int) -> int:
        """Count a worker that is started in place of another; return how many there are."""
        self.respawns = respawns_max - self.respawns_left(respawns_max, reached) + 1
        self.respawned_at = reached
        return self.respawns

    def count_early_death(self, seat: int, limit: float) -> bool:
        """Count a worker lost before it had its seat. Return True, and count anew, at the limit."""
        self.early_deaths[seat] = self.early_deaths.get(seat, 0) + 1
        if is_over := self.early_deaths[seat] >= limit:
            self.early_deaths = {}
        return is_over

    def count_spare(self, *, died_young: bool) -> None:
        """Count a lost spare; one that lived for long ends the row."""
        self.spares_failed = self.spares_failed + 1 if died_young else 0

    def take_rung(self, rung: str, failure: str, t_ns: int, failed: FailedWorker | None) -> None:
        """Count a rung for a class of failure, and the failed worker, in the hour's budgets."""
        self.rungs = (*(r for r in self.rungs if r[2] > t_ns - HOUR_NS), (rung, failure, t_ns))
        self.failed = (*self.failed, *filter(None, (failed,)))[-FAILED_MAX:]

    def record_opened(self) -> None:
        """Reset the budgets that an open generation resets."""
        self.spares_failed, self.early_deaths = 0, {}


class Term(StatePart, kw_only=True):
    """The controller's term, and what it takes over from the one before (run_start)."""

    number: int = 0
    succession: Succession | None = None  # of a takeover
    is_open: bool = False  # the earlier term's generation was opened, and no end requested
    end: EndDecided | None = None  # of the run, as an earlier term has decided it
    fence_wait: tuple[str, ...] = ()  # agents of the old generation that have to report first
    old_seats: tuple[str, ...] = ()  # worker by seat when the earlier term ended
    old_agents: tuple[str, ...] = ()  # agent by seat then
    joining: tuple[int, ...] = ()  # seats that held no state when the earlier term ended


class Saves(StatePart, kw_only=True):
    """Checkpoints of the run, and saves on request (checkpoint_tracking)."""

    checkpoint: messages.Checkpointed | None = None  # the copy that a restart loads
    on_disk: messages.Checkpointed | None = None  # the newest one on disk
    is_from_disk: bool = False  # a restart is under way that leaves out copies in memory
    step_s: float = 0.0  # of a step, by the newest save; 0: unknown
    is_searched: bool = False  # copies have been read since a host was last lost
    searches: int = 0  # of the newest restart
    is_requested: bool = False  # the next generation that opens saves first
    requested_n: int = -1  # phases completed where a save was requested: the next one saves
    durations_s: tuple[float, ...] = ()  # of the newest saves to disk, from the copy on


class SaveIntervals(StatePart, kw_only=True):
    """Measured costs of saves, and the intervals that follow (interval_updates)."""

    measured: RunMeasurements = RunMeasurements()
    schedule: Schedule | None = None  # the newest; None: nothing to choose, or not all measured
    scheduled_ns: int = 0
    announced: tuple[str, int, int] = ("", 0, 0)  # seat 0's worker, and the intervals sent to it


class SharedValueInProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A shared value that is being made: its maker, the deadline, and the waiting workers."""

    maker: str
    until_ns: int
    askers: tuple[str, ...]


class SharedValues(StatePart, kw_only=True):
    """Values that pass through the controller (shared_values)."""

    stored: dict[str, bytes] = {}  # shared values, by name: the first one stays
    making: dict[str, SharedValueInProgress] = {}
    meets: dict[tuple[str, int], messages.MeetEntry] = {}  # of groups that wait, by name and rank
    missing: dict[str, int] = {}  # group -> how many of its ranks are not here
    records: dict[int, bytes] = {}  # seat -> results of its set-up collectives
    calls: bytes = b""  # the most functions that a rank has described, for hot spares
    schemas: dict[tuple[int, ...], tuple[int, messages.StateProtected]] = {}  # stages -> first one
    holdings: dict[int, bytes] = {}  # seat -> the shards that it holds (shared_values)


class AuditReports(StatePart, kw_only=True):
    """Digests that ranks have reported in rounds of audits (audit_protocol)."""

    digests: dict[tuple[int, int], ReplicaDigests] = {}  # by phase and rank
    counts: dict[int, int] = {}  # phase -> how many ranks have reported


class Ending(StatePart, kw_only=True):
    """The requested or decided end of the run (run_ending)."""

    drain_reason: str = ""
    drain_ns: int = 0  # deadline of the drain; 0: none was requested
    result: EndRun | None = None  # set while the run stops, and after
