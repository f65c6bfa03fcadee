"""Reaper of processes that outlive a killed launcher.

The functions find and kill a worker's family: its session, its descendants, and any process with
the family mark in its environment (a daemon that left session and parent). The script is a small
process with a pipe to the launcher and the lock of the run directory. While the launcher lives, it
only records sessions ("+123", "-123"). At end of file it kills the processes of the remaining
sessions and exits; only then can another launcher lock the run directory.

Run as `python -I -S reaper.py MARK`; standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

MARK_VARIABLE = "OUTLAST_FAMILY"
SWEEP_S = 30.0  # only a process in uninterruptible sleep can survive longer


class ProcessStat(NamedTuple):
    """Process entry of /proc.

    `started` distinguishes it from a later process with the same pid; `spent_ticks` is the
    processor time including reaped children.
    """

    pid: int
    state: str
    parent: int
    session: int
    started: int
    spent_ticks: int


def read_process_stat(pid: int) -> ProcessStat | None:
    """Return one process, or None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as stat:  # noqa: PTH123 - a Path takes as long
            text = stat.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    state, spent_ticks = fields[0].decode(), sum(map(int, fields[11:15]))
    return ProcessStat(pid, state, int(fields[1]), int(fields[3]), int(fields[19]), spent_ticks)


def all_processes() -> dict[int, ProcessStat]:
    """Return all visible processes by pid."""
    found: dict[int, ProcessStat] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - thousands of Path objects for plain numbers
        if entry.isdigit() and (processes := read_process_stat(int(entry))):
            found[processes.pid] = processes
    return found


def descendants(roots: set[int], processes: dict[int, ProcessStat]) -> set[int]:
    """Return `roots` and all their descendants."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found, open_ends = set(roots), list(roots)
    while open_ends:
        for child in children.get(open_ends.pop(), ()):
            if child not in found:
                found.add(child)
                open_ends.append(child)
    return found


def is_marked(pid: int, mark: str) -> bool:
    """Return whether the family variable of the initial environment begins with `mark`."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{MARK_VARIABLE}={mark}".encode() in environment


def kill(process: ProcessStat) -> None:
    """Send SIGKILL to this process, but never to a later process with the same pid."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(process.pid)
        try:
            now = read_process_stat(process.pid)
            if now and now.started == process.started:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def orphaned_processes(sessions: set[int], mark: str) -> list[ProcessStat]:
    """Return the live processes of these sessions, their descendants, and those with the mark."""
    processes = all_processes()
    roots = {pid for pid, process in processes.items() if process.session in sessions}
    roots |= {pid for pid in processes if pid not in roots and is_marked(pid, mark)}
    roots.discard(os.getpid())
    return [
        processes[pid] for pid in descendants(roots, processes) if processes[pid].state not in "ZX"
    ]


def sweep(sessions: set[int], mark: str) -> bool:
    """Kill all orphaned processes; return False if any survive SWEEP_S."""
    deadline = time.monotonic() + SWEEP_S
    while alive := orphaned_processes(sessions, mark):
        if time.monotonic() > deadline:
            return False
        for process in alive:
            kill(process)
        time.sleep(0.005)  # polling: only a parent can wait
    return True


def main(mark: str) -> int:
    """Record sessions until the launcher dies, then kill its remaining processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    sessions: set[int] = set()
    for line in sys.stdin:
        change, session = line[0], int(line[1:])
        (sessions.add if change == "+" else sessions.discard)(session)
    return 0 if sweep(sessions, mark) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
