"""Pool of processes on this machine that end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ProcessPool(ProcessPoolExecutor):
    """Processes that leave Ctrl-C to their parent, and end when it does."""

    def __init__(self, workers: int) -> None:
        super().__init__(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
        )

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a call, as ProcessPoolExecutor."""
        # A process is started in here, and begins with the signals blocked that are blocked now.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True).start()


def _watch(sentinel: int) -> None:
    """End this process when its parent ends, seen at a pipe of its own.

    Each process inherits the far end of the pool's pipe, which therefore never closes.
    """
    wait([sentinel])
    os._exit(1)
