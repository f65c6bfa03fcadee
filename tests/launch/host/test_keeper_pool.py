"""Keeper pool of a host: bounded restarts."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path

import pytest

from outlast.controller.replica_placement import ReplicaSpot
from outlast.launch.host import keeper_pool
from outlast.launch.host.keeper_pool import KeeperPool, ReplicaPlan

pytestmark = pytest.mark.process


async def killed(times: int, lock_fd: int) -> list[str]:
    """What is noted when the only keeper is killed again and again."""
    notes: asyncio.Queue[str] = asyncio.Queue()
    pids: set[int] = set()
    prefix = f"@outlast-test-{secrets.token_hex(8)}-"
    held = KeeperPool(
        prefix, secrets.token_hex(16), lock_fd, pids, notes.put_nowait,
        ReplicaPlan([ReplicaSpot("here")]),
    )  # fmt: skip
    held.start(0)
    said: list[str] = []
    async with asyncio.timeout(60):
        for _ in range(times):
            (pid,) = pids
            os.kill(pid, signal.SIGKILL)
            said.append(await notes.get())
    await held.close(10.0)
    return said + [notes.get_nowait() for _ in range(notes.qsize())]


def test_a_keeper_that_keeps_dying_is_given_up_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_pool, "STARTS_MAX", 2)
    with (tmp_path / "lock").open("w") as lock:
        notes = asyncio.run(killed(2, lock.fileno()))
    assert "rank 0 has no keeper any more, and cannot be saved" in notes[-1]
    assert len(notes) == 3


def test_one_that_lived_long_gives_all_starts_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_pool, "STARTS_MAX", 2)
    monkeypatch.setattr(keeper_pool, "YOUNG_S", 0.0)
    with (tmp_path / "lock").open("w") as lock:
        notes = asyncio.run(killed(4, lock.fileno()))
    assert len(notes) == 4 and not any("no keeper" in note for note in notes)
