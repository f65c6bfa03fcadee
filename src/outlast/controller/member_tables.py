"""Agents, workers and seats: the records of the members, and indexes of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from outlast import events
from outlast.controller.inputs import AnyEntry, DecisionMade, FindingKey, GroupsNoted
from outlast.controller.state_parts import StatePart
from outlast.transport import messages


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Record of an agent: its host, incarnation, lease and last message."""

    name: str
    incarnation: int
    host: str
    capacity: int
    lease_ns: int
    renewed_ns: int
    connected: bool = True  # frames reach it
    lapsed: bool = False  # its lease expired: it has no workers
    has_reported: bool = False  # it has renewed since its Hello, behind all that it had to repeat

    def until_ns(self) -> int:
        """Return the time at which its workers count as lost unless it renews its lease."""
        return self.renewed_ns + self.lease_ns


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    exit_code: int = 0  # with which its script has asked to end
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


class NodePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of a run and their share of its ranks.

    `agents`: the agents in the order of node ranks, spare nodes last; () for a run that takes any
    agent. Ranks are contiguous by node: rank r belongs to node r // ranks_per_node. `domains`: of
    the agents' nodes, the largest part first, as in `row2/rack7`; "" is unknown.
    """

    agents: tuple[str, ...] = ()
    ranks_per_node: int = 0
    domains: tuple[str, ...] = ()
    shares_keepers: bool = False  # copies in memory are reached from other hosts

    def home(self, seat: int) -> str:
        """Return the agent of the node to which a rank belongs; "" without nodes."""
        return self.agents[seat // self.ranks_per_node] if self.agents and seat >= 0 else ""

    def with_node(self, agent: str, domain: str) -> NodePlacement:
        """Return the placement with a node that came later, as a spare one."""
        if not self.agents or agent in self.agents:
            return self
        domains = (*self.domains, domain) if self.domains else ()
        return replace(self, agents=(*self.agents, agent), domains=domains)

    def absent(self, agents: Collection[str]) -> list[str]:
        """Return the agents of the placement that are not among `agents`."""
        return [name for name in self.agents if name not in agents]


class PartnerQuery(StatePart, kw_only=True):
    """Question to all agents for the own state of ranks that were lost with their hosts
    (partner_slots)."""

    lost: dict[int, None] = msgspec.field(default_factory=dict)  # ranks lost with their hosts
    place: tuple[int, int, int] = (0, 0, 0)  # generation, n and `since` of the newest question
    seats: tuple[int, ...] = ()  # in the question
    waiting: tuple[str, ...] = ()  # agents without an answer
    asked_ns: int = 0
    received: dict[tuple[int, str], int] = msgspec.field(
        default_factory=dict
    )  # (seat, slot) -> generation

    def note_loss(self, seat: int, cause: events.FaultKind, how: events.FaultKind) -> None:
        """Record whether the own state of a rank, lost for `cause`, is to come from its partners:
        it was lost with its host, and no fault has made its state doubtful before."""
        self.lost.pop(seat, None)
        if how == "agent_lost" and cause != "unknown":
            self.lost[seat] = None

    def begin(self, place: tuple[int, int, int], seats: tuple[int, ...], now_ns: int) -> None:
        """Begin a question."""
        if place != self.place:
            self.received = {}
        self.place, self.seats, self.asked_ns = place, seats, now_ns

    def wait_for(self, agents: Iterable[str]) -> None:
        """Set the agents that have yet to answer."""
        self.waiting = tuple(agents)

    def take(self, seat: int, key: str, generation: int) -> bool:
        """Record a slot; return False if a newer one is known."""
        if self.received.get((seat, key), -1) > generation:
            return False
        self.received[seat, key] = generation
        return True


CUT_S = 600.0  # a cut that was not found again within this time counts as healed


class NetworkCuts(StatePart, kw_only=True):
    """Pairs of hosts that do not reach each other, although both reach the controller
    (network_cuts)."""

    pairs: dict[tuple[str, str], tuple[int, int]] = msgspec.field(
        default_factory=dict
    )  # agents -> generation and time of the newest report
    since_ns: int = 0  # first report since the newest completed phase; 0: none
    tries: int = 0  # generations with reports since then
    counted: int = 0  # the newest of them
    confirmed: tuple[int, tuple[tuple[str, str], ...]] = (
        0,
        (),
    )  # a generation, and pairs that have answered its Close

    def report(self, pair: tuple[str, str], generation: int, now_ns: int) -> None:
        """Record that a generation has found two hosts that do not reach each other."""
        self.pairs[pair] = generation, now_ns
        self.since_ns = self.since_ns or now_ns
        self.tries += generation > self.counted
        self.counted = max(generation, self.counted)

    def confirm(self, generation: int, pairs: Iterable[tuple[str, str]]) -> None:
        """Record the pairs of which both hosts have answered Close: neither is lost."""
        self.confirmed = generation, tuple(pairs)

    def end(self, generation: int, healed: Iterable[tuple[str, str]]) -> None:
        """Begin to count anew, since a phase is complete, and forget cuts that have healed."""
        for pair in tuple(healed):
            if self.pairs.get(pair, (generation, 0))[0] < generation:
                del self.pairs[pair]
        is_new = any(found == generation for found, _ in self.pairs.values())
        self.since_ns = max((t_ns for _, t_ns in self.pairs.values()), default=0) * is_new
        self.tries = int(is_new)

    def forget(self, agent: str) -> None:
        """Forget the cuts of a host whose agent was started again."""
        self.pairs = {pair: found for pair, found in self.pairs.items() if agent not in pair}

    def others(self, agent: str, now_ns: int) -> set[str]:
        """Return the agents whose hosts this agent's host does not reach."""
        return {
            other
            for pair, (_, t_ns) in self.pairs.items()
            if agent in pair and now_ns - t_ns < CUT_S * 1e9
            for other in pair
            if other != agent
        }


