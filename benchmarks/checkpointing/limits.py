"""What this machine can do at best: copy memory, write to the disk, read from it."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

COPY_BYTES = 512 << 20  # far above any cache
SLICE_BYTES = 32 << 20
COPIES, WRITES = 5, 3


class Limits(NamedTuple):
    """Seconds for a state of the size that was asked for."""

    copy_s: float
    copy_two_s: float
    write_s: float


def measure(folder: Path, size_bytes: int) -> Limits:
    """memcpy into memory that is there already, by one thread and by two; and one thread past the
    page cache into a new file, synced."""
    copy_bytes = min(size_bytes, COPY_BYTES)
    one, other = memory(copy_bytes), memory(copy_bytes)
    source, target = address(one), address(other)
    copy_s = median_s(COPIES, lambda: ctypes.memmove(target, source, copy_bytes))
    half = copy_bytes // 2

    def copy_by_two() -> None:
        other = threading.Thread(target=ctypes.memmove, args=(target, source, half))
        other.start()
        ctypes.memmove(target + half, source + half, copy_bytes - half)
        other.join()

    copy_two_s = median_s(COPIES, copy_by_two)
    write_s = median_s(WRITES, lambda: write(folder / "limit", size_bytes, memoryview(one)))
    of_all = size_bytes / copy_bytes
    return Limits(copy_s * of_all, copy_two_s * of_all, write_s)


def memory(size_bytes: int) -> mmap.mmap:
    """Present, page aligned, in huge pages where they are to be had."""
    made = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        made.madvise(mmap.MADV_HUGEPAGE)
    ctypes.memset(address(made), 7, size_bytes)
    return made


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def write(path: Path, size_bytes: int, source: memoryview) -> None:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o644)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        for at in range(0, size_bytes // 4096 * 4096, SLICE_BYTES):
            begin = at % (len(source) // SLICE_BYTES * SLICE_BYTES or len(source))
            length = min(SLICE_BYTES, size_bytes // 4096 * 4096 - at, len(source))
            os.pwrite(fd, source[begin : begin + length], at)
        os.fsync(fd)
    finally:
        os.close(fd)
    path.unlink()


def read(path: Path, into: memoryview) -> None:
    """The whole file, past the page cache."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        at = 0
        while count := os.preadv(fd, [into[:SLICE_BYTES]], at):
            at += count
    finally:
        os.close(fd)


def median_s(times: int, do: Callable[[], object]) -> float:
    taken: list[float] = []
    for _ in range(times):
        begin = time.perf_counter()
        do()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
