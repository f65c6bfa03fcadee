"""A virtual clock, processes that can be killed, stopped or stalled, and their connections."""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from outlast.events import Fault, FaultKind
from outlast.testing.fault_plan import WAIT_S
from outlast.transport import messages
from outlast.transport.rank_spans import pack_ranks
from outlast.transport.rendezvous_messages import PART_BYTES
from outlast.transport.worker_page import SLOTS

if TYPE_CHECKING:
    from outlast.testing.absent_ranks.rank_histories import TrainedShare
    from outlast.testing.simulated_agent import SimAgent
    from outlast.testing.simulated_cluster import SimCluster
    from outlast.testing.simulated_worker import SimWorker

NS = 1_000_000_000
_RETRANSMIT_S = 0.2
_SILENCE_S = 2.0
NO_ANSWER = "no answer of another host"


class VirtualClock:
    """Runs callbacks in order of their virtual times; equal ones in order of creation."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.dice = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def now_ns(self) -> int:
        """Return the virtual time in ns; it starts at 1 s."""
        return int(self.now_s * NS) + NS

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Run a callback at this time, or now if that is past."""
        self._count += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._count, call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Run a callback after this delay."""
        self.at(self.now_s + delay_s, call)

    def between(self, low_s: float, high_s: float) -> float:
        """Return a random number of this range."""
        return low_s + (high_s - low_s) * self.dice.random()

    def step(self) -> bool:
        """Run the next callback; return False when none is left."""
        if not self._heap:
            return False
        self.now_s, _, call = heapq.heappop(self._heap)
        call()
        return True


class WorkerKilled(Exception):  # noqa: N818 - unwinds a callback of a worker that has just died
    """Unwinds the callback of a worker that has just died."""


class SimSlots:
    """The ring of slots of a worker page: a write first destroys the oldest slot."""

    def __init__(self) -> None:
        self._ring: list[tuple[str, bytes] | None] = [None] * SLOTS
        self._next = 0

    def put(self, key: str, value: bytes, halfway: Callable[[], object]) -> None:
        """Write a slot; `halfway` runs while the slot is invalid."""
        self._ring[self._next] = None
        halfway()
        self._ring[self._next] = (key, value)
        self._next = (self._next + 1) % SLOTS

    def read(self) -> dict[str, bytes]:
        """Return the valid slots by key, the newest of each."""
        ring = (*self._ring[self._next :], *self._ring[: self._next])
        return dict(slot for slot in ring if slot is not None)


class SimProcess(ABC):
    """A worker process as its host sees it. `token` changes when pending work is void."""

    def __init__(self, agent: SimAgent, name: str) -> None:
        self.agent, self.name = agent, name
        self.cluster = agent.cluster
        self.ledger, self.line = self.cluster.ledger, self.cluster.timeline
        self.alive, self.hung = True, False
        self.stalled = False  # the main thread is blocked; the reader thread still answers
        self.struck = False
        self.waits_until_s = 0.0  # the main thread waits in the script; other threads still answer
        self.moved_ns = self.line.now_ns
        self._later: list[Callable[[], object]] = []
        self._unsaid: list[messages.WorkerBody] = []
        self.replies: dict[str, messages.WorkerBody] = {}
        self.seq = 0
        self.slots = SimSlots()
        self.state = "starting"
        self.seat = -1
        self.n = self.token = self.completed = 0
        self.busy = False  # an operation in progress that must end before the next move

    @property
    def step(self) -> int:
        """Return the committed steps."""
        return self.n

    @abstractmethod
    def proceed(self) -> None:
        """Make the next move, if no work is pending and one is due."""

    @abstractmethod
    def trouble(self, fault: Fault) -> None:
        """Report a fault, while the process lives."""

    @abstractmethod
    def tear(self, fault: Fault | None = None) -> None:
        """Fail while applying, or while a phase is taken back; the process must be replaced."""

    @abstractmethod
    def leave(self) -> None:
        """Break the connections of the dead process."""

    def call(self, what: Callable[[], object]) -> None:
        """Run a callback of this process: drop it when dead, delay it while stopped."""
        if not self.alive:
            return
        if self.hung:
            self._later.append(what)
            return
        try:
            what()
        except WorkerKilled:
            return

    def soon(self, low_s: float, high_s: float, what: Callable[[], object]) -> None:
        """Run a callback of this process after a random delay."""
        self.line.after(self.line.between(low_s, high_s), lambda: self.call(what))

    def work(self, low_s: float, high_s: float, what: Callable[[], object]) -> None:
        """Run a callback after some work, unless `token` changes meanwhile."""
        self.busy = True
        token = self.token

        def done() -> None:
            if token == self.token and not self.stalled:
                self.busy = False
                what()
                self.proceed()

        lag_s = self.lag_s
        self.soon(low_s + lag_s, high_s + lag_s, done)

    @property
    def lag_s(self) -> float:
        """Return the seconds for which the script still waits."""
        return max(0.0, self.waits_until_s - self.line.now_s)

    def load(self, checkpoint: messages.Checkpointed | None) -> int:
        """Return the phase of the checkpoint that it starts from; die if it does not exist."""
        if self.cluster.shelf.is_condemned(checkpoint):
            self.ledger.fail(f"{self.name} starts from {checkpoint}, in which a rank is wrong")
        n = self.cluster.shelf.load(checkpoint)
        if n is None:
            if checkpoint is None or checkpoint.tier == "disk":
                self.ledger.fail(f"{checkpoint} does not exist")
            fault = Fault(  # the message came too late
                kind="exited", detail="exit code 1", exit_code=1, traceback="CorruptionError"
            )
            self.die(fault)
            raise WorkerKilled
        return n

    def die(self, fault: Fault) -> None:
        """End the process; the agent reaps it."""
        if not self.alive:
            return
        self.alive = False
        self.leave()
        self.agent.reap(self, fault)

    def wait_for_word(self, waits: Callable[[], bool]) -> None:
        """End the process if `waits` still holds after the controller's silence."""
        limits = self.cluster.limits
        fault = Fault(kind="exited", detail="no word", exit_code=1, traceback="GaveUpError")
        patience_s = 2 * (limits.ready_s + limits.status_s + limits.transfer_s)
        self.line.after(patience_s, lambda: self.die(fault) if waits() else None)

    def pause(self, seconds: float) -> None:
        """Stop the process for `seconds`; 0: without end."""
        self.hung = True
        if seconds:
            self.line.after(seconds, self._resume)

    def _resume(self) -> None:
        if not self.alive:
            return
        self.hung = False
        unsaid, self._unsaid = self._unsaid, []
        for body in unsaid:
            self.say(body)
        later, self._later = self._later, []
        for what in later:
            self.call(what)

    def point(self, name: str) -> str:
        """Let a planned fault strike; return the fault that the caller must carry out."""
        self.moved_ns = self.line.now_ns
        deed = self.cluster.faults.strike(name, self)
        if deed in ("kill", "exit"):
            code = 0 if deed == "kill" else 1
            kind: FaultKind = "killed" if deed == "kill" else "exited"
            self.die(Fault(kind=kind, detail=f"{deed} at {name}", exit_code=code))
            raise WorkerKilled
        if deed in ("hang", "pause"):
            self.pause(0.0 if deed == "hang" else self.line.between(0.2, 4.0))
        elif deed == "stall":
            self.stalled = True
        elif deed == "wait":
            self.waits_until_s = self.line.now_s + self.line.between(*WAIT_S)
        elif deed == "raise":
            self.trouble(Fault(kind="raised", detail=f"at {name}", traceback="once"))
        elif deed in ("transport", "nonfinite"):
            self.trouble(Fault(kind=deed, detail=f"at {name}"))
        elif deed == "torn" and self.state == "applying":
            self.tear()
        return deed

    def has_won(self, ballot: Ballot | None) -> bool:
        """Return whether a vote is won, and the host still has its lease."""
        return ballot is not None and ballot.complete and self.agent.may_apply()

    def say(self, body: messages.WorkerBody) -> None:
        """Send a frame; delay it while the process is stopped."""
        if not self.alive:
            return
        if self.hung:
            self._unsaid.append(body)
            return
        self.seq += 1
        self.agent.relay(self, self.seq, body)

    def say_again(self, kind: str) -> None:
        """Repeat the last frame of this kind, if the plan repeats frames."""
        if kind in self.replies and self.cluster.plan.repeats:
            self.say(self.replies[kind])

    def tell(self, body: messages.WorkerBody) -> None:
        """Send a frame that may be repeated."""
        self.replies[type(body).__name__] = body
        self.say(body)


