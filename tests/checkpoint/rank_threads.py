"""Ranks as threads of one process that exchange messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from outlast.errors import OutlastError

DEADLINE_S = 30.0
Answer = TypeVar("Answer")
Exchange = Callable[[bytes], list[bytes]]


def alone(message: bytes) -> list[bytes]:
    """Exchange messages in a job of one rank."""
    return [message]


def all_ranks(world: int, do: Callable[[int, Exchange], Answer]) -> list[Answer | OutlastError]:
    """Return what `do(rank, exchange)` returned or raised, on `world` ranks at once."""
    barrier = threading.Barrier(world)
    slots: list[bytes] = [b""] * world

    def rank_of(rank: int) -> Answer | OutlastError:
        def exchange(message: bytes) -> list[bytes]:
            slots[rank] = message
            barrier.wait(DEADLINE_S)
            answers = list(slots)
            barrier.wait(DEADLINE_S)
            return answers

        try:
            return do(rank, exchange)
        except OutlastError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank_of, range(world)))
