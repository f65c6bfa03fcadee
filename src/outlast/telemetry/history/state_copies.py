"""Newest copies of a job's state: in memory, at peers, on disk, in durable storage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from outlast.events import (
    AnyEvent,
    CheckpointSaved,
    Drained,
    GenerationOpened,
    MemoryCopied,
    PeersCopied,
    RunStarted,
)


class StateCopies(NamedTuple):
    """Newest copy of each tier. None: there is none."""

    memory: MemoryCopied | None
    peers: PeersCopied | None  # the last part of it that arrived
    disk: CheckpointSaved | None
    durable: Drained | None


def newest_copies(events: Sequence[AnyEvent], world: int) -> StateCopies:
    """Return the newest copies of a job of `world` ranks.

    A version counts as at peers when other keepers hold each rank's part. Copies in memory of an
    earlier launch, or behind a place to which the job has returned, do not count. Whether a
    keeper has died since is no event.
    """
    memory: MemoryCopied | None = None
    disk: CheckpointSaved | None = None
    durable: Drained | None = None
    parts: dict[int, dict[int, PeersCopied]] = {}  # by version and rank
    peers: PeersCopied | None = None
    reached: float = math.inf
    for event in reversed(events):
        match event:
            case RunStarted():
                reached = -1
            case GenerationOpened():
                reached = min(reached, event.n)
            case MemoryCopied() if event.n <= reached:
                memory = memory or event
            case PeersCopied() if event.n <= reached and event.is_whole and peers is None:
                version = parts.setdefault(event.n, {})
                version.setdefault(event.seat, event)
                if len(version) >= world:
                    peers = max(version.values(), key=lambda part: part.t_ns)
            case CheckpointSaved():
                disk = disk or event
            case Drained():
                durable = durable or event
            case _:
                pass
        if disk and durable and (reached < 0 or (memory and peers)):
            break
    return StateCopies(memory, peers, disk, durable)
