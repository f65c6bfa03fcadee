"""Pools of processes: on this machine, where they end with their parent, or on Dask."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from outlast.errors import StorageError, UsageError

P = ParamSpec("P")
T = TypeVar("T")


LOOK_S = 0.5  # between two looks at the processes of a pool: some are started later


class ProcessPool(ProcessPoolExecutor):
    """Processes that leave Ctrl-C to their parent, and end when it does.

    A process that is killed inside a message leaves a part of it in the pool's pipe, whose rest
    ProcessPoolExecutor would wait for without a deadline: all processes hold the far end. So the
    end of one ends all, and closes the pipe.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
        )
        self._watcher: threading.Thread | None = None

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a call, as ProcessPoolExecutor."""
        # A process is started in here, and begins with the signals blocked that are blocked now.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            call = super().submit(fn, *args, **kwargs)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch_processes, daemon=True)
                self._watcher.start()
            return call
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _watch_processes(self) -> None:
        """Wait for the end of a process, which is that of the pool or a kill."""
        queue: Any = self._result_queue
        pipe = queue._writer  # noqa: SLF001 - no other way to end its reader
        while processes := [*(self._processes or {}).values()]:
            if wait([process.sentinel for process in processes], LOOK_S):
                for process in processes:
                    process.kill()
                pipe.close()
                return


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


IN_FLIGHT = 64
PARTS_A_WORKER = 4
DASK_S = 30.0


class PartExecutor(NamedTuple):
    """Executor of parts, and the number of parts submitted at a time."""

    executor: Executor | None
    in_flight: int


@contextmanager
def local_executor(workers: int) -> Iterator[PartExecutor]:
    """Yield an executor of processes, or of this process for one worker.

    At the end, parts that have not begun are dropped, and running ones awaited (some tenths of a
    second).
    """
    if workers == 1:
        yield PartExecutor(None, 1)
        return
    pool = ProcessPool(workers)
    try:
        yield PartExecutor(pool, PARTS_A_WORKER * workers)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def dask_executor(address: str) -> Iterator[PartExecutor]:
    """Yield an executor on a Dask cluster, whose workers need the same Outlast.

    `address`: of its scheduler. Raises UsageError for an invalid address, StorageError when nothing
    answers there.
    """
    from distributed import Client

    if not re.fullmatch(r"((tcp|tls|wss?)://)?(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", address):
        raise UsageError(f"--dask {address}: give a scheduler's address, as in tcp://10.0.0.1:8786")
    try:
        client = Client(address, timeout=DASK_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise StorageError(f"--dask {address}: {error}; nothing was simulated") from error
    with client, client.get_executor() as executor:
        threads = sum(cast("dict[str, int]", client.ncores()).values())
        yield PartExecutor(executor, max(IN_FLIGHT, PARTS_A_WORKER * threads))


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Yield a check for Ctrl-C, which is handled as in asyncio.run.

    Only in the main thread and without another handler; the second Ctrl-C interrupts at once.
    """
    pressed = threading.Event()

    def hear(_number: int, _frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, hear)
    try:
        yield pressed.is_set
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
