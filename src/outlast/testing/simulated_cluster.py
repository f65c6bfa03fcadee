"""A cluster on a virtual clock: the real `handle`, all else simulated, seeded faults.

`run_seed(seed)` plays one schedule to its end; a broken invariant raises SimFailure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from importlib import import_module
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from outlast import events
from outlast.config import Limits
from outlast.controller import inputs
from outlast.controller.controller_state import ControllerState
from outlast.controller.lifecycle.journal_segments import count_entries, join_segments
from outlast.controller.recovery.recovery_policy import DEFAULT, ELASTIC, RecoveryPolicy
from outlast.controller.state_machine import initial
from outlast.telemetry.committed_history import check_history
from outlast.testing.fault_plan import NO_OWNER, FaultPlan, draw_plan, draw_takeover_plan
from outlast.testing.run_invariants import RunInvariants, check_ending
from outlast.testing.simulated_agent import SimAgent
from outlast.testing.simulated_audits import AuditJudge, SimCheckpoints, bars_of
from outlast.testing.simulated_checks import RunChecks
from outlast.testing.simulated_controller import SimController
from outlast.testing.simulated_faults import FaultInjector
from outlast.testing.simulated_process import SimProcess, VirtualClock, WorkerMesh
from outlast.testing.simulated_terms import SimCandidate, SimTermStore
from outlast.testing.simulated_worker import SimWorker
from outlast.transport import messages

if TYPE_CHECKING:
    from outlast.testing.absent_ranks.simulated_data import SimData

VIRTUAL_S_MAX = 900.0
_STORY = 120
_NOBODY_S = 5.0


class SimOutcome(NamedTuple):
    """The end of a simulated run, with its counts."""

    seed: int
    outcome: str
    cause: str
    virtual_s: float
    turns: int
    generations: int
    restarts: int
    struck: int
    terms: int = 1
    shrinks: int = 0  # decisions that let ranks leave
    returns: int = 0  # ranks that have come back
    restores: int = 0  # likewise, by a restart from a checkpoint without them
    refused: int = 0  # frames of lower terms, by agents


class SimCluster:
    """One run of one plan. `run()` plays it to its end."""

    def __init__(
        self, seed: int, plan: FaultPlan | None = None, recovery: RecoveryPolicy = DEFAULT
    ) -> None:
        self.seed = seed
        shrinks = plan is not None and plan.shrinking is not None
        self.recovery = recovery = ELASTIC if shrinks and recovery is DEFAULT else recovery
        self.decided: events.Decided | None = None  # the newest
        self.plan = plan = plan or draw_plan(seed)
        self.timeline = VirtualClock(seed)
        self.ledger = RunInvariants(self.plan.world, recovery.moves_max)
        self.ledger.last = self.plan.phases
        self.ledger.tell = self._tell
        self.limits = Limits(
            hello_s=20,
            status_s=2,
            join_s=15,
            connect_s=3,
            transfer_s=3,
            stop_s=6,
            lease_s=3,
            kill_s=6,
            shared_s=2,
            attempts_max=self.plan.attempts_max,
            respawns_max=plan.shrinking.respawns_max if plan.shrinking else 400,
            stopped_s=2,
            hang_floor_s=2,
            hang_ceiling_s=12,
            straggler_wait_s=4,
        )
        self.story: deque[tuple[float, object]] = deque(maxlen=_STORY)
        self.segments: dict[int, list[inputs.AnyEntry]] = {}  # by term
        self._entries_known: dict[int, int] = {}  # by term: those that the ledger knows
        self.shelf = SimCheckpoints(rots=self.plan.rot)
        self.audits = AuditJudge(self.ledger, self.shelf)
        self.maker: SimProcess | None = None
        self.turns = 0
        self.end: inputs.EndRun | None = None
        self.struck = 0
        self.slow_workers: set[str] = set()  # one, once the planned rank has become slow
        self.restarts = 0
        self.checks = RunChecks(self)
        self.faults = FaultInjector(self)
        self._meshes: dict[int, WorkerMesh] = {}
        self.connecting: dict[int, tuple[str, ...]] = {}  # worker by seat, by generation
        self.look_costs_a_host = False
        self.crash_in = -1  # turns until the controller crashes
        if plan.shrinking is not None:  # it imports torch, which costs seconds
            data = import_module("outlast.testing.absent_ranks.simulated_data")
            self._new_data: Callable[[int, int, int], SimData] = data.SimData
        self.first_state = initial(
            *(plan.world, plan.spares, self.limits, plan.policy),
            *("drain", plan.placement(), recovery),
        )
        self.controllers: dict[int, SimController] = {}  # by term
        self._cuts: dict[frozenset[str], float] = {}  # two places that do not reach each other
        self.terms = SimTermStore(self) if plan.takes_over else None
        self.agents = {name: SimAgent(self, name, plan.room()) for name in plan.hosts()}
        if self.terms is None:
            self._start_controller()
        else:
            self._begin_with_store(self.terms)
        for time_s, what in self.plan.timed:
            self.timeline.at(time_s, lambda what=what: self.faults.happen(what))

    def run(self) -> SimOutcome:
        """Play the plan to its end. Raises SimFailure where an invariant is broken."""
        while self.end is None:
            if not self.timeline.step():
                self.ledger.fail("no event is pending, and the run has not ended")
            if self.timeline.now_s > VIRTUAL_S_MAX:
                self.ledger.fail(f"no end after {VIRTUAL_S_MAX} virtual seconds")
        self.ledger.is_start = self.state.progress.first
        if not self._is_end_of_policy(self.end):
            check_ending(self.plan, self.ledger, self.end)
        history = self.ledger.history
        if self.plan.flips:  # audits find a wrong state after it was committed
            history = [phase._replace(content=()) for phase in history]
        if problems := check_history(self.segments, history):
            self.ledger.fail(f"workers and journal contradict each other: {problems[0]}")
        self.ledger.histories.check()
        if self.plan.waits:
            self.checks.calm()
        if self.plan.pace:
            self.checks.undisturbed(self.end.outcome)
        return SimOutcome(
            seed=self.seed,
            outcome=self.end.outcome,
            cause=self.end.cause.detail if self.end.cause else "",
            virtual_s=self.timeline.now_s,
            turns=self.turns,
            generations=self.ledger.decided,
            restarts=self.restarts,
            struck=self.struck,
            terms=len(self.segments),
            refused=self.ledger.refused,
            shrinks=self.checks.shrinks,
            returns=self.ledger.histories.returns,
            restores=self.ledger.histories.restores,
        )

    def _is_end_of_policy(self, end: inputs.EndRun) -> bool:
        """Return whether the policy had no other rung left, where the default one may have had."""
        stopped = self.decided is not None and self.decided.rung == "stop"
        is_other = self.recovery.digest not in (DEFAULT.digest, ELASTIC.digest)
        return is_other and stopped and end.outcome in ("gave_up", "user_error")

    def note(self, text: str) -> None:
        """Add a line to the story of the run."""
        self.story.append((self.timeline.now_s, text))

    # --- controllers ---

    @property
    def controller(self) -> SimController:
        """Return the controller of the newest term that has begun."""
        return self.controllers[max(self.controllers)]

    @property
    def state(self) -> ControllerState:
        """Return the state of the newest controller."""
        return self.controller.state

    def _start_controller(self) -> None:
        self.begin(max(self.controllers, default=0) + 1, None)

    def _begin_with_store(self, terms: SimTermStore) -> None:
        """Begin the first term, whose agents have met; each host watches for later ones."""
        first, *_ = self.agents.values()
        terms.create(1, first.name)
        for node_rank, agent in enumerate(self.agents.values()):
            agent.learn(1)
            SimCandidate(agent, terms, node_rank)
        self.begin(1, first)
        self.timeline.after(_NOBODY_S, self._end_without_owner)

    def join(self) -> None:
        """Let a host that the run has not known join it, as a spare one."""
        assert self.terms is not None
        agent = SimAgent(self, f"late{len(self.agents)}", self.plan.room())
        agent.learn(self.terms.newest())
        self.agents[agent.name] = agent
        SimCandidate(agent, self.terms, len(self.agents) - 1)

    def begin(self, term: int, host: SimAgent | None) -> None:
        """Begin a term on a host: read what earlier terms made durable."""
        read = count_entries(self.segments)
        for each, count in read.items():
            for entry in self.segments[each][self._entries_known.get(each, 0) : count]:
                self.ledger.durable(entry, self.controllers[each].state.saves.checkpoint)
            self._entries_known[each] = count
        self.ledger.condemned.clear()  # a new term does not know the last one's findings
        controller = self.controllers[term] = SimController(self, term, host)
        controller.begin(read, join_segments(self.segments))

    def _end_without_owner(self) -> None:
        """End the run, resumable, when nobody controls it and no agent may take over."""
        self.timeline.after(_NOBODY_S, self._end_without_owner)
        if any(each.alive for each in self.controllers.values()):
            return
        assert self.terms is not None
        agents, successors = self.agents.values(), self.terms.signs().successors
        if self.end is not None or any(
            agent.may_create() or agent.is_creating or agent.may_succeed(successors)
            for agent in agents
        ):
            return
        fault = events.Fault(kind="agent_lost", detail=NO_OWNER)
        self.end = inputs.EndRun(outcome="gave_up", exit_code=3, cause=fault)

    def controller_of(self, agent: SimAgent) -> SimController | None:
        """Return the controller to which an agent can connect; a stopped one accepts too."""
        term = max(self.controllers, default=0) if self.terms is None else agent.obeyed
        newest = self.controllers.get(term)
        if newest is None or not newest.alive:
            return None
        if newest.host is None or self.reaches(agent.name, newest.host.name):
            return newest
        return None

    def is_newest(self, controller: SimController) -> bool:
        """Return whether no later term exists."""
        return self.terms is None or self.terms.newest() == controller.term

    def crash(self, controller: SimController) -> None:
        """End a controller's process; without a store of terms, another one starts."""
        controller.die()
        self.close_connections(controller)
        if self.terms is None:
            line = self.timeline
            longest_s = 1.0 if line.dice.random() < 0.7 else 5.0
            line.after(line.between(0.1, longest_s), self._start_controller)

    def close_connections(self, controller: SimController) -> None:
        """Close the connections of a process that has ended on a live host."""
        for agent in self.agents.values():
            if self.terms is None or agent.link is controller:
                agent.connected = False

    def agent_gone(self, controller: SimController, agent: SimAgent, life: tuple[int, int]) -> None:
        """Tell a controller that an agent's connection was lost."""
        incarnation, epoch = life
        if not agent.connected and agent.epoch == epoch:
            t_ns = self.timeline.now_ns
            lost = inputs.AgentLost(t_ns=t_ns, agent=agent.name, incarnation=incarnation)
            controller.feed(lost)

    def newest_checkpoint(
        self, journal: tuple[inputs.AnyEntry, ...]
    ) -> messages.Checkpointed | None:
        """Return the checkpoint that a launcher finds before a start."""
        return self.shelf.newest(bars_of(journal))

    def verify(self, controller: SimController, action: inputs.Verify) -> None:
        """Search the newest whole checkpoint for a restart."""
        answer = inputs.CheckpointFound(
            t_ns=self.timeline.now_ns,
            generation=action.generation,
            checkpoint=self.shelf.verified(action.bars, from_disk=action.from_disk),
        )
        line = self.timeline
        line.after(line.between(0.0, 0.5), lambda: controller.feed(answer))
        if self.look_costs_a_host and self.shelf.is_in_memory(answer.checkpoint):
            self.look_costs_a_host = False
            line.after(line.between(0.0, 1.5), lambda: self.faults.happen("agent"))

    def durable(self, controller: SimController, entry: inputs.AnyEntry) -> None:
        """Check an entry that the controller has made durable."""
        self.ledger.durable(entry, controller.state.saves.checkpoint)
        self._entries_known[controller.term] = len(controller.segment)
        if isinstance(entry, inputs.DecisionMade):
            self.checks.fence(entry)
            self.checks.origin(controller.state, entry)

    def part(self, host: str, other: str, until_s: float) -> None:
        """Cut two hosts from each other, and the connection of an agent to a controller there."""
        self.cut(host, other, until_s)
        for name, peer in ((host, other), (other, host)):
            link = self.agents[name].link
            if link is not None and link.host is not None and link.host.name == peer:
                self.agents[name].lag(until_s)

    def may_commit(self, agent: SimAgent) -> bool:
        """Return whether a checkpoint of this host's workers may become complete."""
        return self.terms is None or agent.obeyed == self.terms.newest()

    def reaches(self, place: str, other: str) -> bool:
        """Return whether the network connects two hosts, or a host and the store."""
        until_s = self._cuts.get(frozenset((place, other)), -1.0) if self._cuts else -1.0
        return self.timeline.now_s >= until_s

    def are_connected(self, hosts: set[str]) -> bool:
        """Return whether all these hosts reach each other."""
        return not self._cuts or all(self.reaches(*pair) for pair in combinations(hosts, 2))

    def cut(self, place: str, other: str, until_s: float) -> None:
        """Cut two places from each other until a time."""
        if place != other:
            both = frozenset((place, other))
            self._cuts[both] = max(self._cuts.get(both, 0.0), until_s)

    def has_bug(self, seat: int, n: int) -> bool:
        """Return whether the script raises at this phase on this seat."""
        return n == self.plan.bug_at and seat == self.plan.world - 1

    # --- shared by workers ----

    def new_data(self, seat: int) -> SimData | None:
        """Return the place of a rank in its data before the first phase; None without data."""
        options = self.plan.shrinking
        return self._new_data(self.plan.world, options.rows, seat) if options else None

    def mesh(self, body: messages.Connect) -> WorkerMesh:
        """Return the connections of a generation, created on first use."""
        if body.generation not in self._meshes:
            seats = self.connecting[body.generation]
            self._meshes[body.generation] = WorkerMesh(self, body, seats)
        return self._meshes[body.generation]

    def checkpoint_due(self, n: int) -> bool:
        """Return whether the script saves after phase n."""
        return self.plan.checkpoint_every > 0 and n % self.plan.checkpoint_every == 0

    def alive_workers(self) -> list[SimWorker]:
        """Return the workers that live, of all hosts."""
        return [w for a in self.agents.values() for w in a.workers.values() if w.alive]

    def makes(self, worker: SimProcess) -> None:
        """Check that a shared value is not made twice while its maker lives."""
        maker = self.maker
        if not worker.agent.may_apply():  # lost: its host has woken, and its frames are dropped
            return
        makes = maker and maker.alive and maker.agent.may_apply() and len(self.controllers) == 1
        if maker and makes and maker is not worker:
            self.ledger.fail(f"{worker.name} makes a shared value that {maker.name} is making")
        self.maker = worker

    def _tell(self, text: str) -> str:
        lines = (f"  {time_s:9.4f} {what}" for time_s, what in self.story)
        return "\n".join([f"seed {self.seed}: {text}", f"  {self.plan}", *lines])


def run_seed(seed: int, recovery: RecoveryPolicy = DEFAULT) -> SimOutcome:
    """Play one seeded schedule. Raises SimFailure when a promise of the protocol is broken."""
    return SimCluster(seed, recovery=recovery).run()


def run_takeover_seed(seed: int) -> SimOutcome:
    """Play one seeded schedule of several hosts whose controllers die, stop or are cut off."""
    return SimCluster(seed, draw_takeover_plan(seed)).run()
