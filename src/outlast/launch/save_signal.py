"""Requests for a checkpoint to a running launcher, by signal."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from outlast.errors import RunDirError
from outlast.launch import run_directory
from outlast.launch.host.reaper import read_process_stat

SIGNAL = signal.SIGUSR1
REFUSED = "SIGUSR1: nothing here could be saved yet"  # the launcher's answer, as a note


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Within, the signal kills nobody: a scheduler gives notice also while a launcher still looks
    for its checkpoint, or ends."""
    before = signal.getsignal(SIGNAL)
    if before is signal.SIG_DFL:
        signal.signal(SIGNAL, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(SIGNAL, before)


def request_save_by_signal(run_dir: Path) -> int:
    """Ask the launcher that holds `run_dir`; its pid. What comes of it is told by its events.

    Never sent to a process that would die of it. Raises RunDirError where nobody can be asked.
    """
    holder = run_directory.holder(run_dir)
    if holder is None:
        raise RunDirError(
            f"{run_dir}: its launcher does not run on this host, so that nobody can be asked for a"
            " checkpoint; the same `outlast run` command resumes the run"
        )
    if not holder.saves:
        raise RunDirError(
            f"{run_dir}: its launcher (pid {holder.pid}) takes no requests: it is just starting or"
            " ending, or SIGUSR1 is one of its --signals-to-handle; nothing was asked"
        )
    try:
        process = os.pidfd_open(holder.pid)
        try:
            now = read_process_stat(holder.pid)
            if now is None or now.started != holder.started:
                raise ProcessLookupError
            signal.pidfd_send_signal(process, SIGNAL)
        finally:
            os.close(process)
    except ProcessLookupError as error:
        raise RunDirError(f"{run_dir}: its launcher (pid {holder.pid}) has just ended") from error
    except PermissionError as error:
        raise RunDirError(
            f"{run_dir}: its launcher (pid {holder.pid}) belongs to somebody else; nothing was"
            " asked; ask as that user"
        ) from error
    return holder.pid
