"""Making this process a worker: what `outlast.init` does."""

from __future__ import annotations

import atexit
import sys

from outlast.config import started_by_torchrun, worker_settings
from outlast.errors import UsageError
from outlast.worker.process import Worker

_running: list[Worker] = []  # one worker a process: torch's registry of backends forces it


def start() -> Worker:
    """Make this process a worker. Raises UsageError when it is one already."""
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
    sys.excepthook = worker.uncaught
    atexit.register(worker.finish)
    return worker
