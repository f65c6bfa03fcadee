"""Executors: processes of this machine, or somebody's Dask cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import NamedTuple, cast

from outlast.errors import StorageError, UsageError
from outlast.process_pool import ProcessPool

IN_FLIGHT, PARTS_A_WORKER = 64, 4
DASK_S = 30.0


class Place(NamedTuple):
    """Where parts run, and how many are handed over at a time."""

    executor: Executor | None
    in_flight: int


@contextmanager
def processes(workers: int) -> Iterator[Place]:
    """Here and now for one worker. What has not begun at the end is dropped, what has is awaited:
    a part takes some tenths of a second."""
    if workers == 1:
        yield Place(None, 1)
        return
    from outlast.plan.parts import compile_once  # Numba takes a second to load

    compile_once()  # or each process would, at the same time
    pool = ProcessPool(workers)
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
