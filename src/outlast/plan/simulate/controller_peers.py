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
from outlast.controller.recovery.recovery_policy import DEFAULT, RecoveryPolicy
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.controller.state_machine import handle_all, initial
from outlast.transport import messages

TERM = 1
LEASE_S = 1e12  # never expires: the simulator removes hosts
_STATE_DIGEST: tuple[str, int, float] = ("told", 0, 0.0)  # of a transferred state


class ControllerPeers:
    """Simulated peers of the real controller.

    `now_ns`: time of the next actions; `n` and `step`: position of the survivors;
    `restart_checkpoint`: checkpoint for a restart of all workers; `disk_checkpoint`: for one that
    leaves out copies in memory. `needs`: why no rank may leave; `start_ns`: from the start of a
    worker for an absent rank until it is warm.
    """

    def __init__(
        self,
        run: str,
        nodes: int,
        spares: int,
        limits: Limits,
        policy: SavePolicy,
        emit: Callable[[events.AnyEvent], None],
        recovery: RecoveryPolicy = DEFAULT,
    ) -> None:
        self._run = run
        self._emit = emit
        self.now_ns = 0
        self.needs = ""
        self.start_ns = 0
        self.n = self.step = 0
        self.restart_checkpoint = messages.Checkpointed(n=0, step=0, path="the beginning")
        self.disk_checkpoint = self.restart_checkpoint
        self.state: ControllerState = initial(nodes, spares, limits, policy, recovery=recovery)
        self.decided: events.Decided | None = None  # the newest
        self.decisions = 0
        self.end: EndRun | None = None
        self.wake_ns: int | None = None
        self._hosts = {f"node{k}": 1 for k in range(nodes + spares)}  # and their incarnations
        self._inbox: list[messages.MessageEnvelope | Input] = []
        self._pending_ready: dict[str, tuple[str, messages.WorkerReady]] = {}  # by worker
        self._has_state: set[str] = set()
        self._returned: set[str] = set()  # hosts on which no worker was started since
        self._stands = ("", 0)  # worker that stands at a boundary, and its generation
        self._starting: dict[str, tuple[str, int, int]] = {}  # host, PID, time at which it is warm
        self._sent_count = 0
        self._pids = 0
        self._notices = 0

    # --- events that the narrator reports ---

    def begin(self) -> None:
        """Connect all hosts and start all workers."""
        self._inbox.append(
            BeginTerm(
                t_ns=self.now_ns, run=self._run, term=TERM, checkpoint=self.restart_checkpoint
            )
        )
        self.exchange_messages()
        for host in self._hosts:
            self._connect_host(host)
        self.exchange_messages()
        self.report_ready()

    def report_save(self, checkpoint: messages.Checkpointed) -> None:
        """Report from the first rank that a checkpoint can be restored."""
        worker = min(self.state.generation_members(), key=lambda one: one.seat, default=None)
        if worker is not None:
            self._send(worker.agent, worker.name, checkpoint)

    def report_broken_connection(self, fault: events.Fault) -> bool:
        """Break a connection between live workers; return False where none can report it."""
        state = self.state
        worker = next(
            (
                generation_member
                for generation_member in state.generation_members()
                if generation_member.whole and not generation_member.killed_ns
            ),
            None,
        )
        if worker is None:
            return False
        self._send(
            worker.agent, worker.name, self._status_report(state.generation, worker.name, fault)
        )
        return True

    def lose_seat(self, seat: int, fault: events.Fault, *, live: bool) -> str:
        """Kill the worker in a seat and return its host; `live`: its progress slot survives."""
        worker = self.state.members.workers[self.state.members.seats[seat]]
        slots = {f"before:{self.n}": b"its own"} if live else {}
        lost = messages.WorkerLostReport(
            worker=worker.name, fault=fault, n=self.n, step=self.step, state="running", slots=slots
        )
        self._send(worker.agent, "", lost)
        return worker.agent

    def remove_host(self, host: str) -> None:
        """Remove a host."""
        self._starting = {name: at for name, at in self._starting.items() if at[0] != host}
        self._inbox.append(AgentLost(t_ns=self.now_ns, agent=host, incarnation=self._hosts[host]))
        self._hosts[host] += 1

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks that have left, while the others go on."""
        return self.state.progress.absent

    @property
    def lacks_workers(self) -> bool:
        """True while a rank that is not absent has no worker."""
        seats = enumerate(self.state.members.seats)
        return any(not name and seat not in self.absent for seat, name in seats)

    def host_without_rank(self) -> str:
        """Return a host that has no rank; "" if all have one."""
        agents = self.state.members.agents.values()
        free = (one.name for one in agents if one.connected and not one.lapsed)
        return next((name for name in free if not self.state.members.ranks_of(name)), "")

    def warm_ns(self, *, seated: bool = False) -> int | None:
        """Return the time at which the next starting worker is warm; None if none starts. `seated`:
        only of workers that have a rank already."""
        known = {name for name in self.state.members.seats if name}
        times = [at for name, (_, _, at) in self._starting.items() if not seated or name in known]
        return min(times, default=None)

    def end_starts(self) -> None:
        """Report the workers that are warm by now."""
        for name, (host, pid, at_ns) in tuple(self._starting.items()):
            if at_ns <= self.now_ns:
                del self._starting[name]
                self._greet(host, name, pid)
        self.exchange_messages()

    def seat_to_lose(self) -> int:
        """Return a seat, preferably of a complete worker without a surviving progress slot."""
        slot = f"before:{self.n}"

        def preference(worker: WorkerRecord) -> tuple[bool, bool, int]:
            has_slot = slot in self.state.members.abandoned_slots.get(worker.seat, ())
            return worker.whole, not has_slot, -worker.seat

        return max(
            (each for each in self.state.members.workers.values() if each.seat >= 0), key=preference
        ).seat

    def add_host(self, host: str) -> None:
        """Add a host again, without any state: a worker on it is warm at once."""
        self._returned.add(host)
        self._connect_host(host)

    def report_notice(self, seat: int) -> None:
        """Report a notice for the host of a rank, whose ranks make steps."""
        self._notices += 1
        leaving = self.state.members.workers[self.state.members.seats[seat]]
        notice = events.Warned(
            t_ns=self.now_ns,
            host=leaving.agent,
            check="operator",
            symptom="drain",
            severity="drain",
            code=f"notice {self._notices}",
            device="",
            detail="its host has to be left",
            worker=leaving.name,
        )
        self._send(leaving.agent, "", messages.NodeChecked(found=(notice,), completed=()))
        self.report_progress()

    def report_progress(self) -> None:
        """Report that all ranks have completed a phase of this generation."""
        by_host: dict[str, dict[str, tuple[int, int, str, float]]] = {}
        for worker in self.state.generation_members():
            beats = by_host.setdefault(worker.agent, {})
            beats[worker.name] = (self.n + 1, self.step, "running", 0.0)
        for host, beats in by_host.items():
            self._send(host, "", messages.Renew(beats=beats))

    def stop(self, reason: str) -> None:
        """Request the end twice, as two Ctrl-C do."""
        for _ in range(2):
            self._inbox.append(StopRequested(t_ns=self.now_ns, reason=reason))
            self.exchange_messages()

    def finish(self) -> None:
        """End every worker's script."""
        for worker in self.state.generation_members():
            self._send(worker.agent, worker.name, messages.Finished(n=self.n, step=self.step))
        self.exchange_messages()

    def tick(self) -> None:
        """Send the controller a tick."""
        self._inbox.append(Tick(t_ns=self.now_ns))
        self.exchange_messages()

    # --- answers ---

    def exchange_messages(self) -> None:
        """Exchange messages until only Ready reports are pending.

        Requests that arrive together are answered together.
        """
        while self._inbox:
            inputs = [
                Received(t_ns=self.now_ns, envelope=each)
                if isinstance(each, messages.MessageEnvelope)
                else each
                for each in self._inbox
            ]
            self._inbox.clear()
            self.state, actions = handle_all(self.state, inputs)
            for action in actions:
                self._execute(action)

    def report_ready(self) -> None:
        """Report every worker ready, so that the generation opens."""
        waiting = self._pending_ready
        self._pending_ready = {}
        for name, (host, body) in waiting.items():
            if name in self.state.members.workers:
                self._send(host, name, body)
        self.exchange_messages()

    def _execute(self, action: Action) -> None:
        match action:
            case Send():
                self._answer(action)
            case Emit():
                if isinstance(action.event, events.Decided):
                    self.decided = action.event
                    self.decisions += 1
                self._emit_event(action.event)
            case Verify():
                self._inbox.append(
                    CheckpointFound(
                        t_ns=self.now_ns,
                        generation=action.generation,
                        checkpoint=self.disk_checkpoint
                        if action.from_disk
                        else self.restart_checkpoint,
                    )
                )
            case Wake():
                self.wake_ns = action.t_ns
            case EndRun():
                self.end = action
            case _:
                pass  # Journal: there is no later term that would read it

    def _emit_event(self, event: events.AnyEvent) -> None:
        if isinstance(event, events.Noticed) and event.fault.kind == "agent_lost":
            # The simulation reports surviving slots, which a lost agent could not.
            event = msgspec.structs.replace(event, how="lease")
        if not isinstance(event, events.Transferred):  # the simulated state has no size
            self._emit(event)

    def _answer(self, request: Send) -> None:
        host, body = request.agent, request.body
        for name in request.workers or ("",):
            self._act(host, name, body)

    def _act(self, host: str, name: str, body: messages.AnyBody) -> None:
        match body:
            case messages.Spawn():
                self._pids += 1
                self._send(host, "", messages.Spawned(worker=body.worker, pid=self._pids))
                is_late = self.absent and body.seat < 0 and host not in self._returned
                self._returned.discard(host)
                if self.start_ns and is_late:
                    self._starting[body.worker] = host, self._pids, self.now_ns + self.start_ns
                else:
                    self._greet(host, body.worker, self._pids)
            case messages.Kill():
                fault = events.Fault(kind="requested", detail=body.reason)
                self._lose_worker(host, body.worker, fault)
            case messages.Stop():
                fault = events.Fault(kind="exited", detail="stopped on request")
                self._lose_worker(host, name, fault)
            case messages.Close():
                self._pending_ready.pop(name, None)
                self._send(host, name, self._status_report(body.generation, name, None))
            case messages.Leave():
                self._stands = name, body.generation
                self._send(host, name, self._status_report(body.generation, name, None))
            case messages.Seat() | messages.Decide():
                ready = messages.WorkerReady(generation=body.generation, n=body.n)
                self._pending_ready[name] = (host, ready)
            case messages.Connect():
                seat = self.state.members.workers[name].seat
                sent = {joiner: _STATE_DIGEST for donor, joiner in body.transfers if donor == seat}
                got = {donor: _STATE_DIGEST for donor, joiner in body.transfers if joiner == seat}
                joined = messages.Joined(generation=body.generation, sent=sent, received=got)
                self._send(host, name, joined)
            case messages.Open():
                self._has_state.add(name)
            case _:
                pass  # leases and answers to scripts have no effect here

    def _greet(self, host: str, name: str, pid: int) -> None:
        hello = messages.WorkerHello(pid=pid, fingerprint={}, address=name)
        self._send(host, name, hello)

    def _lose_worker(self, host: str, name: str, fault: events.Fault) -> None:
        self._pending_ready.pop(name, None)
        self._starting.pop(name, None)
        moves = self.state.mode == "closing"  # its rank leaves for a notice, with its own state
        lost = messages.WorkerLostReport(
            worker=name,
            fault=fault,
            n=self.n,
            step=self.step,
            state="idle",
            slots={f"before:{self.n}": b"its own"} if moves else {},
        )
        self._send(host, "", lost)

    def _status_report(
        self, generation: int, name: str, fault: events.Fault | None
    ) -> messages.Status:
        stands = (name, generation) == self._stands
        phase_state = "running" if self.state.progress.opened and not stands else "idle"
        return messages.Status(
            generation=generation,
            n=self.n,
            step=self.step,
            state=phase_state if name in self._has_state else "joining",
            fault=fault,
            needs=self.needs,
            slots=self._place(name),
        )

    def _place(self, name: str) -> dict[str, bytes]:
        """Return the place in the script that the first rank reports while others are absent."""
        first = min(self.state.generation_members(), key=lambda one: one.seat, default=None)
        is_first = first is not None and first.name == name
        return {f"before:{self.n}": b"its own"} if self.absent and is_first else {}

    def _connect_host(self, host: str) -> None:
        hello = messages.AgentHello(host=host, address="", capacity=1, lease_s=LEASE_S)
        self._send(host, "", hello)

    def _send(self, host: str, worker: str, body: messages.AnyBody) -> None:
        self._sent_count += 1
        self._inbox.append(
            messages.MessageEnvelope(
                run=self._run,
                term=TERM,
                agent=host,
                incarnation=self._hosts[host],
                worker=worker,
                seq=self._sent_count,
                body=body,
            )
        )
