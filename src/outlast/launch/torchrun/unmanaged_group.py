"""Worker groups whose script does not call ``outlast.init()``, restarted together as by torchrun.

Outlast has no steps or state of such a script. It reports the root cause of failures, restarts
the group at most ``--max-restarts`` times if a restart can help and the policy recovers from that
class of failure, and reports hangs.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Sequence

from msgspec import structs

from outlast import events
from outlast.config import torchrun_variable
from outlast.controller.inputs import EndRun
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER_ERROR, ConfigError
from outlast.launch.host.lost_workers import worker_fault
from outlast.launch.host.worker_environment import free_port
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool, WorkerPost
from outlast.launch.run_display import DisplayRecord
from outlast.launch.torchrun.attempt_files import link_attempt, pass_on_error
from outlast.launch.torchrun.crash_loop import CrashLoopGuard
from outlast.text_formatting import plural
from outlast.transport import messages
from outlast.transport.connection_errors import is_connection_failure

ECHO_WAIT_S = 5.0  # wait for the root cause after a connection failure
_CRASHES = {*(signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS), signal.SIGFPE, signal.SIGILL}
_DONE = EndRun(outcome="done", exit_code=EXIT_DONE)
# Last stderr line of failures that every restart on this host would repeat.
_FAILS_AGAIN = re.compile(
    r"^(?:\[rank\d+\]: *)?(?:ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError)"
    r"(?::|$)"
    r"|can't open file '.*': \[Errno 2\]"
)


class UnmanagedGroup:
    """Group of workers that have not called ``outlast.init()``.

    The run is done when all workers exit with 0. After a failure the others get SIGTERM, and
    SIGKILL after ``stop_s``; then all are restarted, at most ``max_restarts`` times. Errors that a
    restart would repeat (failed imports, syntax errors) end the run. Each failure is an incident
    in the events.
    """

    def __init__(self, crew: WorkerPool, record: DisplayRecord) -> None:
        self._crew = crew
        self._record = record
        self._restarts = 0
        self._signal: signal.Signals | None = None  # that ends the run
        self._exited: asyncio.Queue[WorkerHandle] = asyncio.Queue()
        self._initialised: WorkerHandle | None = (
            None  # called init() although another worker ended without
        )
        self._stop = asyncio.Event()
        self._hang = ""  # reason of `give_up` for the current attempt
        record.emit(events.ScriptUnmanaged(t_ns=record.now_ns()))
        self._crash_loop = CrashLoopGuard(crew.plan.limits.attempts_max)
        self._started_s = time.monotonic()  # of the current attempt
        for worker in crew.workers.values():
            self._adopt(worker)
            self._started_s = min(self._started_s, worker.started_ns / 1e9)
        self._link_logs()

    def exited(self, worker: WorkerHandle) -> None:
        """Queue a worker whose main process has died."""
        self._exited.put_nowait(worker)

    def stop(self, number: signal.Signals) -> None:
        """End all workers by the launcher's signal; the script itself must be able to resume."""
        self._signal = number
        self._stop.set()

    async def run(self) -> EndRun:
        """Run and restart the group; return the end of the run, after all workers are dead."""
        while True:
            faults = await self._one_attempt()
            cause = root_cause(faults)
            if self._signal:
                return EndRun(outcome="interrupted", exit_code=EXIT_INTERRUPTED, cause=cause)
            if cause is None:
                return self._mixed(self._initialised) if self._initialised else _DONE
            if why := self._why_stop(cause):
                self._decide("stop", why)
                self._pass_on(cause)
                return EndRun(
                    outcome="user_error",
                    exit_code=EXIT_USER_ERROR,
                    cause=cause,
                    decision=f"stop: {why}",
                )
            self._restarts += 1
            self._hang = ""
            why = f"restart {self._restarts} of {self._crew.plan.max_restarts}"
            who = f" (rank {cause.seat})" if cause.seat >= 0 else ""
            self._record.note(f"{why}: {cause.detail}{who}")
            self._decide("relaunch", why)
            world = self._crew.plan.world
            if failed := await self._crew.template.when_settled(self._start, world):
                return EndRun(outcome="gave_up", exit_code=EXIT_USER_ERROR, cause=failed)
            self._record.emit(
                events.GenerationOpened(
                    t_ns=self._record.now_ns(),
                    incident=self._restarts,
                    generation=self._restarts + 1,
                    n=0,
                )
            )

    def _adopt(self, worker: WorkerHandle) -> None:
        worker.on_exit = self.exited
        worker.on_frame = self._on_frame

    def _on_frame(self, worker: WorkerHandle, frame: messages.MessageEnvelope) -> None:
        if isinstance(frame.body, messages.WorkerHello):
            self._initialised = worker
            self._stop.set()

    def give_up(self, reason: str) -> bool:
        """End the current attempt of a hung group; return False if no restart is left."""
        if self._restarts >= self._crew.plan.max_restarts or not self._crew.workers:
            return False
        self._hang = reason
        self._crew.kill(next(iter(self._crew.workers.values())), reason)
        return True

    def _why_stop(self, cause: events.Fault) -> str:
        """Return the reason not to restart the group, or "" to restart it."""
        if self._initialised:
            return "some ranks called outlast.init() and others ended without"
        restarts_left = self._crew.plan.max_restarts - self._restarts
        unused = f"; {plural(restarts_left, 'restart')} left unused" if restarts_left else ""
        if _FAILS_AGAIN.search(_last_line(cause.traceback)):
            return f"a restart would fail in the same way{unused}"
        if loop := self._crash_loop.objection(cause, time.monotonic() - self._started_s):
            return f"{loop}{unused}"
        policy = self._crew.plan.policy
        failure = policy.failure_class(cause)
        if failure != "request" and policy.rules(failure)[0].rung == "stop":
            return f"policy {policy.name} does not recover from the class {failure}"
        if self._restarts >= self._crew.plan.max_restarts:
            return f"no restart is left (--max-restarts {self._crew.plan.max_restarts})"
        return ""

    def _decide(self, rung: str, reason: str) -> None:
        self._record.emit(
            events.Decided(
                t_ns=self._record.now_ns(),
                incident=self._restarts + (rung == "stop"),
                generation=self._restarts + (rung == "stop") + 1,
                verdict="redo",
                rung=rung,
                n=0,
                step=0,
                replaced=(),
                reason=reason,
            )
        )

    async def _one_attempt(self) -> list[events.Fault]:
        """Return the failures of one attempt in order, after all workers are dead."""
        while self._crew.workers:
            worker = await self._next_exit()
            if worker is None:
                await self._end_all()
                return []
            if fault := await self._reap(worker):
                return await self._failed(fault)
        return []

    async def _failed(self, fault: events.Fault) -> list[events.Fault]:
        """End the group after its first failure; return the failures that this did not cause.

        If the first failure is a broken connection, wait up to ECHO_WAIT_S for the rank that caused
        it: interpreters take different times to exit.
        """
        faults = [fault]
        self._notice(fault)
        deadline_s = time.monotonic() + ECHO_WAIT_S
        while self._crew.workers and _is_echo(faults[-1]) and not self._signal:
            try:
                left_s = deadline_s - time.monotonic()
                worker = await asyncio.wait_for(self._exited.get(), max(0.0, left_s))
            except TimeoutError:
                break
            if later := await self._reap(worker):
                faults.append(later)
                self._notice(later)
        await self._end_all()
        return faults

    def _notice(self, fault: events.Fault) -> None:
        incident = generation = self._restarts + 1
        t_ns = self._record.now_ns()
        how = "standstill" if fault.kind == "hung" else "pidfd"
        self._record.emit(
            events.Noticed(
                t_ns=t_ns, incident=incident, generation=generation, how=how, fault=fault
            )
        )

    async def _next_exit(self) -> WorkerHandle | None:
        """Return the next worker that exited, or None when the group is to stop.

        An exit takes precedence over a stop: its failure may be the cause of the stop.
        """
        stopped = asyncio.create_task(self._stop.wait())
        exited = asyncio.create_task(self._exited.get())
        try:
            await asyncio.wait({stopped, exited}, return_when=asyncio.FIRST_COMPLETED)
            return exited.result() if exited.done() else None
        finally:
            stopped.cancel()
            exited.cancel()

    async def _reap(self, worker: WorkerHandle) -> events.Fault | None:
        outcome = await self._crew.reap(worker)
        fault = worker_fault(worker, outcome, self._crew.host, self._record.now_ns())
        if fault.signal in _CRASHES:  # the interpreter or a library has written why
            fault = structs.replace(fault, traceback=outcome.stderr_tail)
        if self._hang and worker.kill_reason == self._hang:
            fault = structs.replace(fault, kind="hung", detail=self._hang, worker="", seat=-1)
        self._record.emit(
            events.WorkerLost(
                t_ns=self._record.now_ns(), worker=worker.name, seat=worker.seat, fault=fault
            )
        )
        return fault if outcome.exit_code else None

    async def _end_all(self) -> None:
        """Send all workers the launcher's signal, else SIGTERM, as torchrun does, and SIGKILL after
        ``stop_s``."""
        number = self._signal or signal.SIGTERM
        self._crew.ask_to_end(number)
        deadline_s = time.monotonic() + self._crew.plan.limits.stop_s
        while self._crew.workers:
            left_s = deadline_s - time.monotonic()
            try:
                await self._reap(await asyncio.wait_for(self._exited.get(), max(0.0, left_s)))
            except TimeoutError:
                break
        await self._crew.kill_all(f"it did not end after {number.name}")

    def _start(self) -> events.Fault | None:
        """Start all ranks; return a fault if a worker cannot be started. Without --master-port the
        store is on a new port, where nobody reads the keys of the last attempt."""
        plan = self._crew.plan
        self._crew.master_port = plan.master_port or free_port(plan.master_addr)
        self._started_s = time.monotonic()
        while not self._exited.empty():
            self._exited.get_nowait()
        for seat in range(self._crew.plan.world):
            name = f"w{self._crew.run_dir.job.term}-{seat}-r{self._restarts}"
            try:
                worker = self._crew.start(
                    WorkerPost(name, seat, self._crew.host, 1, self._restarts)
                )
            except (OSError, ConfigError) as error:
                return events.Fault(
                    kind="exited", detail=f"could not be started: {error}", seat=seat
                )
            self._adopt(worker)
            self._record.emit(
                events.WorkerSpawned(
                    t_ns=self._record.now_ns(),
                    worker=name,
                    seat=seat,
                    pid=worker.process.pid,
                    host=self._crew.host,
                )
            )
        self._link_logs()
        return None

    def _link_logs(self) -> None:
        logs = self._crew.run_dir.room("logs")
        try:
            link_attempt(logs, self._restarts, self._crew.workers.values())
        except OSError as error:
            self._record.note(f"{logs} has no links for attempt {self._restarts}: {error}")

    def _pass_on(self, cause: events.Fault) -> None:
        """Record the failure in the error file of a launcher around this one, as torchrun does."""
        target = torchrun_variable("TORCHELASTIC_ERROR_FILE")
        if not target or not cause.worker:
            return
        log_dir = self._crew.run_dir.log_dir(cause.seat, cause.worker)
        try:
            pass_on_error(log_dir, cause.exit_code or -cause.signal, target)
        except OSError as error:
            self._record.note(f"TORCHELASTIC_ERROR_FILE={target} cannot be written: {error}")

    def _mixed(self, worker: WorkerHandle) -> EndRun:
        fault = events.Fault(
            kind="exited",
            detail=(
                f"rank {worker.seat} called outlast.init() after another rank had ended without:"
                " all ranks must call it, or none; everything was stopped"
            ),
            worker=worker.name,
            seat=worker.seat,
            host=self._crew.host,
            t_ns=self._record.now_ns(),
        )
        return EndRun(outcome="user_error", exit_code=EXIT_USER_ERROR, cause=fault)


def root_cause(faults: Sequence[events.Fault]) -> events.Fault | None:
    """Return the root cause of the failures, or None if there are none.

    The first failure that is not a broken connection, else the first failure: a broken connection
    is usually the consequence of another rank's exit.
    """
    own = [fault for fault in faults if not _is_echo(fault)]
    return next(iter(own or faults), None)


def _is_echo(fault: events.Fault) -> bool:
    return is_connection_failure(fault.traceback)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
