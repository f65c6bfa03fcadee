"""The run directory's lock after a takeover."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

import pytest

from outlast.launch import run_directory
from outlast.launch.nodes import controller_lock
from outlast.launch.nodes.controller_lock import ControllerLock


def test_a_new_controller_is_named_and_locks_the_directory_when_the_former_one_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_lock, "RETRY_S", 0.01)
    former = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    os.pwrite(former, b"1 2 saves and more than the new words need, of an older version\n", 0)
    fcntl.flock(former, fcntl.LOCK_EX)
    lock = ControllerLock(tmp_path)
    lock.show(saves=True)
    holder = run_directory.holder(tmp_path)
    assert holder is not None and (holder.pid, holder.saves) == (os.getpid(), True)

    async def wait() -> None:
        keeping = asyncio.create_task(lock.keep())
        await asyncio.wait({keeping}, timeout=0.05)
        assert not keeping.done()
        os.close(former)
        await asyncio.wait_for(keeping, 5.0)

    asyncio.run(wait())
    other = os.open(tmp_path / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.show(saves=False)
    lock.release()
    lock.release()
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_without_a_directory_nothing_is_locked(tmp_path: Path) -> None:
    lock = ControllerLock(tmp_path / "away")
    lock.show(saves=True)
    asyncio.run(lock.keep())
    lock.release()
