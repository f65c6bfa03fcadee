"""A cluster on a virtual clock: the real `handle`, all else simulated, seeded faults.

`run_seed(seed)` plays one schedule to its end; a broken invariant raises SimFailure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from outlast import events
from outlast.config import Limits
from outlast.controller import deadlines, inputs
from outlast.controller.controller_state import ControllerTurn
from outlast.controller.recovery.recovery_ladder import FROM_A_COPY
from outlast.controller.state_machine import handle, initial
from outlast.testing.fault_plan import FaultPlan, draw_plan
from outlast.testing.run_invariants import RunInvariants, check_ending
from outlast.testing.simulated_agent import SimAgent
from outlast.testing.simulated_audits import AuditJudge, SimCheckpoints, bars_of
from outlast.testing.simulated_process import NS, SimProcess, VirtualClock, WorkerMesh
from outlast.testing.simulated_worker import SimWorker
from outlast.transport import messages

VIRTUAL_S_MAX = 900.0
TURNS_MAX = 40_000
_STORY = 120
_PURITY_EVERY = 61


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


class SimCluster:
    """One run of one plan. `run()` plays it to its end."""

    def __init__(self, seed: int, plan: FaultPlan | None = None) -> None:
        self.seed = seed
        self.plan = plan = plan or draw_plan(seed)
        self.timeline = VirtualClock(seed)
        self.ledger = RunInvariants(self.plan.world)
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
            respawns_max=400,
            hang_floor_s=2,
            hang_ceiling_s=12,
        )
        self.story: deque[tuple[float, object]] = deque(maxlen=_STORY)
        self.journal: list[inputs.AnyEntry] = []
        self.shelf = SimCheckpoints(rots=self.plan.rot)
        self.audits = AuditJudge(self.ledger, self.shelf)
        self.maker: SimProcess | None = None
        self.controller_up = False
        self.term = 0
        self.turns = 0
        self.end: inputs.EndRun | None = None
        self.struck = 0
        self.restarts = 0
        self._strikes = [[strike, strike.nth] for strike in plan.strikes + plan.flips]
        self._meshes: dict[int, WorkerMesh] = {}
        self._connecting: dict[int, tuple[str, ...]] = {}  # worker by seat, by generation
        self._crash_in = -1
        self._look_costs_a_host = False
        self._first = initial(
            plan.world, plan.spares, self.limits, plan.policy, "drain", plan.placement()
        )
        self._state = self._first
        self.agents = {name: SimAgent(self, name, plan.room()) for name in plan.hosts()}
        self._start_controller()
        for time_s, what in self.plan.timed:
            self.timeline.at(time_s, lambda what=what: self._happen(what))

    def run(self) -> SimOutcome:
        """Play the plan to its end. Raises SimFailure where an invariant is broken."""
        while self.end is None:
            if not self.timeline.step():
                self.ledger.fail("no event is pending, and the run has not ended")
            if self.timeline.now_s > VIRTUAL_S_MAX:
                self.ledger.fail(f"no end after {VIRTUAL_S_MAX} virtual seconds")
        check_ending(self.plan, self.ledger, self.end)
        if self.plan.waits:
            self._check_calm()
        return SimOutcome(
            seed=self.seed,
            outcome=self.end.outcome,
            cause=self.end.cause.detail if self.end.cause else "",
            virtual_s=self.timeline.now_s,
            turns=self.turns,
            generations=self.ledger.decided,
            restarts=self.restarts,
            struck=self.struck,
        )

    # --- the controller's shell ---

    def _start_controller(self) -> None:
        self.term += 1
        self.controller_up = True
        self._state = self._first
        self.ledger.condemned.clear()  # a new term does not know the last one's findings
        self._feed(
            inputs.BeginTerm(
                t_ns=self.timeline.now_ns,
                run="sim",
                term=self.term,
                journal=tuple(self.journal),
                checkpoint=self.shelf.newest(bars_of(self.journal)),
            )
        )

    def _feed_in(self, term: int, event: inputs.Input) -> None:
        if self.controller_up and term == self.term:
            self._feed(event)

    def controller_hears(self, envelope: messages.MessageEnvelope) -> None:
        """Deliver a frame to the controller, if it runs."""
        if self.controller_up and envelope.term <= self.term:
            if isinstance(envelope.body, messages.WorkerLostReport):
                self.ledger.left_behind(envelope.body)
            self._feed(inputs.Received(t_ns=self.timeline.now_ns, envelope=envelope))

    def agent_gone(self, agent: SimAgent, incarnation: int, epoch: int) -> None:
        """Tell the controller that an agent's connection was lost."""
        if self.controller_up and not agent.connected and agent.epoch == epoch:
            t_ns = self.timeline.now_ns
            self._feed(inputs.AgentLost(t_ns=t_ns, agent=agent.name, incarnation=incarnation))

    def _feed(self, event: inputs.Input) -> None:
        if self.end is not None:
            return
        self.turns += 1
        if self.turns > TURNS_MAX:
            self.ledger.fail(f"no end after {TURNS_MAX} turns of the controller")
        self.story.append((self.timeline.now_s, event))
        before = self._state
        pure = self.turns % _PURITY_EVERY == 0
        encoded = msgspec.msgpack.encode(before) if pure else b""
        self._state, actions = handle(before, event)
        if pure:
            if msgspec.msgpack.encode(before) != encoded:
                self.ledger.fail("handle changed the state that it was given")
            if handle(before, event)[1] != actions:
                self.ledger.fail("handle returned two results for the same input")
            if self._sleeps_too_long():
                self.ledger.fail("a deadline is before the next wake-up")
        self.ledger.state(self._state)
        crash_after = -1
        if self._crash_in >= 0:
            self._crash_in -= 1
            if self._crash_in < 0:
                crash_after = self.timeline.dice.randint(0, len(actions))
        for index, action in enumerate(actions):
            if index == crash_after:
                break
            self.story.append((self.timeline.now_s, action))
            self._do(action)
        if crash_after >= 0 and self.end is None:
            self._crash()

    def _do(self, action: inputs.Action) -> None:
        match action:
            case inputs.Send():
                self.ledger.sent(action.body)
                if isinstance(action.body, messages.Kill):
                    self._check_kill(action.body)
                elif isinstance(action.body, messages.Connect):
                    seats = tuple(self._state.members.seats)
                    self._connecting.setdefault(action.body.generation, seats)
                self.agents[action.agent].deliver(action.workers, action.body)
            case inputs.AppendJournal():
                entry = action.entry
                assert isinstance(entry, inputs.AnyEntry)
                self.ledger.durable(entry)
                self.journal.append(entry)
                if isinstance(entry, inputs.DecisionMade):
                    self._check_fence(entry)
                    self._check_origin(entry)
            case inputs.Wake():
                delay_s = (action.t_ns - self.timeline.now_ns) / NS
                self.timeline.after(delay_s, self._tick_for(self.term, action.t_ns))
            case inputs.Verify():
                answer = inputs.CheckpointFound(
                    t_ns=self.timeline.now_ns,
                    generation=action.generation,
                    checkpoint=self.shelf.verified(action.bars),
                )
                term, line = self.term, self.timeline
                line.after(line.between(0.0, 0.5), lambda: self._feed_in(term, answer))
                if self._look_costs_a_host and self.shelf.is_in_memory(answer.checkpoint):
                    self._look_costs_a_host = False
                    line.after(line.between(0.0, 1.5), lambda: self._happen("agent"))
            case inputs.Emit():
                self._observe(action.event)
            case inputs.EndRun():
                self.end = action

    def _tick_for(self, term: int, t_ns: int) -> Callable[[], None]:
        def tick() -> None:
            if self.controller_up and term == self.term and self._state.clock.wake_ns == t_ns:
                self._feed(inputs.Tick(t_ns=max(t_ns, self.timeline.now_ns)))

        return tick

    def _crash(self) -> None:
        self.controller_up = False
        for agent in self.agents.values():
            agent.connected = False
        line = self.timeline
        longest_s = 1.0 if line.dice.random() < 0.7 else 5.0
        line.after(line.between(0.1, longest_s), self._start_controller)

    def _observe(self, event: events.AnyEvent) -> None:
        if isinstance(event, events.Decided) and event.rung in FROM_A_COPY:
            self.restarts += 1
            self._check_need(event)
        elif isinstance(event, events.ReplicasCompared):
            self.audits.compared(event, self._state.audit.origins)
        elif isinstance(event, events.WorkerLost):
            for worker in self._alive():
                if worker.name == event.worker:
                    self.ledger.fail(f"{worker.name} was counted as lost while it lives")

    # --- faults --------

    def strike(self, point: str, worker: SimProcess) -> str:
        """Return the planned fault of a worker at this point; "" nearly always."""
        for armed in self._strikes:
            strike, remaining = armed
            if strike.point == point and remaining > 0 and strike.seat in (-1, worker.seat):
                if strike.deed == "wait":  # part of the script: every worker of that phase waits
                    if strike.nth == worker.n + 1:
                        self.story.append((self.timeline.now_s, f"{worker.name} waits at {point}"))
                        return "wait"
                    continue
                armed[1] = remaining - 1
                if remaining == 1:
                    self.struck += 1
                    worker.struck = True
                    deed = f"{strike.deed} {worker.name} at {point}"
                    self.story.append((self.timeline.now_s, deed))
                    if strike.deed == "crash":
                        self._crash_in = self.timeline.dice.randint(0, 4)
                    elif strike.deed == "drop":
                        worker.agent.hang_up(self.timeline.between(0.0, 1.0))
                    return strike.deed
        return ""

    def _happen(self, what: str) -> None:
        line = self.timeline
        self.struck += 1
        self.story.append((line.now_s, f"happens: {what}"))
        alive = self._alive()
        agent = line.dice.choice(list(self.agents.values()))
        if what in ("kill", "pair", "all"):
            count = {"kill": 1, "pair": 2, "all": len(alive)}[what]
            for worker in line.dice.sample(alive, min(count, len(alive))):
                worker.die(events.Fault(kind="killed", detail="SIGKILL", signal=9))
        elif what == "crash" and self.controller_up:
            self._crash_in = line.dice.randint(0, 12)
        elif what == "agent":
            agent.die()
            line.after(line.between(0.5, 6.0), lambda: setattr(agent, "present", True))
        elif what == "look":
            self._look_costs_a_host = True
        elif what in ("drop", "cut"):
            agent.hang_up(line.between(*((0.0, 1.0) if what == "drop" else (2.0, 8.0))))
        elif what == "unwell":
            agent.check()
        elif what in ("stop", "save") and self.controller_up:
            request = inputs.StopRequested if what == "stop" else inputs.SaveRequested
            self._feed(request(t_ns=line.now_ns, reason="asked"))

    def has_bug(self, seat: int, n: int) -> bool:
        """Return whether the script raises at this phase on this seat."""
        return n == self.plan.bug_at and seat == self.plan.world - 1

    # --- shared by workers ----

    def mesh(self, body: messages.Connect) -> WorkerMesh:
        """Return the connections of a generation, created on first use."""
        if body.generation not in self._meshes:
            seats = self._connecting[body.generation]
            self._meshes[body.generation] = WorkerMesh(self, body, seats)
        return self._meshes[body.generation]

    def checkpoint_due(self, n: int) -> bool:
        """Return whether the script saves after phase n."""
        return self.plan.checkpoint_every > 0 and n % self.plan.checkpoint_every == 0

    def makes(self, worker: SimProcess) -> None:
        """Check that a shared value is not made twice while its maker lives."""
        if self.maker and self.maker is not worker and self.maker.alive and self.term == 1:
            self.ledger.fail(f"{worker.name} makes a shared value that {self.maker.name} is making")
        self.maker = worker

    # --- checks ---

    def _sleeps_too_long(self) -> bool:
        turn = ControllerTurn(self._state.copy())
        return self._state.clock.wake_ns > max(deadlines.earliest(turn), turn.now_ns + 1)

    def _alive(self) -> list[SimWorker]:
        return [w for a in self.agents.values() for w in a.workers.values() if w.alive]

    def _check_fence(self, entry: inputs.DecisionMade) -> None:
        """Check that workers without a seat are dead before the decision (invariant g)."""
        for worker in self._alive():
            if worker.seat >= 0 and worker.name not in entry.seats:
                self.ledger.fail(
                    f"generation {entry.generation} was decided while {worker.name}, which has no"
                    f" seat in it, still lives at rank {worker.seat}"
                )

    def _check_origin(self, entry: inputs.DecisionMade) -> None:
        """Check that no run starts from a checkpoint that is known to be lost."""
        checkpoint = self._state.saves.checkpoint if entry.verdict == "start" and entry.n else None
        if self.shelf.is_known_to_lack(checkpoint, self.timeline.now_s):
            self.ledger.fail(f"{checkpoint} does not exist")

    def _check_kill(self, body: messages.Kill) -> None:
        """Check that a worker that answers at once is not killed for silence."""
        ends = self._state.ending.result
        if "has not answered" not in body.reason or ends or self._news_may_be_lost():
            return
        for worker in self._alive():
            if worker.name == body.worker and not (worker.struck or worker.hung):
                self.ledger.fail(f"{worker.name} was killed as silent, though it answers")

    def _check_calm(self) -> None:
        """Check that waiting scripts lose nothing; a lone waiter is given up once at most."""
        seats: dict[int, set[int]] = {}
        for strike in self.plan.strikes:
            if strike.point == "attempt":
                seats.setdefault(strike.nth, set()).add(strike.seat)
        given_up = sum(len(waiting) < self.plan.world for waiting in seats.values())
        if self.restarts or self.ledger.decided > 1 + given_up:
            self.ledger.fail(
                f"{self.restarts} restarts and {self.ledger.decided} generations of a run in which"
                " nothing failed"
            )

    def _news_may_be_lost(self) -> bool:
        return (
            self.term > 1
            or any(what not in ("kill", "pair", "stop", "save") for _, what in self.plan.timed)
            or any(strike.deed in ("crash", "drop") for strike in self.plan.strikes)
        )

    def _check_need(self, event: events.Decided) -> None:
        """Check that no restart loses steps while a survivor and all own states exist."""
        if self._news_may_be_lost() or self.plan.flips:
            return
        seated = [w for w in self._alive() if w.seat >= 0]
        survivors = {w.seat: w for w in seated if w.is_set_up and w.has_state}
        if not survivors or any(not w.is_set_up for w in seated):
            return
        n = max([self._state.progress.n, *(worker.n for worker in survivors.values())])
        keys = {f"before:{n}", f"after:{n}"}
        slots = self.ledger.slots_left
        lost = set(range(self.plan.world)) - survivors.keys()
        shards = {worker.shards() for worker in survivors.values()}
        needed = {b"shards %d" % (seat % self.plan.shard_sets) for seat in lost}
        if needed <= shards and all(keys & slots.get(seat, set()) for seat in lost):
            self.ledger.fail(f"a restart without need: {event.reason}")

    def _tell(self, text: str) -> str:
        lines = (f"  {time_s:9.4f} {what}" for time_s, what in self.story)
        return "\n".join([f"seed {self.seed}: {text}", f"  {self.plan}", *lines])


def run_seed(seed: int) -> SimOutcome:
    """Play one seeded schedule. Raises SimFailure when a promise of the protocol is broken."""
    return SimCluster(seed).run()
