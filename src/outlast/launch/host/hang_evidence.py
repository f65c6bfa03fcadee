"""Evidence about hung ranks: flight recorder dumps of one host, and the reports that name them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from outlast.events import RECORDED, Fault
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool
from outlast.transport import messages

TRACES_FOLDER = "traces"
TRACE_TIMEOUT_S = 1.0  # a worker whose interpreter lock is held cannot answer
TRACE_COLLECTIONS_MAX = 32  # per launcher, so that a run with many hangs does not fill the disk


class TraceCollection:
    """Collection of flight recorder dumps from this host's workers, within `TRACE_TIMEOUT_S`."""

    def __init__(
        self, crew: WorkerPool, ask: Callable[[WorkerHandle, messages.Trace], bool]
    ) -> None:
        """Create the collection; `ask` sends a request and returns whether it was sent."""
        self._crew, self._ask = crew, ask
        self._folder = ""  # of the current collection, or of the last one
        self._remaining = TRACE_COLLECTIONS_MAX
        self._waiting: set[str] = set()
        self._written = 0
        self._answered = asyncio.Event()
        self._under_way: asyncio.Task[str] | None = None

    async def collect(self, suspect: messages.Suspect, folder: str = "") -> messages.Suspect:
        """Return the suspect with the dump folder in its detail, if any dump was written. `folder`:
        the name that all hosts use; "": one of the present time."""
        if self._under_way is None or self._under_way.done():
            folder = folder or folder_name(self._crew.clock.now_ns())
            self._under_way = asyncio.create_task(self._collect(folder))
        found = await asyncio.shield(self._under_way)
        if not found:
            return suspect
        detail = f"{suspect.fault.detail}; {found}"
        fault: Fault = msgspec.structs.replace(suspect.fault, detail=detail)
        return msgspec.structs.replace(suspect, fault=fault)

    def answered(self, worker: str, body: messages.Traced) -> None:
        """Handle a worker's answer: dump written, or an error."""
        if body.folder == self._folder and worker in self._waiting:
            self._waiting.discard(worker)
            self._written += not body.error
            if body.error:
                self._crew.note(f"the flight recorder of {worker} was not written: {body.error}")
        if not self._waiting:
            self._answered.set()

    async def _collect(self, folder: str) -> str:
        able = [worker for worker in self._crew.workers.values() if _can_answer(worker)]
        if not able or not self._remaining:
            return ""
        self._remaining -= 1
        self._folder = folder
        self._answered.clear()
        until_ns = time.monotonic_ns() + int(TRACE_TIMEOUT_S * 1e9)
        trace = messages.Trace(folder=self._folder, host=self._crew.host, until_ns=until_ns)
        self._waiting = {worker.name for worker in able if self._ask(worker, trace)}
        self._written = 0
        if not self._waiting:
            return ""
        try:
            async with asyncio.timeout(TRACE_TIMEOUT_S):
                await self._answered.wait()
        except TimeoutError:
            pass  # workers that cannot answer
        self._waiting.clear()
        if not self._written:
            return ""
        path = self._crew.run_dir.path / TRACES_FOLDER / self._folder
        return f"{RECORDED} {self._written} rank(s): {path}"


def _can_answer(worker: WorkerHandle) -> bool:
    """Return whether a worker has a seat, has reached `init()`, is alive, and is not stopped."""
    if worker.seat < 0 or worker.reaping is not None or worker.kill_reason:
        return False
    return worker.page.read().t_ns > 0 and worker.process.state not in "TtZX"


def folder_name(unix_ns: int) -> str:
    """Return the name of the folder for dumps that are collected at this Unix time."""
    moment = datetime.fromtimestamp(unix_ns / 1e9, tz=UTC)
    return f"{moment:%Y-%m-%dT%H-%M-%S}.{moment.microsecond // 1000:03d}Z"


def _progress(crew: WorkerPool, suspect: messages.Suspect) -> dict[str, object]:
    """Return by worker the time of last progress, or whether the worker is stopped."""
    if suspect.fault.kind == "contract":
        return {}
    alive = (one for one in crew.workers.values() if one.reaping is None)
    of = (one for one in alive if suspect.worker in (one.name, ""))
    if suspect.fault.kind == "stopped":
        return {one.name: one.process.state in "Tt" for one in of}
    return {one.name: one.page.read().t_ns for one in of if one.seat >= 0}


class SuspectReporter:
    """Sender of suspects, each after the collection of its evidence."""

    def __init__(
        self,
        crew: WorkerPool,
        traces: TraceCollection,
        say: Callable[[messages.Suspect], None],
    ) -> None:
        self._crew, self._traces, self._say = crew, traces, say

    async def report(self, suspect: messages.Suspect, folder: str = "") -> None:
        """Collect evidence, then report the suspect unless it has made progress meanwhile."""
        before = _progress(self._crew, suspect)
        evidence = await self._traces.collect(suspect, folder)
        if _progress(self._crew, suspect) == before:
            self._say(evidence)

    async def confirm(self, found: messages.HangFound) -> None:
        """Do this host's part of a verdict on the ranks of all hosts."""
        suspect = messages.Suspect(worker=found.worker, fault=found.fault)
        if not found.reports:
            await self._traces.collect(suspect, found.folder)
        elif not self._has_moved(found):
            await self.report(suspect, found.folder)

    def _has_moved(self, found: messages.HangFound) -> bool:
        if not found.worker:
            return False
        worker = self._crew.workers.get(found.worker)
        return worker is None or worker.page.read().t_ns > found.moved_ns
