"""Reports of workers that are dead, or were never started."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator

from outlast.events import Fault
from outlast.faults import HOST_MEMORY
from outlast.launch.host.worker_family import oom_kills, signal_name
from outlast.launch.host.worker_pool import WorkerHandle, WorkerOutcome
from outlast.transport import messages

_KEPT = 64
_BYTES_MAX = 256 << 20


class LostReports:
    """The newest reports of this host, for a controller that may not have received them."""

    def __init__(self) -> None:
        self._reports: deque[messages.WorkerLostReport] = deque(maxlen=_KEPT)

    def __iter__(self) -> Iterator[messages.WorkerLostReport]:
        return iter(self._reports)

    def add(self, lost: messages.WorkerLostReport) -> None:
        """Keep a report; drop the oldest ones beyond the limits."""
        self._reports.append(lost)
        while sum(sum(map(len, kept.slots.values())) for kept in self._reports) > _BYTES_MAX:
            self._reports.popleft()

    def clear(self) -> None:
        """Forget all reports."""
        self._reports.clear()

    def find(self, worker: str) -> messages.WorkerLostReport | None:
        """Return the report of a worker, or None."""
        return next((lost for lost in self._reports if lost.worker == worker), None)


def never_started(worker: str, fault: Fault) -> messages.WorkerLostReport:
    """Return the report of a worker that has not been started."""
    return messages.WorkerLostReport(worker=worker, fault=fault, n=-1, state="starting")


def not_startable(
    spawn: messages.Spawn, why: str, host: str, t_ns: int
) -> messages.WorkerLostReport:
    """Return the report of a worker that could not be started."""
    detail = f"could not be started on {host}: {why}"
    fault = Fault(
        kind="exited", detail=detail, worker=spawn.worker, seat=spawn.seat, host=host, t_ns=t_ns
    )
    return never_started(spawn.worker, fault)


def lost_report(
    worker: WorkerHandle, outcome: WorkerOutcome, host: str, t_ns: int
) -> messages.WorkerLostReport:
    """Return the report of a worker that was reaped."""
    beat = outcome.beat
    return messages.WorkerLostReport(
        worker=worker.name,
        fault=worker_fault(worker, outcome, host, t_ns),
        n=beat.n if beat else -1,
        step=beat.step if beat else 0,
        state=beat.state if beat else "",
        slots=outcome.slots,
    )


def worker_fault(
    worker: WorkerHandle,
    outcome: WorkerOutcome,
    host: str,
    t_ns: int,
    count_kills: Callable[[], int] = oom_kills,
) -> Fault:
    """Return the fault for a worker's exit code, page and logs.

    An exception recorded in the error file (torch's ``@record``) takes precedence over the end of
    stderr. A worker that had not called ``outlast.init()`` has no step.
    """
    code, beat = outcome.exit_code, outcome.beat
    if worker.kill_reason:
        kind, detail = "requested", f"killed by its agent: {worker.kill_reason}"
    elif code < 0:
        memory = _host_memory(worker, count_kills) if code == -signal.SIGKILL else ""
        kind, detail = "killed", f"killed by {signal_name(-code)}{memory}"
    else:
        kind, detail = "exited", f"ended by itself with exit code {code}"
    has_session = beat is not None and beat.state != "starting"
    return Fault(
        kind=kind,
        detail=detail,
        worker=worker.name,
        seat=worker.seat,
        host=host,
        n=beat.n if beat else -1,
        step=beat.step + 1 if beat and has_session and worker.seat >= 0 else -1,
        state=beat.state if beat else "",
        signal=max(0, -code),
        exit_code=max(0, code),
        traceback=_traceback(outcome) if code > 0 else "",
        t_ns=t_ns,
    )


def _host_memory(worker: WorkerHandle, count_kills: Callable[[], int]) -> str:
    """Return how many processes the kernel's OOM killer has killed since a worker's start."""
    if worker.oom_kills < 0:
        return ""
    killed = count_kills() - worker.oom_kills
    if killed <= 0:
        return ""
    return (
        f"; the kernel has killed {killed} process(es) here {HOST_MEMORY} since this worker"
        " began: the host's memory, not a device's"
    )


def _traceback(outcome: WorkerOutcome) -> str:
    recorded = outcome.error_file
    if recorded is None:
        return outcome.stderr_tail
    return recorded.traceback or recorded.message
