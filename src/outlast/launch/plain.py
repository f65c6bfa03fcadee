"""A script that never calls `outlast.init()`: it runs as under torchrun, and restarts are all
that can be done for it."""

from __future__ import annotations

import asyncio
import time

from outlast import events, wire
from outlast.core.contract import End
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER_ERROR, ConfigError
from outlast.launch.crew import Crew, Post, Worker, fault_of
from outlast.launch.display import Record
from outlast.launch.environment import free_port

_DONE = End(outcome="done", exit_code=EXIT_DONE)


class PlainGroup:
    """Takes over a crew in which nobody has said Hello.

    All exit with 0: done. One fails: all are stopped (SIGTERM, and after `stop_s` SIGKILL) and
    start again, at most `max_restarts` times.
    """

    def __init__(self, crew: Crew, record: Record) -> None:
        self._crew = crew
        self._record = record
        self._restarts = 0
        self._stopping = False
        self._exited: asyncio.Queue[Worker] = asyncio.Queue()
        self._hello: Worker | None = None
        self._stop = asyncio.Event()
        for worker in crew.workers.values():
            self._adopt(worker)

    def exited(self, worker: Worker) -> None:
        """A worker's main process has died."""
        self._exited.put_nowait(worker)

    def stop(self) -> None:
        """End all, resumable as far as the script is."""
        self._stopping = True
        self._stop.set()

    def _adopt(self, worker: Worker) -> None:
        worker.on_exit = self.exited
        worker.on_frame = self._heard

    def _heard(self, worker: Worker, frame: wire.Envelope) -> None:
        if isinstance(frame.body, wire.Hello):
            self._hello = worker
            self._stop.set()

    async def run(self) -> End:
        """Until all are done, or nothing more can be done; nobody is alive then."""
        while True:
            fault = await self._one_attempt()
            if self._stopping:
                return End(outcome="interrupted", exit_code=EXIT_INTERRUPTED, cause=fault)
            if fault is None:
                return self._half_plain(self._hello) if self._hello else _DONE
            left = self._crew.plan.max_restarts - self._restarts
            if left <= 0 or self._hello:  # of no use to a script that calls init()
                return End(outcome="user_error", exit_code=EXIT_USER_ERROR, cause=fault)
            self._restarts += 1
            self._record.note(
                f"restart {self._restarts} of {self._crew.plan.max_restarts}: {fault.detail}"
                f" (rank {fault.seat})"
            )
            if failed := self._start():
                return End(outcome="gave_up", exit_code=EXIT_USER_ERROR, cause=failed)

    async def _one_attempt(self) -> events.Fault | None:
        """Until nobody lives; the first failure, if any."""
        while self._crew.workers:
            worker = await self._next_exit()
            if worker is None:
                await self._end_all()
                return None
            if fault := await self._bury(worker):
                await self._end_all()
                return fault
        return None

    async def _next_exit(self) -> Worker | None:
        """The next worker that ended; None when everybody shall stop. Who ended before that has
        ended by itself, and may be why."""
        stopped = asyncio.create_task(self._stop.wait())
        exited = asyncio.create_task(self._exited.get())
        try:
            await asyncio.wait({stopped, exited}, return_when=asyncio.FIRST_COMPLETED)
            return exited.result() if exited.done() else None
        finally:
            stopped.cancel()
            exited.cancel()

    async def _bury(self, worker: Worker) -> events.Fault | None:
        remains = await self._crew.bury(worker)
        fault = fault_of(worker, remains, self._crew.host, self._record.now_ns())
        self._record.emit(
            events.WorkerLost(
                t_ns=self._record.now_ns(), worker=worker.name, seat=worker.seat, fault=fault
            )
        )
        return fault if remains.exit_code else None

    async def _end_all(self) -> None:
        """As torchrun: SIGTERM first, so that a script can say goodbye."""
        self._crew.ask_to_end()
        deadline_s = time.monotonic() + self._crew.plan.limits.stop_s
        while self._crew.workers:
            left_s = deadline_s - time.monotonic()
            try:
                await self._bury(await asyncio.wait_for(self._exited.get(), max(0.0, left_s)))
            except TimeoutError:
                break
        await self._crew.kill_all("it did not end when asked to")

    def _start(self) -> events.Fault | None:
        """All ranks again, under a fresh port; the fault when the host cannot."""
        self._crew.master_port = free_port(self._crew.plan.master_addr)
        while not self._exited.empty():
            self._exited.get_nowait()
        for seat in range(self._crew.plan.world):
            name = f"w{self._crew.run_dir.job.term}-{seat}-r{self._restarts}"
            try:
                worker = self._crew.start(Post(name, seat, self._crew.host, 1, self._restarts))
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
        return None

    def _half_plain(self, worker: Worker) -> End:
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
        return End(outcome="user_error", exit_code=EXIT_USER_ERROR, cause=fault)
