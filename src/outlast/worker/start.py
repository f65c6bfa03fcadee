"""Making this process a worker: what `outlast.init` does."""

from __future__ import annotations

import atexit
import sys
import types

from outlast.config import check_torch, started_by_torchrun, worker_settings
from outlast.errors import UsageError
from outlast.worker.process import Worker

_running: list[Worker] = []  # one worker a process: torch's registry of backends forces it


def start() -> Worker:
    """Make this process a worker. Raises UsageError when it is one already, ConfigError where
    torch is too old."""
    check_torch()
    if _running:
        raise UsageError("outlast.init() was called twice in one process")
    settings = worker_settings()
    if settings is None and started_by_torchrun():
        raise UsageError(
            "this script was started by torchrun, which stops every worker when one fails: start"
            " it with `outlast run` and the same flags"
        )
    worker = Worker(settings)
    _running.append(worker)
    worker.take_seat()
    _hear_what_ends_the_script(worker)
    return worker


def _hear_what_ends_the_script(worker: Worker) -> None:
    show = sys.excepthook

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        show(kind, error, trace)
        worker.failed(error)

    def finish() -> None:
        # Set before any hook is asked: a script may have put one of its own in place of ours.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            worker.failed(error)
        worker.finish()

    sys.excepthook = uncaught
    atexit.register(finish)
