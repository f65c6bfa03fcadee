"""Titles of workers, as `ps` and `top` show them: `outlast rank 2 gen 3 train.py`.

A title is written over the arguments that the kernel has of this process. What follows them, the
initial environment, stays: the family of a worker is known by a mark in it. setproctitle's titles
go on into the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

_PR_SET_NAME = 15
_ARG_START, _ARG_END = 45, 46  # fields of /proc/self/stat behind the name


def set_title(rank: int, generation: int) -> None:
    """Show rank, generation and the script's command as this process's arguments.

    The end of a title that is longer than the process's arguments is cut off. Nothing is done
    where the kernel does not tell where they are.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        _write(f"outlast rank {rank} gen {generation} {' '.join(sys.argv)}".encode())
        # Of the thread: the kernel keeps 15 bytes of it.
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank{rank} gen{generation}".encode(), 0, 0, 0)


def _write(title: bytes) -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if 0 < start < end:
        space = end - start - 1  # the last byte stays zero: else the kernel reads on
        ctypes.memmove(start, title[:space].ljust(space + 1, b"\0"), space + 1)