class Findings(StatePart, kw_only=True):
    """Findings of node checks, and the moves of ranks for them (planned_migration)."""

    warned: dict[FindingKey, events.Warned] = msgspec.field(
        default_factory=dict
    )  # open findings of node checks
    calm: dict[str, int] = msgspec.field(
        default_factory=dict
    )  # agent -> the generation in which its ranks were last seen to step
    moves: dict[FindingKey, tuple[str, int]] = msgspec.field(
        default_factory=dict
    )  # of all terms: the given-up worker, and the time
    leaving: tuple[str, ...] = ()  # all workers that the newest moves have given up
    departing: dict[str, tuple[int, int]] = msgspec.field(
        default_factory=dict
    )  # worker -> generation and time of its Leave
    awaited: dict[FindingKey, int] = msgspec.field(
        default_factory=dict
    )  # since when a move waits for spares that build their models
    unmoved: tuple[FindingKey, ...] = ()  # findings that are noted as moving no rank


class HostReleases(StatePart, kw_only=True):
    """Hosts that leave the run for maintenance (node_release)."""

    closed: tuple[str, ...] = ()  # agents on their way, which get no rank and no worker
    released: dict[FindingKey, tuple[str, int]] = msgspec.field(
        default_factory=dict
    )  # agent and its incarnation that were released for a finding of `outlast roll`


class NoticePlans(StatePart, kw_only=True):
    """Answers to notices whose ranks cannot move (notice_deadlines)."""

    # "" until it is known whether the ranks can move; "saves": now, and before the deadline;
    # "late": no save. And since when.
    answers: dict[FindingKey, tuple[str, int]] = msgspec.field(default_factory=dict)


_ANSWERS = frozenset(
    {"status", "ready", "joined", "finished", "exit_code", "is_hot", "fits", "calls"}
)


