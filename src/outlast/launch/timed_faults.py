"""Timed faults (`--fault ...,after=SECONDS`) that the launcher injects into any script.

In a run of several nodes each host injects those of its own ranks; one without a rank strikes on
the host that is first.
"""

from __future__ import annotations

import asyncio
import signal
import time

from outlast import events
from outlast.controller.fault_spec import FaultSpec, parse
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool
from outlast.launch.run_display import DisplayRecord

PERIOD_S = 0.1


class TimedFaults:
    """Timed faults of one launcher; each is injected once in a run, like faults in workers."""

    def __init__(self, crew: WorkerPool, record: DisplayRecord) -> None:
        self._crew, self._record = crew, record
        self._specs = [parse(text) for text in crew.plan.faults]
        self._markers = crew.run_dir.room("faults")
        self._due = [spec for spec in self._specs if spec.after_s and not self._has_struck(spec)]
        self._asleep: list[tuple[float, WorkerHandle]] = []  # (time of SIGCONT, stopped worker)

    async def run(self) -> None:
        """Run until all faults were injected; `after` is relative to this call."""
        began_s = time.monotonic()
        while self._due or self._asleep:
            await asyncio.sleep(PERIOD_S)
            self._look(began_s, time.monotonic())

    def _look(self, began_s: float, now_s: float) -> None:
        for spec in list(self._due):
            worker = self._target(spec)
            if worker and now_s - began_s >= spec.after_s:
                self._due.remove(spec)
                self._strike(spec, worker)
                if spec.for_s:
                    self._asleep.append((now_s + spec.for_s, worker))
        for pair in list(self._asleep):
            wake_s, worker = pair
            if now_s >= wake_s:
                self._asleep.remove(pair)
                if self._is_alive(worker):
                    worker.process.send_signal(signal.SIGCONT)

    def _strike(self, spec: FaultSpec, worker: WorkerHandle) -> None:
        try:
            (self._markers / spec.marker(0)).touch(exist_ok=False)
        except FileExistsError:
            return  # another host of the run was first
        except OSError as error:
            self._record.note(f"--fault {spec.text} is left out, it cannot be noted: {error}")
            return
        beat = worker.page.read()
        # A script that never calls init() reports no position.
        n, step = (beat.n, beat.step) if beat.t_ns else (-1, -1)
        self._record.emit(
            events.FaultInjected(
                t_ns=self._record.now_ns(),
                worker=worker.name,
                seat=worker.seat,
                spec=spec.text,
                n=n,
                step=step,
            )
        )
        worker.process.send_signal(signal.SIGKILL if spec.kind == "kill" else signal.SIGSTOP)

    def _target(self, spec: FaultSpec) -> WorkerHandle | None:
        seated = [
            worker
            for worker in self._crew.workers.values()
            if worker.seat >= 0 and spec.rank in (-1, worker.seat) and self._is_alive(worker)
        ]
        return min(seated, key=lambda worker: worker.seat, default=None)

    def _is_alive(self, worker: WorkerHandle) -> bool:
        return self._crew.workers.get(worker.name) is worker and worker.reaping is None

    def _has_struck(self, spec: FaultSpec) -> bool:
        return (self._markers / spec.marker(0)).exists()

    def note_missed(self, *, plain: bool) -> None:
        """Note every fault that was not injected; `plain`: the script calls no `init()`."""
        for spec in self._specs:
            if not self._has_struck(spec):
                why = "the run never came to its place"
                if plain and not spec.after_s:
                    why = (
                        "no worker came to outlast.init(), so that there were no steps and phases"
                        " (the script may never call it); after=SECONDS strikes any script"
                    )
                self._record.note(f"--fault {spec.text} did not strike: {why}")
