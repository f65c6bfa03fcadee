"""Executors: processes of this machine, or somebody's Dask cluster."""

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
from typing import NamedTuple, ParamSpec, TypeVar, cast

from outlast.errors import StorageError, UsageError

IN_FLIGHT, PARTS_A_WORKER = 64, 4
DASK_S = 30.0
P = ParamSpec("P")
T = TypeVar("T")


class Place(NamedTuple):
    """Where parts run, and how many are handed over at a time."""

    executor: Executor | None
    in_flight: int


class Processes(ProcessPoolExecutor):
    """Processes that leave Ctrl-C to the one that started them, and end when it does."""

    def __init__(self, workers: int) -> None:
        super().__init__(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
        )

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As ProcessPoolExecutor's."""
        # A process is started in here, and begins with the signals blocked that are blocked now.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def processes(workers: int) -> Iterator[Place]:
    """Here and now for one worker. What has not begun at the end is dropped, what has is awaited:
    a part takes some tenths of a second."""
    if workers == 1:
        yield Place(None, 1)
        return
    pool = Processes(workers)
    try:
        yield Place(pool, PARTS_A_WORKER * workers)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def dask(address: str) -> Iterator[Place]:
    """A Dask cluster whose workers have the same Outlast, by its scheduler's address. Raises
    UsageError for what is no address, StorageError when nobody answers there."""
    from distributed import Client

    if not re.fullmatch(r"((tcp|tls|wss?)://)?(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", address):
        raise UsageError(f"--dask {address}: say a scheduler's address, as in tcp://10.0.0.1:8786")
    try:
        client = Client(address, timeout=DASK_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise StorageError(f"--dask {address}: {error}; nothing was simulated") from error
    with client, client.get_executor() as executor:
        threads = sum(cast("dict[str, int]", client.ncores()).values())
        yield Place(executor, max(IN_FLIGHT, PARTS_A_WORKER * threads))


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True).start()


def _watch(sentinel: int) -> None:
    """The pool's own pipe has its other end in each process as well, and would be read for ever."""
    wait([sentinel])
    os._exit(1)
