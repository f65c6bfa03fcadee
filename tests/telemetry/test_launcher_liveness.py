"""Liveness of a launcher from the lock that it holds."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.events import WorkerSpawned
from outlast.telemetry.event_store import LOCKS, life_of

HERE = WorkerSpawned(t_ns=1, worker="w", seat=0, pid=1, host=socket.gethostname())
ELSEWHERE = WorkerSpawned(t_ns=1, worker="w", seat=0, pid=1, host="another-host")


@pytest.fixture
def held(tmp_path: Path) -> Iterator[int]:
    lock_fd = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
    yield lock_fd
    os.close(lock_fd)


@pytest.mark.skipif(not LOCKS.exists(), reason="this kernel does not list its locks")
def test_a_launcher_with_a_held_lock_is_running(tmp_path: Path, held: int) -> None:
    assert life_of(tmp_path, [HERE]) == "running"
    other = os.open(tmp_path / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):  # and it is the real lock that was seen
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    fcntl.flock(held, fcntl.LOCK_UN)
    assert life_of(tmp_path, [HERE]) == "died"


def test_a_lock_of_another_device_counts_only_with_the_holders_pid(
    tmp_path: Path, held: int
) -> None:
    inode, locks = os.fstat(held).st_ino, tmp_path / "locks"
    line = "1: FLOCK  ADVISORY  WRITE {} ff:ff:{} 0 EOF\n"
    for pid, number, life in (
        (os.getpid(), inode, "running"),
        (os.getpid() + 1, inode, "died"),
        (os.getpid(), inode + 1, "died"),
    ):
        locks.write_text("garbage\n" + line.format(pid, number))
        assert life_of(tmp_path, [HERE], locks=locks) == life


def test_liveness_is_unknown_on_other_hosts(tmp_path: Path) -> None:
    assert life_of(tmp_path) == "unknown"  # no lock: no launcher of ours has been here
    (tmp_path / "lock").write_text("1\n")
    assert life_of(tmp_path, [ELSEWHERE]) == "unknown"
    assert life_of(tmp_path, [ELSEWHERE, HERE]) == "died"  # the newest launcher's host counts
    assert life_of(tmp_path, [HERE], locks=tmp_path / "nowhere") == "unknown"
