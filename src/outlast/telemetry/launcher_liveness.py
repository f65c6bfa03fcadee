"""Liveness of a run's launcher, read from the lock of its run directory.

Trying the lock would make a starting launcher find it taken for a moment, so the kernel's list of
locks is read instead.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from outlast.events import AnyEvent, WorkerSpawned

Life = Literal[
    "running",  # somebody on this host holds the run directory
    "died",  # nobody does
    "unknown",  # the run was on another host, or this one does not say
]
LOCKS = Path("/proc/locks")


def life_of(run_dir: Path, events: Iterable[AnyEvent] = (), *, locks: Path = LOCKS) -> Life:
    """Return the state of the launcher of a run without an end.

    `events`: the run's, which name its hosts. A run that has ended would count as "died".
    """
    try:
        lock = (run_dir / "lock").stat()
        words = (run_dir / "lock").read_text(errors="replace").split()
        lines = locks.read_text().splitlines()
    except OSError:
        return "unknown"
    device = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}"
    if any(_is_held(line, device, lock.st_ino, words[:1]) for line in lines):
        return "running"
    spawned = [event.host for event in events if isinstance(event, WorkerSpawned)]
    elsewhere = bool(spawned) and spawned[-1] != socket.gethostname()
    return "unknown" if elsewhere else "died"


def _is_held(line: str, device: str, inode: int, holder: list[str]) -> bool:
    """Return whether the list of locks has a line for this file.

    `1: FLOCK ADVISORY WRITE 4242 00:2f:1234 0 EOF`. Some file systems show another device here than
    stat does; the holder's record in the file then has to match.
    """
    fields = line.split()
    if len(fields) < 6 or fields[1] != "FLOCK":
        return False
    place, _, number = fields[5].rpartition(":")
    return number == str(inode) and (place == device or [fields[4]] == holder)
