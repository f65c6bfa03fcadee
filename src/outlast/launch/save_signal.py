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
    """Ignore the signal within: a scheduler may send it while a launcher starts or ends."""
    before = signal.getsignal(SIGNAL)
    if before is signal.SIG_DFL:
        signal.signal(SIGNAL, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(SIGNAL, before)


def request_save_by_signal(run_dir: Path) -> int:
    """Signal the launcher that holds `run_dir`, and return its pid. Its events have the result.

    Never sent to a process that would die of it. Raises RunDirError where there is no launcher.
    """
    holder = run_directory.holder(run_dir)
    if holder is None:
        raise RunDirError(
            f"{run_dir}: its launcher does not run on this host, so that no checkpoint can be"
            " requested; the same `outlast run` command resumes the run"
        )
    if not holder.saves:
        raise RunDirError(
            f"{run_dir}: its launcher (pid {holder.pid}) accepts no requests: it is starting or"
            " ending, or SIGUSR1 is one of its --signals-to-handle; no checkpoint was requested"
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
            f"{run_dir}: its launcher (pid {holder.pid}) belongs to another user; no checkpoint"
            " was requested; repeat as that user"
        ) from error
    return holder.pid
