"""The real controller with simulated hosts and workers that answer at once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from outlast import events
from outlast.config import Limits
from outlast.controller.controller_state import ControllerState, WorkerRecord
from outlast.controller.inputs import (
    Action,
    AgentLost,
    BeginTerm,
    CheckpointFound,
    Emit,
    EndRun,
    Input,
    Received,
    Send,
    StopRequested,
    Tick,
    Verify,
    Wake,
)
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.controller.state_machine import handle_all, initial
from outlast.transport import messages

TERM = 1
LEASE_S = 1e12  # the simulator says when a host is gone
_DIGEST: tuple[str, int, float] = ("told", 0, 0.0)  # of a state that moved


class ControllerPeers:
    """Simulated peers of the real controller.

    `now_ns`: time of the next actions; `n` and `step`: place of the survivors; `found`: checkpoints
    for a restart of all.
    """

    def __init__(
        self,
        run: str,
        nodes: int,
        spares: int,
        limits: Limits,
        policy: SavePolicy,
        emit: Callable[[events.AnyEvent], None],
    ) -> None:
        self._run = run
        self._emit = emit
        self.now_ns = 0
        self.n = self.step = 0
        self.found = messages.Checkpointed(n=0, step=0, path="the beginning")
        self.state: ControllerState = initial(nodes, spares, limits, policy)
        self.decided: events.Decided | None = None  # the newest
        self.decisions = 0
        self.end: EndRun | None = None
        self.wake_ns: int | None = None
        self._hosts = {f"node{k}": 1 for k in range(nodes + spares)}  # and their incarnations
        self._inbox: list[messages.MessageEnvelope | Input] = []
        self._held: dict[
            str, tuple[str, messages.WorkerReady]
        ] = {}  # by worker: its host, what it will say
        self._has_state: set[str] = set()
        self._said = 0
        self._pids = 0

    # --- what happens ---

    def begin(self) -> None:
        """Connect all hosts and start all workers."""
        self._inbox.append(
            BeginTerm(t_ns=self.now_ns, run=self._run, term=TERM, checkpoint=self.found)
        )
        self.settle()
        for host in self._hosts:
            self._greet(host)
        self.settle()
        self.ready()

    def saved(self, checkpoint: messages.Checkpointed) -> None:
        """Report from rank 0 that a checkpoint can be restored."""
        worker = self.state.occupant(0)
        if worker is not None:
            self._say(worker.agent, worker.name, checkpoint)

    def broken(self, fault: events.Fault) -> bool:
        """Break a connection between live workers; return False where none can report it."""
        state = self.state
        worker = next(
            (one for one in state.generation_members() if one.whole and not one.killed_ns), None
        )
        if worker is None:
            return False
        self._say(worker.agent, worker.name, self._status(state.generation, worker.name, fault))
        return True

    def lose(self, seat: int, fault: events.Fault, *, live: bool) -> str:
        """Kill the worker in a seat and return its host; `live`: its progress slot survives."""
        worker = self.state.members.workers[self.state.members.seats[seat]]
        slots = {f"before:{self.n}": b"its own"} if live else {}
        lost = messages.WorkerLostReport(
            worker=worker.name, fault=fault, n=self.n, step=self.step, state="running", slots=slots
        )
        self._say(worker.agent, "", lost)
        return worker.agent

    def take_away(self, host: str) -> None:
        """Remove a host."""
        self._inbox.append(AgentLost(t_ns=self.now_ns, agent=host, incarnation=self._hosts[host]))
        self._hosts[host] += 1

    def somebody(self) -> int:
        """Return a seat, preferably of a complete worker without a surviving progress slot."""
        slot = f"before:{self.n}"

        def fits(worker: WorkerRecord) -> tuple[bool, bool, int]:
            has_slot = slot in self.state.members.abandoned_slots.get(worker.seat, ())
            return worker.whole, not has_slot, -worker.seat

        return max(
            (one for one in self.state.members.workers.values() if one.seat >= 0), key=fits
        ).seat

    def bring_back(self, host: str) -> None:
        """Add a host again, without any state."""
        self._greet(host)

    def stop(self, reason: str) -> None:
        """Request the end twice, as a person with Ctrl-C."""
        for _ in range(2):
            self._inbox.append(StopRequested(t_ns=self.now_ns, reason=reason))
            self.settle()

    def finish(self) -> None:
        """End every worker's script."""
        for worker in self.state.generation_members():
            self._say(worker.agent, worker.name, messages.Finished(n=self.n, step=self.step))
        self.settle()

    def tick(self) -> None:
        """Advance to the core's next wake-up."""
        self._inbox.append(Tick(t_ns=self.now_ns))
        self.settle()

    # --- answers ---

    def settle(self) -> None:
        """Exchange messages until all peers have nothing to report but Ready.

        Requests that arrive together are answered together.
        """
        while self._inbox:
            inputs = [
                Received(t_ns=self.now_ns, envelope=one)
                if isinstance(one, messages.MessageEnvelope)
                else one
                for one in self._inbox
            ]
            self._inbox.clear()
            self.state, actions = handle_all(self.state, inputs)
            for action in actions:
                self._do(action)

    def ready(self) -> None:
        """Report every worker ready, so that the generation opens."""
        waiting = self._held
        self._held = {}
        for name, (host, body) in waiting.items():
            if name in self.state.members.workers:
                self._say(host, name, body)
        self.settle()

    def _do(self, action: Action) -> None:
        match action:
            case Send():
                self._answer(action)
            case Emit():
                if isinstance(action.event, events.Decided):
                    self.decided = action.event
                    self.decisions += 1
                self._tell(action.event)
            case Verify():
                self._inbox.append(
                    CheckpointFound(
                        t_ns=self.now_ns, generation=action.generation, checkpoint=self.found
                    )
                )
            case Wake():
                self.wake_ns = action.t_ns
            case EndRun():
                self.end = action
            case _:
                pass  # the journal: no later term will ask

    def _tell(self, event: events.AnyEvent) -> None:
        if isinstance(event, events.Noticed) and event.fault.kind == "agent_lost":
            # The core hears of what such a worker left, which an agent alone could tell it.
            event = msgspec.structs.replace(event, how="lease")
        if not isinstance(event, events.Transferred):  # a job has no size
            self._emit(event)

    def _answer(self, request: Send) -> None:
        host = request.agent
        name = request.worker
        body = request.body
        match body:
            case messages.Spawn():
                self._pids += 1
                self._say(host, "", messages.Spawned(worker=body.worker, pid=self._pids))
                hello = messages.WorkerHello(pid=self._pids, fingerprint={}, address=body.worker)
                self._say(host, body.worker, hello)
            case messages.Kill():
                fault = events.Fault(kind="requested", detail=body.reason)
                self._die(host, body.worker, fault)
            case messages.Stop():
                fault = events.Fault(kind="exited", detail="it was told to stop")
                self._die(host, name, fault)
            case messages.Close():
                self._held.pop(name, None)
                self._say(host, name, self._status(body.generation, name, None))
            case messages.Seat() | messages.Decide():
                self._held[name] = (
                    host,
                    messages.WorkerReady(generation=body.generation, n=body.n),
                )
            case messages.Connect():
                seat = body.seats.index(name)
                sent = {joiner: _DIGEST for donor, joiner in body.transfers if donor == seat}
                got = {donor: _DIGEST for donor, joiner in body.transfers if joiner == seat}
                joined = messages.Joined(generation=body.generation, sent=sent, received=got)
                self._say(host, name, joined)
            case messages.Open():
                self._has_state.add(name)
            case _:
                pass  # leases, and what a script would want to know

    def _die(self, host: str, name: str, fault: events.Fault) -> None:
        self._held.pop(name, None)
        lost = messages.WorkerLostReport(
            worker=name, fault=fault, n=self.n, step=self.step, state="idle"
        )
        self._say(host, "", lost)

    def _status(self, generation: int, name: str, fault: events.Fault | None) -> messages.Status:
        word = "running" if self.state.progress.opened else "idle"
        return messages.Status(
            generation=generation,
            n=self.n,
            step=self.step,
            state=word if name in self._has_state else "joining",
            fault=fault,
        )

    def _greet(self, host: str) -> None:
        hello = messages.AgentHello(host=host, address="", capacity=1, lease_s=LEASE_S)
        self._say(host, "", hello)

    def _say(self, host: str, worker: str, body: messages.AnyBody) -> None:
        self._said += 1
        self._inbox.append(
            messages.MessageEnvelope(
                run=self._run,
                term=TERM,
                agent=host,
                incarnation=self._hosts[host],
                worker=worker,
                seq=self._said,
                body=body,
            )
        )
