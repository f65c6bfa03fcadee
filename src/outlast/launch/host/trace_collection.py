"""Collection of flight recorder dumps before a hung worker is killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from outlast.events import RECORDED, Fault
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool
from outlast.transport import messages

ROOM = "traces"
PATIENCE_S = (
    1.0  # an answer takes milliseconds; a worker that holds its interpreter lock gives none
)
COLLECTIONS_MAX = (
    32  # in a launcher's life, so that a run that keeps hanging does not fill the disk
)


class TraceCollection:
    """Collects the flight recorder dumps of this host's workers, within `PATIENCE_S`."""

    def __init__(
        self, crew: WorkerPool, ask: Callable[[WorkerHandle, messages.Trace], bool]
    ) -> None:
        """`ask` sends a request, and returns whether it could be sent."""
        self._crew, self._ask = crew, ask
        self._folder = ""  # of the current collection, or of the last one
        self._remaining = COLLECTIONS_MAX
        self._waiting: set[str] = set()
        self._written = 0
        self._answered = asyncio.Event()
        self._under_way: asyncio.Task[str] | None = None

    async def collect(self, suspect: messages.Suspect) -> messages.Suspect:
        """Return the suspect with the folder of the dumps, if there are any."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.create_task(self._collect())
        found = await asyncio.shield(self._under_way)
        if not found:
            return suspect
        detail = f"{suspect.fault.detail}; {found}"
        fault: Fault = msgspec.structs.replace(suspect.fault, detail=detail)
        return msgspec.structs.replace(suspect, fault=fault)

    def answered(self, worker: str, body: messages.Traced) -> None:
        """Handle a worker's answer: its dump is written, or the reason why not."""
        if body.folder == self._folder and worker in self._waiting:
            self._waiting.discard(worker)
            self._written += not body.error
            if body.error:
                self._crew.note(f"the flight recorder of {worker} was not written: {body.error}")
        if not self._waiting:
            self._answered.set()

    async def _collect(self) -> str:
        able = [worker for worker in self._crew.workers.values() if _can_answer(worker)]
        if not able or not self._remaining:
            return ""
        self._remaining -= 1
        moment = datetime.fromtimestamp(self._crew.clock.now_ns() / 1e9, tz=UTC)
        self._folder = f"{moment:%Y-%m-%dT%H-%M-%S}.{moment.microsecond // 1000:03d}Z"
        self._answered.clear()
        until_ns = time.monotonic_ns() + int(PATIENCE_S * 1e9)
        trace = messages.Trace(folder=self._folder, host=self._crew.host, until_ns=until_ns)
        self._waiting = {worker.name for worker in able if self._ask(worker, trace)}
        self._written = 0
        if not self._waiting:
            return ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._answered.wait()
        except TimeoutError:
            pass  # workers that cannot answer
        self._waiting.clear()
        if not self._written:
            return ""
        path = self._crew.run_dir.path / ROOM / self._folder
        return f"{RECORDED} {self._written} rank(s): {path}"


def _can_answer(worker: WorkerHandle) -> bool:
    """Return whether it has a seat, has reached `init()`, lives, and is not stopped."""
    if worker.seat < 0 or worker.reaping is not None or worker.kill_reason:
        return False
    return worker.page.read().t_ns > 0 and worker.process.state not in "TtZX"