class Members(StatePart, kw_only=True):
    """Agents, workers, and the seats that workers have (membership).

    `crews` and `unseated` are indexes of `workers`, and `touched` lists the records of this turn.
    """

    agents: dict[str, AgentRecord] = msgspec.field(default_factory=dict)
    workers: dict[str, WorkerRecord] = msgspec.field(default_factory=dict)
    crews: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)  # agent -> workers
    unseated: dict[str, None] = msgspec.field(default_factory=dict)  # workers without a seat
    touched: dict[str, None] = msgspec.field(default_factory=dict)  # their deadlines may be new
    seats: list[str] = msgspec.field(default_factory=list)  # worker by seat, "" for an empty one
    abandoned_slots: dict[int, dict[str, bytes]] = msgspec.field(
        default_factory=dict
    )  # seat -> slots of its lost occupants
    fingerprint: dict[str, str] | None = None  # of the first start; every worker must have it
    spawned: int = 0  # workers started in this term
    greeted_ns: int = 0  # when the first worker of this term sent Hello; 0: none has
    refill_due: bool = False  # replace spares once this generation completes a phase
    stays_warm: bool = False  # hot spares are not prepared any more: one failed, or ranks differ

    def add(self, worker: WorkerRecord) -> WorkerRecord:
        """Add a worker's record."""
        self.workers[worker.name] = worker
        self.crews[worker.agent] = (*self.crews.get(worker.agent, ()), worker.name)
        self.touched[worker.name] = None
        if worker.seat < 0:
            self.unseated[worker.name] = None
        return worker

    def change(self, name: str, **changes: Any) -> WorkerRecord:
        """Replace fields of one worker's record."""
        worker = self.workers[name] = replace(self.workers[name], **changes)
        if not changes.keys() <= _ANSWERS:  # these end deadlines, and begin none
            self.touched[name] = None
        if "seat" in changes:
            self.unseated.pop(name, None)
            if worker.seat < 0:
                self.unseated[name] = None
        return worker

    def announce(self, names: Iterable[str], now_ns: int, **changes: Any) -> list[WorkerRecord]:
        """Replace fields of many workers' records, to which a request is sent now."""
        workers, touched = self.workers, self.touched
        for name in (all_of := tuple(names)):
            workers[name] = replace(workers[name], since_ns=now_ns, **changes)
            touched[name] = None
        return [workers[name] for name in all_of]

    def remove(self, name: str) -> None:
        """Remove a worker's record, and empty its seat."""
        worker = self.workers.pop(name)
        self.crews[worker.agent] = tuple(one for one in self.crews[worker.agent] if one != name)
        self.unseated.pop(name, None)
        self.vacate(worker)

    def set_agent(self, agent: AgentRecord) -> None:
        """Add or replace an agent's record."""
        self.agents[agent.name] = agent
        self.touched[agent.name] = None

    def take_touched(self) -> list[str]:
        """Return the records that this turn has changed, and forget them."""
        touched = list(self.touched)
        self.touched.clear()
        return touched

    def crew(self, agent: str) -> list[WorkerRecord]:
        """Return the workers of an agent."""
        return [self.workers[name] for name in self.crews.get(agent, ())]

    def room(self, agent: AgentRecord) -> int:
        """Return how many more workers an agent may start."""
        return agent.capacity - len(self.crews.get(agent.name, ())) if agent.connected else 0

    def neighbours(self, seat: int, share: int = 0) -> set[str]:
        """Return agents whose hosts hold an adjacent rank and fewer seats than their share, by
        default an equal one."""
        if seat < 0 or not self.agents:
            return set()
        share = share or -(-len(self.seats) // len(self.agents))
        beside = (self.seats[at] for at in (seat - 1, seat + 1) if 0 <= at < len(self.seats))
        near = {worker.agent for name in beside if (worker := self.workers.get(name))}
        return {name for name in near if name in self.agents and self.ranks_of(name) < share}

    def ranks_of(self, agent: str) -> int:
        """Return how many ranks an agent has."""
        return sum(worker.seat >= 0 and not worker.killed_ns for worker in self.crew(agent))

    def usable_spares(self) -> Iterator[WorkerRecord]:
        """Yield the workers that may take a seat."""
        for name in self.unseated:
            worker = self.workers[name]
            if not worker.killed_ns and not worker.missing_ns:
                yield worker

    def has_right_indexes(self) -> bool:
        """Return whether the indexes list the workers as they are."""
        crews: dict[str, set[str]] = {}
        for worker in self.workers.values():
            crews.setdefault(worker.agent, set()).add(worker.name)
        found = {agent: set(names) for agent, names in self.crews.items() if names}
        unseated = {worker.name for worker in self.workers.values() if worker.seat < 0}
        return found == crews and self.unseated.keys() == unseated

    def spares_hold_no_state(self) -> bool:
        """Return whether no worker counts as a donor that may still get a seat."""
        return not any(worker.whole for worker in self.usable_spares())

    def keep_warm(self) -> None:
        """Prepare no spares any more."""
        self.stays_warm = True

    def assign(self, seat: int, name: str) -> None:
        """Give a seat to a worker; "" empties it."""
        self.seats[seat] = name

    def vacate(self, worker: WorkerRecord) -> None:
        """Empty the seat of a worker."""
        if 0 <= worker.seat < len(self.seats) and self.seats[worker.seat] == worker.name:
            self.seats[worker.seat] = ""

    def set_seats(self, seats: Iterable[str], slots: dict[int, dict[str, bytes]]) -> None:
        """Set all seats, with the slots that were left for them."""
        self.seats = list(seats)
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
            self.set_agent(replace(agent, renewed_ns=later(agent.renewed_ns)))
        for worker in tuple(self.workers.values()):
            self.change(
                worker.name,
                since_ns=later(worker.since_ns),
                killed_ns=later(worker.killed_ns),
                missing_ns=later(worker.missing_ns),
            )
        self.greeted_ns = later(self.greeted_ns)


class UnitRecord(StatePart, kw_only=True):
    """Groups of ranks, and units of ranks that leave together (shrinking)."""

    uses: dict[int, messages.GroupUse] = msgspec.field(default_factory=dict)  # by rank
    units: tuple[tuple[int, ...], ...] = ()  # when ranks last left; (): each rank is one
    parted: tuple[int, ...] = ()  # healthy ranks that were given up, since their unit leaves
    reached: tuple[int, int] = (0, 0)  # (n, step) that these had completed

    def restore(self, entry: AnyEntry) -> None:
        """Take over what an entry of the journal says of groups and units."""
        if isinstance(entry, GroupsNoted):
            self.uses[entry.seat] = entry.use
        elif isinstance(entry, DecisionMade):
            self.uses = {} if entry.verdict == "start" else self.uses
            self.units = entry.units or self.units
