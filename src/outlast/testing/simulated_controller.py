"""A simulated controller process: the real `handle`, a journal segment, and its right to act.

Where hosts share a store of terms (`FaultPlan.takes_over`), a decision is sent only after a read of
the store that began when it was durable and found no newer term, and a renewal is confirmed at once
only while all agents are in touch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from outlast.controller import deadlines, inputs
from outlast.controller.controller_state import ControllerState, ControllerTurn
from outlast.controller.planned_migration import SCHEDULER
from outlast.controller.state_machine import apply_all, handle
from outlast.testing.fault_plan import DRAINS, NOTICES, ROLL
from outlast.testing.simulated_faults import OPERATOR
from outlast.testing.simulated_process import NS
from outlast.testing.simulated_terms import BEAT_SHARE, IN_TOUCH_SHARE
from outlast.transport import messages

if TYPE_CHECKING:
    from outlast.testing.simulated_agent import SimAgent
    from outlast.testing.simulated_cluster import SimCluster

TURNS_MAX = 40_000
_PURITY_EVERY = 61
_STALL_S = 1.25
EXCUSED_S = 1.0  # as in launch/terms/held_actions.py
_READ_AGAIN_S = 0.2
_ASK_S = 0.7  # between two questions to the scheduler


class SimController:
    """The controller of one term on a host; a stopped one goes on where it was."""

    def __init__(self, cluster: SimCluster, term: int, host: SimAgent | None) -> None:
        self.cluster, self.term, self.host = cluster, term, host
        self.line, self.ledger = cluster.timeline, cluster.ledger
        self.state = cluster.first_state.copy()
        self.segment: list[inputs.AnyEntry] = []
        self.alive = True
        self.stop_in = -1  # messages until it is stopped
        self._stopped_s = -1.0
        self._rest: list[Callable[[], None]] = []  # what a stopped process still does
        self._inputs: list[inputs.Input] = []  # what it has not read
        self._confirmed_s: dict[str, float] = {}  # agent -> when its confirmed answer was sent
        self._unsent: deque[tuple[float, inputs.Send | inputs.EndRun]] = deque()
        self._renewals: list[tuple[float, inputs.Send]] = []
        self._durable_s = self._read_s = -1.0
        self._is_reading = False
        self._excused_s = 0.0
        self._inherited: tuple[str, ...] = ()  # successors of earlier terms
        # Newest record of successors that no reader misses, and the one that is being written.
        self._published: tuple[int, tuple[str, ...]] = (0, ())
        self._publishing: tuple[int, tuple[str, ...]] | None = None

    def begin(self, read: dict[int, int], journal: tuple[inputs.AnyEntry, ...]) -> None:
        """Begin the term with the entries of earlier ones, of which it has `read` so many."""
        self.cluster.segments[self.term] = self.segment
        if self.cluster.terms is not None:
            self._append(inputs.TermBegan(read=read, takes_over=self.term > 1))
        checkpoint = self.cluster.newest_checkpoint(journal)
        if self.cluster.terms is not None:
            self._inherited = self.cluster.terms.signs(self.term - 1).successors
            self._beat()
        change = None
        if self.host is not None and self.term > 1:
            change = inputs.Succession(self.host.name, "another host", self.line.now_ns)
        self.feed(
            inputs.BeginTerm(
                t_ns=self.line.now_ns,
                run="sim",
                term=self.term,
                journal=journal,
                checkpoint=checkpoint,
                succession=change,
            )
        )
        if any(what in (*DRAINS, *NOTICES, ROLL) for _, what in self.cluster.plan.timed):
            self._ask_scheduler()

    def _ask_scheduler(self) -> None:
        if not self.alive:
            return
        now_ns, found = self.line.now_ns, self.cluster.faults.drains()
        self.feed(inputs.SchedulerChecked(t_ns=now_ns, check=SCHEDULER, found=found))
        found = self.cluster.faults.notices()
        self.feed(inputs.SchedulerChecked(t_ns=now_ns, check=OPERATOR, found=found))
        found = self.cluster.faults.rolls()
        self.feed(inputs.SchedulerChecked(t_ns=now_ns, check=ROLL, found=found))
        self.line.after(_ASK_S, lambda: self.call(self._ask_scheduler))

    # --- the process ---

    def call(self, what: Callable[[], None]) -> None:
        """Run a callback of this process; later if it is stopped, never if it is dead."""
        if self.alive and self._stopped_s >= 0:
            self._rest.append(what)
        elif self.alive:
            what()

    def stop_for(self, seconds: float) -> None:
        """Stop the process for a time, as SIGSTOP does."""
        if self.alive and self._stopped_s < 0:
            self._stopped_s = self.line.now_s
            self.line.after(seconds, self._wake)

    def _wake(self) -> None:
        if not self.alive:
            return
        gap_s, self._stopped_s = self.line.now_s - self._stopped_s, -1.0
        rest, self._rest = self._rest, []
        events, self._inputs = self._inputs, []
        self.cluster.note(f"controller {self.term} wakes")
        for what in rest:
            self.call(what)
        now_ns = self.line.now_ns
        if gap_s > _STALL_S:
            self.feed(inputs.LauncherStalled(t_ns=now_ns, gap_ns=int(gap_s * NS)))
        for event in events:
            self.feed(msgspec.structs.replace(event, t_ns=now_ns))

    def die(self) -> None:
        """End the process."""
        self.alive = False
        self.cluster.note(f"controller {self.term} ends")

    def step_down(self) -> None:
        """End the term's control, since a newer term exists; its host's workers end too."""
        if self.alive:
            self.die()
            self.cluster.close_connections(self)
            if self.host is not None:
                self.host.end_processes()

    # --- inputs ---

    def hear(self, envelope: messages.MessageEnvelope, confirmed_s: float) -> None:
        """Handle a frame. `confirmed_s`: when the newest answer that its agent got was sent."""
        if not self.alive:
            return
        if envelope.term > self.term:
            self.call(self.step_down)
            return
        if isinstance(envelope.body, messages.WorkerLostReport):
            self.ledger.left_behind(envelope.body)
        if isinstance(envelope.body, messages.Renew):
            self._confirmed_s[envelope.agent] = confirmed_s
        self.feed(inputs.Received(t_ns=self.line.now_ns, envelope=envelope))

    def feed(self, event: inputs.Input) -> None:
        """Give an input to the real controller, and carry out what it answers."""
        cluster = self.cluster
        if cluster.end is not None or not self.alive:
            return
        if self._stopped_s >= 0:
            self._inputs.append(event)
            return
        if (gap_s := self._waited_s()) and not isinstance(event, inputs.LauncherStalled):
            self.feed(inputs.LauncherStalled(t_ns=self.line.now_ns, gap_ns=int(gap_s * NS)))
        cluster.turns += 1
        if cluster.turns > TURNS_MAX:
            self.ledger.fail(f"no end after {TURNS_MAX} turns of the controller")
        cluster.story.append((self.line.now_s, event))
        if cluster.turns % _PURITY_EVERY == 0:
            self.state, actions = self._handle_purely(event)
            if self._sleeps_too_long():
                self.ledger.fail("a deadline is before the next wake-up")
        else:
            actions = apply_all(self.state, (event,))
        self.ledger.state(self.state)
        crash_after = -1
        if cluster.crash_in >= 0:
            cluster.crash_in -= 1
            if cluster.crash_in < 0:
                crash_after = self.line.dice.randint(0, len(actions))
        for index, action in enumerate(actions):
            if index == crash_after:
                break
            cluster.story.append((self.line.now_s, action))
            self._execute(action)
        if crash_after >= 0 and cluster.end is None:
            self.cluster.crash(self)

    def _handle_purely(self, event: inputs.Input) -> tuple[ControllerState, list[inputs.Action]]:
        """Handle an input twice from one state, and check that both turns are equal."""
        before = self.state
        encoded = msgspec.msgpack.encode(before)
        after, actions = handle(before, event)
        if msgspec.msgpack.encode(before) != encoded:
            self.ledger.fail("handle changed the state that it was given")
        if handle(before, event)[1] != actions:
            self.ledger.fail("handle returned two results for the same input")
        return after, actions

    def _waited_s(self) -> float:
        """Return for how long orders have waited for the store; 0 for less than EXCUSED_S."""
        since_s = max(self._unsent[0][0], self._excused_s) if self._unsent else self.line.now_s
        if self.line.now_s - since_s < EXCUSED_S:
            return 0.0
        self._excused_s = self.line.now_s
        return self.line.now_s - since_s

    def _sleeps_too_long(self) -> bool:
        if self.state.mode == "ended":
            return False
        turn = ControllerTurn(self.state.copy())
        return self.state.clock.wake_ns > max(deadlines.earliest(turn), turn.now_ns + 1)

    def _tick(self, t_ns: int) -> None:
        if self.alive and self.state.clock.wake_ns == t_ns:
            self.feed(inputs.Tick(t_ns=max(t_ns, self.line.now_ns)))

    # --- actions ---

    def _execute(self, action: inputs.Action) -> None:
        match action:
            case inputs.Send():
                self.cluster.checks.announced(self, action.body)
                self._send(action)
            case inputs.EndRun():
                self._send(action)
            case inputs.AppendJournal():
                self._append(action.entry)
            case inputs.Wake():
                delay_s = (action.t_ns - self.line.now_ns) / NS
                self.line.after(delay_s, partial(self._tick, action.t_ns))
            case inputs.Verify():
                self.cluster.verify(self, action)
            case inputs.Emit():
                self.cluster.checks.observe(self, action.event)

    def _append(self, entry: inputs.JournalEntry) -> None:
        assert isinstance(entry, inputs.AnyEntry)
        self.segment.append(entry)
        self._durable_s = self.line.now_s
        if self.cluster.is_newest(self):
            self.cluster.durable(self, entry)

    def _send(self, action: inputs.Send | inputs.EndRun) -> None:
        """Send what may be sent at once; let the rest wait for a read of the store."""
        if self.cluster.terms is None:
            self._emit(action)
        elif isinstance(action, inputs.Send) and isinstance(action.body, messages.Renewed):
            if self._is_in_touch():
                self._emit(action)
            else:
                self._renewals.append((self.line.now_s, action))
                self._read()
        elif not self._is_checked(action):
            self._unsent.append((self.line.now_s, action))
            self._read()
        else:
            self._emit(action)

    def _emit(self, action: inputs.Send | inputs.EndRun) -> None:
        if self._stopped_s >= 0:
            self._rest.append(partial(self._emit, action))
            return
        self.stop_in -= self.stop_in >= 0
        if self.stop_in == 0:
            self.stop_for(self.line.between(0.2, 7.0))
            self._rest.append(partial(self._emit, action))
        elif isinstance(action, inputs.EndRun):
            self.cluster.end = action
        else:
            self.ledger.sent(action.body)
            self.cluster.agents[action.agent].deliver(self, action.workers, action.body)

    # --- the store ---

    def _is_checked(self, action: inputs.Send | inputs.EndRun) -> bool:
        """Return whether the store was read since all that this action follows from is durable."""
        is_end = isinstance(action, inputs.EndRun)
        return not (self._unsent or self._durable_s > self._read_s or is_end)

    def _is_in_touch(self) -> bool:
        """Return whether no agent can be about to create a term."""
        until_s = self.line.now_s - IN_TOUCH_SHARE * self.cluster.limits.lease_s
        names, is_known = self._may_create(), self.state.mode != "awaiting"
        return (
            is_known
            and bool(names)
            and all(self._confirmed_s.get(name, -1.0) > until_s for name in names)
        )

    def _may_create(self) -> tuple[str, ...]:
        """Return the agents of this term that may create the next one; none: any agent may."""
        (_, successors), waiting = self._published, self._publishing
        if not successors:
            return ()
        return (*self.leased(), *successors, *(waiting[1] if waiting else ()))

    def leased(self) -> tuple[str, ...]:
        """Return the agents that have leases of this term."""
        agents = self.state.members.agents.values()
        return tuple(sorted(agent.name for agent in agents if not agent.lapsed))

    def _next_record(self) -> tuple[int, tuple[str, ...]]:
        """Return the record of successors that the next beat writes, or finds written."""
        wanted = self.leased()
        if self.state.mode == "awaiting":
            wanted = tuple(sorted({*wanted, *self._inherited}))
        number, published = self._published
        if self._publishing is None and (wanted != published or not number):
            self._publishing = number + 1, wanted
        return self._publishing or self._published

    def _on_published(self, record: tuple[int, tuple[str, ...]]) -> None:
        if record == self._publishing:
            self._published, self._publishing = record, None

    def _beat(self) -> None:
        terms, host = self.cluster.terms, self.host
        if self.alive and terms is not None and host is not None:
            record = self._next_record()
            beat = partial(terms.beat, self.term, *record)
            terms.request(host.name, beat, partial(self._look, record))
            pause_s = BEAT_SHARE * self.cluster.limits.lease_s
            self.line.after(pause_s, lambda: self.call(self._beat))

    def _look(self, record: tuple[int, tuple[str, ...]], newest: int) -> None:
        if newest > self.term:
            self.call(self.step_down)
        else:
            self.call(partial(self._on_published, record))

    def _read(self) -> None:
        """Read the store until nothing waits for it."""
        terms, host = self.cluster.terms, self.host
        if self._is_reading or not (self._unsent or self._renewals) or not self.alive:
            return
        assert terms is not None and host is not None
        self._is_reading = True
        began_s = self.line.now_s
        terms.request(
            host.name,
            terms.newest,
            lambda newest: self.call(partial(self._on_read, began_s, newest)),
        )
        self.line.after(_READ_AGAIN_S, lambda: self.call(self._read_again))

    def _read_again(self) -> None:
        self._is_reading = False
        self._read()

    def _on_read(self, began_s: float, newest: int) -> None:
        if newest > self.term:
            self.step_down()
            return
        self._read_s = max(self._read_s, began_s)
        renewals, self._renewals = self._renewals, []
        for stamp_s, action in renewals:
            if stamp_s <= began_s:
                self._emit(action)
            else:
                self._renewals.append((stamp_s, action))
        while self._unsent and self._unsent[0][0] <= began_s and self.cluster.end is None:
            self._emit(self._unsent.popleft()[1])
        self._is_reading = False
        self._read()
