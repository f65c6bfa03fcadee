"""Ranks of one host whose script calls no ``outlast.init()``, attempt by attempt."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from msgspec import structs

from outlast import events
from outlast.errors import ConfigError
from outlast.launch.host.lost_workers import worker_fault
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool, WorkerPost
from outlast.launch.run_display import DisplayRecord
from outlast.launch.torchrun.attempt_files import link_attempt
from outlast.transport import messages

_CRASHES = {*(signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS), signal.SIGFPE, signal.SIGILL}


class HostRanks:
    """The ranks of this host in a group, which start and end together.

    Workers that run already are adopted as those of attempt 0. `on_hello` is called for a worker
    that calls ``outlast.init()``.
    """

    def __init__(
        self,
        crew: WorkerPool,
        record: DisplayRecord,
        on_hello: Callable[[WorkerHandle], None],
        node: int = 0,
    ) -> None:
        self._crew, self._record, self._on_hello = crew, record, on_hello
        self._node = node  # GROUP_RANK of this host
        self._attempt = 0
        self._hang = ""  # reason of `end_hang` for the current attempt
        self._exited: asyncio.Queue[WorkerHandle] = asyncio.Queue()
        self._failures: asyncio.Queue[events.Fault | Exception | None] = asyncio.Queue()
        self._is_empty = asyncio.Event()  # all workers of the attempt have been reaped
        self.started_s = time.monotonic()  # of the current attempt
        for worker in crew.workers.values():
            self._adopt(worker)
            self.started_s = min(self.started_s, worker.started_ns / 1e9)
        if crew.workers:
            self._link_logs()
        self._reaping = asyncio.create_task(self._reap_all())

    @property
    def stop_s(self) -> float:
        """Return the time between a signal to the ranks and SIGKILL."""
        return self._crew.plan.limits.stop_s

    def exited(self, worker: WorkerHandle) -> None:
        """Queue a worker whose main process has died."""
        self._exited.put_nowait(worker)

    async def start(self, attempt: int, port: int) -> events.Fault | None:
        """Start all ranks of this host; return a fault if one cannot be started. `port`: of the
        group's store."""
        self._crew.master_port = port
        self._attempt, self._hang = attempt, ""
        ranks = self._crew.plan.ranks_per_node
        return await self._crew.template.when_settled(self._start, ranks)

    async def next_failure(self) -> events.Fault | None:
        """Return the next failure of a rank, or None once all ranks have ended without another one.

        It may be cancelled. Raises TimeoutError if a process survives SIGKILL.
        """
        failure = await self._failures.get()
        if isinstance(failure, Exception):
            raise failure
        return failure

    async def end(self, number: signal.Signals) -> None:
        """Send a signal to all ranks, as torchrun does, and SIGKILL after ``stop_s``."""
        self._crew.ask_to_end(number)
        if self._crew.workers:
            try:
                await asyncio.wait_for(self._is_empty.wait(), self.stop_s)
            except TimeoutError:
                await self._crew.kill_all(f"it did not end after {number.name}")
        await self._exited.join()
        while not self._failures.empty():
            if isinstance(error := self._failures.get_nowait(), Exception):
                raise error

    def end_hang(self, reason: str) -> bool:
        """End the attempt of a group that hangs; return False if no rank runs."""
        if not self._crew.workers:
            return False
        self._hang = reason
        self._crew.kill(next(iter(self._crew.workers.values())), reason)
        return True

    def close(self) -> None:
        """Handle no further exits."""
        self._reaping.cancel()

    # --- workers --------------------------------------------------------------------------

    def _start(self) -> events.Fault | None:
        plan, host = self._crew.plan, self._crew.host
        self.started_s = time.monotonic()
        self._is_empty.clear()
        first = self._node * plan.ranks_per_node
        for seat in range(first, first + plan.ranks_per_node):
            name = f"w{self._crew.run_dir.job.term}-{seat}-r{self._attempt}"
            try:
                worker = self._crew.start(WorkerPost(name, seat, host, 1, self._attempt))
            except (OSError, ConfigError) as error:
                detail = f"could not be started: {error}"
                return events.Fault(kind="exited", detail=detail, seat=seat, host=host)
            self._adopt(worker)
            pid = worker.process.pid
            t_ns = self._record.now_ns()
            self._record.emit(
                events.WorkerSpawned(t_ns=t_ns, worker=name, seat=seat, pid=pid, host=host)
            )
        self._link_logs()
        return None

    def _adopt(self, worker: WorkerHandle) -> None:
        worker.on_exit = self.exited
        worker.on_frame = self._on_frame

    def _on_frame(self, worker: WorkerHandle, frame: messages.MessageEnvelope) -> None:
        if isinstance(frame.body, messages.WorkerHello):
            self._on_hello(worker)

    async def _reap_all(self) -> None:
        """Reap workers in the order of their exits."""
        while True:
            worker = await self._exited.get()
            try:
                if fault := await self._reap(worker):
                    self._failures.put_nowait(fault)
                if not self._crew.workers:
                    self._is_empty.set()
                    self._failures.put_nowait(None)
            except Exception as error:  # noqa: BLE001 - raised again by `next_failure` and `end`
                self._failures.put_nowait(error)
            finally:
                self._exited.task_done()

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

    def _link_logs(self) -> None:
        logs = self._crew.run_dir.room("logs")
        if self._crew.plan.node.is_several:
            logs = logs / f"node_{self._node}"  # local ranks of all hosts, in one directory
        try:
            link_attempt(logs, self._attempt, self._crew.workers.values())
        except OSError as error:
            self._record.note(f"{logs} has no links for attempt {self._attempt}: {error}")
