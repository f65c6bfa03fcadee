"""Agent of a host: starts, monitors and kills workers for the controller, under a lease."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine

import msgspec

from outlast.controller.lifecycle.run_start import REPEATED_REPORTS
from outlast.controller.recovery.root_fault import is_accident
from outlast.errors import ConfigError
from outlast.events import Fault
from outlast.launch.host.agent_lease import AgentLease
from outlast.launch.host.agent_link import AT_START, AgentEntry, AgentLink
from outlast.launch.host.check_runner import CheckRunner
from outlast.launch.host.hang_evidence import SuspectReporter, TraceCollection
from outlast.launch.host.hang_monitor import HangMonitor
from outlast.launch.host.lost_workers import LostReports, lost_report, never_started, not_startable
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool, WorkerPost
from outlast.launch.notices.host_notices import HostNotices
from outlast.transport import messages

REAP_ATTEMPTS_MAX = 6
REAP_PAUSE_S = 1.0


class Agent:
    """Agent of one host. `on_plain` is called for workers that exit before any worker has reached
    `init()`, instead of reporting them: the script is not managed by Outlast."""

    def __init__(
        self,
        crew: WorkerPool,
        address: tuple[str, int],
        token: bytes,
        on_plain: Callable[[WorkerHandle], None],
        entry: AgentEntry = AT_START,
    ) -> None:
        self._crew, self._host = crew, crew.host
        self._link = AgentLink(
            address, token, self._on_frame, self._on_connected, entry.tls, crew.note
        )
        self._on_unmanaged = on_plain
        self._address = address
        self.lease = AgentLease(crew.plan.limits.lease_s, hosts=crew.plan.node.total)
        self.on_outcome: Callable[[messages.RunOutcome], None] = lambda _outcome: None
        self._stop_reason = ""
        self._met_term = 0  # the newest term whose controller this agent has connected to
        self._incarnation, self._domain = entry.incarnation, entry.domain
        self._is_returning = False  # its lease has ended, and no controller has answered since
        self._seq = 0
        self._received_seq = 0
        self._paused: list[WorkerHandle] = []  # stopped while the lease is in doubt
        self._queued: list[messages.Spawn] = []  # spares, until the first Hello
        self._awaiting: list[messages.Spawn] = []  # until the template can fork them
        self._killed_early: list[WorkerHandle] = []  # before any Hello; one may still come
        self._lost = LostReports()
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watch = HangMonitor(crew, self._suspect, self._say)
        self._traces = TraceCollection(crew, self._tell)
        self._suspects = SuspectReporter(crew, self._traces, self._say)
        self._checks = CheckRunner(crew, self._say)
        self.notices = HostNotices(crew.plan.notices, self._say, crew.note)
        self._hello_received = asyncio.Event()  # the script has called `init()`
        if crew.plan.node.total > 1:
            self._hello_received.set()  # each host runs only scripts that do
        self._done = False

    async def run(self) -> None:
        """Serve until cancelled; raises an ExceptionGroup of the agent's errors."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._raise_errors())
            group.create_task(self._link.keep())
            group.create_task(self._keep_lease())
            group.create_task(self._watch_on())
            group.create_task(self.notices.run())
            if self._crew.plan.check_every_s:
                group.create_task(self._check_on())

    async def _raise_errors(self) -> None:
        """Raise the errors of reaping tasks, which no other task awaits."""
        await self._broken

    @property
    def said_hello(self) -> bool:
        """Return whether any worker has reached `init()`."""
        return self._hello_received.is_set()

    def follow(self, term: int, host: str, address: tuple[str, int]) -> None:
        """Leave the present controller for that of a newer term, with all live workers."""
        run_dir = self._crew.run_dir
        run_dir.job = msgspec.structs.replace(run_dir.job, term=term)
        self._address, self._received_seq = address, 0
        self._link.redirect(host, address, term)

    def request_stop(self, reason: str) -> None:
        """Ask the controller, the present one or the next, to end the run."""
        self._stop_reason = reason
        self._say(messages.StopRequest(reason=reason))

    def release_workers(self) -> None:
        """Stop sending; another part of the launcher takes over the workers."""
        self._done = True

    # --- frames ---------------------------------------------------------------------------

    def _say(self, body: messages.AnyBody) -> None:
        if not self._link.connected:
            return  # `_on_connected` sends the current state again, in the right order
        self._seq += 1
        self._link.send(self._envelope("", self._seq, body))

    def _tell(self, worker: WorkerHandle, body: messages.AnyBody) -> bool:
        return worker.channel.send(self._envelope(worker.name, 0, body))

    def _envelope(self, worker: str, seq: int, body: messages.AnyBody) -> messages.MessageEnvelope:
        return messages.MessageEnvelope(
            run=self._crew.run_dir.job.run,
            term=self._crew.run_dir.job.term,
            agent=self._host,
            incarnation=self._incarnation,
            worker=worker,
            seq=seq,
            body=body,
        )

    def _on_connected(self) -> None:
        self.lease.reconnected()
        self.lease.sent()
        plan = self._crew.plan
        self._say(
            messages.AgentHello(
                host=self._host,
                address=self._address[0],
                capacity=plan.ranks_per_host + plan.spares,
                lease_s=self.lease.lease_s,
                workers=tuple(self._crew.workers),
                unseated=tuple(w.name for w in self._crew.workers.values() if w.is_unseated),
                domain=self._domain,
            )
        )
        for lost in self._lost:  # possibly lost with the last connection
            self._say(lost)
        if self._stop_reason:
            self.request_stop(self._stop_reason)
        if self._met_term not in (0, term := self._crew.run_dir.job.term):
            self._repeat_answers()
            self._renew()  # ends the report
        self._met_term = term
        self._checks.report_findings()
        self.notices.report()

    def _repeat_answers(self) -> None:
        """Send each worker's newest reports to the controller of a new term: the former one may not
        have made them durable. A worker does not answer a second Close."""
        for worker in self._crew.workers.values():
            for frame in sorted(worker.reports.values(), key=lambda one: one.seq):
                if not self._link.holds(worker.name, frame.seq):
                    self._link.send(self._envelope(worker.name, frame.seq, frame.body))

    def _from_worker(self, worker: WorkerHandle, frame: messages.MessageEnvelope) -> None:
        if self._done or frame.run != self._crew.run_dir.job.run:
            return
        if isinstance(frame.body, REPEATED_REPORTS):
            worker.reports[type(frame.body)] = frame
        if isinstance(frame.body, messages.WorkerHello):
            self._crew.devices = max(self._crew.devices, frame.body.devices)
        if isinstance(frame.body, messages.WorkerHello) and not self.said_hello:
            self._hello_received.set()
            for spawn in self._queued:
                self._spawn(spawn)
            self._queued.clear()
            killed, self._killed_early = self._killed_early, []
            for one in killed:
                self._exited(one)
        if isinstance(frame.body, messages.StateProtected):
            worker.stages = frame.body.stages
        if isinstance(frame.body, messages.NoticeSignal):
            self.notices.take_signal(signal.Signals(frame.body.signal).name, worker.name)
            return
        if isinstance(frame.body, messages.Traced):
            self._traces.answered(worker.name, frame.body)
            return
        body: messages.AnyBody | None = frame.body
        if isinstance(body, messages.Meet):
            body = self._crew.meet(worker, body, self._tell)
        if body is not None:
            # The worker is identified by its channel, not by the name in the frame.
            self._link.send(self._envelope(worker.name, frame.seq, body))

    def _on_frame(self, frame: messages.MessageEnvelope) -> None:
        job = self._crew.run_dir.job
        if self._done or frame.run != job.run or frame.term < job.term:
            return
        if frame.incarnation != self._incarnation or frame.seq <= self._received_seq:
            return
        self._received_seq = frame.seq
        body = frame.body
        if isinstance(body, messages.Renewed):
            self.lease.answered()
            if self._is_returning:
                self._is_returning = False
                self._crew.note(f"agent {self._host} is back in the run, without workers")
            self._crew.hold_until(self.lease.held_ns)
            if self._paused and not self.lease.in_doubt:
                # Frames of the same turn may kill some of them.
                asyncio.get_running_loop().call_soon(self._crew.continue_running, self._paused)
        elif isinstance(body, messages.RunOutcome):
            self.on_outcome(body)
        elif isinstance(body, messages.Spawn):
            if body.seat < 0 and not self.said_hello:
                self._queued.append(body)
            else:
                self._spawn(body)
        elif isinstance(body, messages.Kill):
            self._kill(body)
        elif isinstance(body, messages.HangFound):
            self._start(self._suspects.confirm(body))
        elif isinstance(body, messages.PartnerSlotsRequest):
            self._say(self._crew.partner_pages.answer(body, self._crew.workers.values()))
        for name in frame.to:
            if worker := self._crew.workers.get(name):
                self._pass_on(worker, frame)

    def _pass_on(self, worker: WorkerHandle, frame: messages.MessageEnvelope) -> None:
        body = frame.body
        if isinstance(body, messages.Seat) and worker.seat < 0:
            chosen = msgspec.structs.replace(
                body, local_rank=self._crew.device_for(worker, body.seat)
            )
            frame = msgspec.structs.replace(frame, body=chosen)
        elif isinstance(body, messages.Connect):
            self._crew.meetings.connect(body.generation, worker.seat)
        worker.channel.send(frame)
        if isinstance(body, (messages.Seat, messages.Prepare)):
            worker.is_unseated = False
        if isinstance(body, messages.Seat):
            self._seat(worker, body.seat)

    def _suspect(self, suspect: messages.Suspect) -> None:
        """Collect evidence about a suspect before the kill or sever that follows."""
        self._start(self._suspects.report(suspect))

    def _start(self, part: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(part)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    # --- workers --------------------------------------------------------------------------

    def _template_settled(self) -> None:
        """Start all workers in one turn of the event loop, before any exit is handled."""
        awaiting, self._awaiting = self._awaiting, []
        for spawn in awaiting:
            self._spawn(spawn)

    def _spawn(self, body: messages.Spawn) -> None:
        if self._done:
            return
        if self._crew.template.awaits(self._template_settled):
            self._awaiting.append(body)
            return
        post = WorkerPost(
            body.worker, body.seat, self._host, self._incarnation, 0, joins=body.joins
        )
        try:
            worker = self._crew.start(post)
        except (OSError, ConfigError) as error:
            t_ns = self._crew.clock.now_ns()
            self._say_lost(not_startable(body, str(error), self._host, t_ns))
            return
        worker.on_frame = self._from_worker
        worker.on_exit = self._exited
        self._say(messages.Spawned(worker=worker.name, pid=worker.process.pid))
        self._checks.report_findings()  # a finding may be about its device

    def _seat(self, worker: WorkerHandle, seat: int) -> None:
        self._crew.keepers.start(seat)
        was_spare, worker.seat = worker.seat < 0, seat
        if was_spare:
            try:
                self._crew.run_dir.seat_log(seat, worker.name)
            except OSError as error:
                self._crew.note(
                    f"the logs of {worker.name}, now rank {seat}, are found under logs/spare only:"
                    f" {error}"
                )

    def _kill(self, body: messages.Kill) -> None:
        if worker := self._crew.workers.get(body.worker):
            self._crew.kill(worker, body.reason)
            return
        self._queued = [spawn for spawn in self._queued if spawn.worker != body.worker]
        self._awaiting = [spawn for spawn in self._awaiting if spawn.worker != body.worker]
        fault = Fault(kind="requested", detail=f"never started: {body.reason}", worker=body.worker)
        # Not repeated: for the controller of a newer term it would be false.
        self._say(self._lost.find(body.worker) or never_started(body.worker, fault))

    def _exited(self, worker: WorkerHandle) -> None:
        if not self.said_hello and not worker.kill_reason and not self._done:
            worker.channel.read_rest()  # may contain an unread Hello
        if not self.said_hello and not worker.kill_reason and not self._done:
            self._exited_before_hello(worker)
            return
        self._start(self._report_lost(worker, self._crew.clock.now_ns()))

    def _exited_before_hello(self, worker: WorkerHandle) -> None:
        """Hand over workers that ended before any Hello: the script does not call `init()`.

        Exception: an external kill, if the script contains "outlast": other workers are expected to
        send Hello."""
        number = worker.process.killed_by
        is_killed = bool(number) and is_accident(Fault(kind="killed", detail="", signal=number))
        early = [*self._killed_early, worker]
        if is_killed and len(early) < len(self._crew.workers) and self._crew.names_outlast():
            self._killed_early = early
            return
        self._killed_early = []
        for one in early:
            self._on_unmanaged(one)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._broken.done():
            self._broken.set_exception(error)

    async def _report_lost(self, worker: WorkerHandle, t_ns: int) -> None:
        for _ in range(REAP_ATTEMPTS_MAX):
            try:
                outcome = await self._crew.reap(worker)
                break
            except TimeoutError as error:
                self._crew.note(f"{error}; they are in the kernel, which does not end them")
            except OSError as error:  # for example no free descriptor to read /proc
                self._crew.note(f"worker {worker.name} cannot be reaped yet: {error}")
                await asyncio.sleep(REAP_PAUSE_S)
        else:
            return  # not dead, so not reported as lost; the controller's deadline ends the run
        self._say_lost(lost_report(worker, outcome, self._host, t_ns))

    def _say_lost(self, lost: messages.WorkerLostReport) -> None:
        self._lost.add(lost)
        self._say(lost)

    async def _watch_on(self) -> None:
        """Detect hangs after the first `init()`; before it, workers report no progress."""
        await self._hello_received.wait()
        await self._watch.run()

    async def _check_on(self) -> None:
        await self._hello_received.wait()
        await self._checks.run()

    # --- lease ----------------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        lease = self.lease
        while True:
            lease.look()
            if lease.in_doubt and not self._paused:
                self._paused = self._crew.stop_running()
            if lease.is_over:
                await self._lease_out()
            elif lease.is_renewal_due:
                self._renew()
            await asyncio.sleep(max(0.001, lease.rest_s))

    def _renew(self) -> None:
        self.lease.begin_renewal()
        if self._link.connected and not self._done:
            self.lease.sent()
            self._say(self._crew.renewal(self.lease.answers))

    async def _lease_out(self) -> None:
        """Kill all workers before the lease ends and the controller assumes them dead."""
        lease = self.lease
        if self._crew.workers:
            what = f"received nothing from its controller for {lease.usable_s:g} s"
            then = "its workers are killed before the lease ends"
            if lease.in_doubt:
                what = f"was stopped or suspended for {lease.stall_s:.1f} s, beyond its lease"
                then = "its workers are killed before they run on"
            self._crew.note(f"agent {self._host} {what}; {then}")
            self._is_returning = True
        self._paused.clear()
        await self._crew.kill_all("the agent's lease ran out")
        self._incarnation += 1
        self._seq = self._received_seq = 0
        self._lost.clear()
        lease.begin()
        if self._link.connected:
            self._on_connected()