class Ballot:
    """One vote on one phase: complete when every rank's yes has arrived.

    Each rank's answer travels separately.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.votes: dict[int, tuple[SimWorker, int]] = {}  # worker and its token by rank
        self.shares: dict[int, TrainedShare] = {}  # of all voters, by rank
        self.shown: dict[int, dict[str, int]] = {}  # what their windows show
        self.complete = False


class WorkerMesh:
    """The connections of one generation."""

    def __init__(self, cluster: SimCluster, plan: messages.Connect, seats: tuple[str, ...]) -> None:
        self.cluster = cluster
        self.generation = plan.generation
        self.seats = seats
        self.present = tuple(seat for seat, name in enumerate(seats) if name)
        self.transfers = plan.transfers
        self.rebuilt = plan.rebuilt
        self.copy = plan.copy
        self.members: dict[int, SimWorker] = {}
        self._cut_s = -1.0  # since when it is known that two hosts do not reach each other
        self.states: dict[tuple[int, int], int] = {}
        self._ballots: dict[int, Ballot] = {}

    def arrive(self, worker: SimWorker) -> None:
        """Connect a member; it must own the seat."""
        if self.seats[worker.seat] != worker.name:
            self.cluster.ledger.fail(f"{worker.name} connects at another's rank, {worker.seat}")
        self.members[worker.seat] = worker

    def meet_of(self, seat: int) -> messages.Meet:
        """Return what a member sends for the group of all ranks."""
        ranks, value = pack_ranks(self.present), b"%d" % seat
        parts = bytes(PART_BYTES * len(self.present))
        g = self.generation
        return messages.Meet(
            generation=g, name="all", ranks=ranks, value=value, parts=parts, address=f"{seat}:1"
        )

    def is_complete(self) -> bool:
        """Return whether all members are connected."""
        return len(self.members) == len(self.present)

    def lets_connect(self, worker: SimWorker) -> bool:
        """Return whether all members are there and reach each other. A worker whose host does not
        reach one of them looks again, and gives up after a time."""
        if not (self.cluster.plan.links_end and self.is_complete()) or self._is_connected():
            return self.is_complete()
        worker.soon(_RETRANSMIT_S, _RETRANSMIT_S, worker.mesh_when_met)
        self._end_when_silent(worker)
        return False

    def unreached(self, host: str) -> tuple[str, ...]:
        """Return the hosts of members that a host does not reach."""
        hosts = {member.agent.name for member in self.members.values()}
        return tuple(sorted(one for one in hosts if not self.cluster.reaches(host, one)))

    def _is_connected(self) -> bool:
        members = self.members.values()
        if self.cluster.are_connected({member.agent.name for member in members}):
            self._cut_s = -1.0
        elif self._cut_s < 0:
            self._cut_s = self.cluster.timeline.now_s
        return self._cut_s < 0

    def _end_when_silent(self, worker: SimWorker) -> None:
        """End the generation on a worker that has had no answer of another host for long."""
        is_late = self.cluster.timeline.now_s - self._cut_s > _SILENCE_S
        if self.cluster.plan.links_end and is_late and self.unreached(worker.agent.name):
            fault = Fault(kind="transport", detail=NO_ANSWER)
            worker.call(lambda: worker.trouble(fault))

    def ballot(self, n: int) -> Ballot:
        """Return the ballot of phase n, created on first use."""
        return self._ballots.setdefault(n, Ballot(n))

    def vote(self, worker: SimWorker) -> Ballot:
        """Vote yes on phase n+1. The answer reaches each rank at its own time, or never."""
        ballot = self.ballot(worker.n + 1)
        if ballot.complete:
            self.cluster.ledger.fail(f"{worker.name} votes twice on phase {ballot.n}")
        if worker.seat not in self.present:
            self.cluster.ledger.fail(f"{worker.name} votes at rank {worker.seat}, which is absent")
        ballot.votes[worker.seat] = worker, worker.token
        ballot.shares[worker.seat] = worker.share()
        ballot.shown[worker.seat] = worker.shown()
        self._complete(ballot)
        return ballot

    def _complete(self, ballot: Ballot) -> None:
        """Answer the voters once all have voted and reach each other."""
        line = self.cluster.timeline
        if len(ballot.votes) < len(self.present):
            return
        if not self._is_connected():
            line.after(_RETRANSMIT_S, lambda: self._complete(ballot))
            for voter, token in tuple(ballot.votes.values()):
                if voter.token == token:
                    self._end_when_silent(voter)
            return
        first = ballot.shown[self.present[0]]
        if any(ballot.shown[seat] != first for seat in self.present):
            self._dispute(ballot)
            return
        ballot.complete = True
        self.cluster.ledger.agree(ballot.n, self.present, ballot.shares)
        for voter, token in ballot.votes.values():
            delay_s = line.between(0.0005, 0.03)
            line.after(delay_s, lambda voter=voter, token=token: voter.answer(token))

    def _dispute(self, ballot: Ballot) -> None:
        """Let all voters know that their windows differ, and empty the ballot."""
        line = self.cluster.timeline
        for voter, token in tuple(ballot.votes.values()):
            disputed = partial(voter.disputed, token)
            line.after(line.between(0.0005, 0.03), partial(voter.call, disputed))
        ballot.votes, ballot.shares, ballot.shown = {}, {}, {}

    def remove(self, worker: SimWorker) -> None:
        """Remove a dead member: its frames may still arrive, its neighbours may notice."""
        line = self.cluster.timeline
        for ballot in self._ballots.values():
            if not ballot.complete and line.dice.random() < 0.5:
                ballot.votes.pop(worker.seat, None)
        for member in self.members.values():
            if member is not worker and line.dice.random() < 0.4:
                delay_s = line.between(0.001, 0.02)
                line.after(delay_s, lambda member=member: member.peer_gone(self.generation))
