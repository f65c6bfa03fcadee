"""Keeper pool of a host: bounded restarts."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path

import pytest

from outlast.checkpoint.keeper.keeper_client import KeeperClient
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
        prefix, secrets.token_hex(16), (lock_fd,), pids, notes.put_nowait,
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


async def connected(prefix: str, token: str) -> None:
    """Connect as a rank does at its first save, and leave."""
    client = await asyncio.to_thread(KeeperClient.connect, f"{prefix}0", token)
    await asyncio.to_thread(client.close, 10.0)


def test_a_keeper_starts_at_its_first_connection_where_no_save_is_scheduled(
    tmp_path: Path,
) -> None:
    """A dead one is replaced, as others are, and trainers wait for it at the same address."""

    async def scene(lock_fd: int) -> list[str]:
        notes: asyncio.Queue[str] = asyncio.Queue()
        pids: set[int] = set()
        prefix, token = f"@outlast-test-{secrets.token_hex(8)}-", secrets.token_hex(16)
        plan = ReplicaPlan([ReplicaSpot("here")], saves=False)
        pool = KeeperPool(prefix, token, (lock_fd,), pids, notes.put_nowait, plan)
        async with asyncio.timeout(60):
            for _ in range(2):  # of the rank, and of its successor
                pool.start(0)
            assert not pids
            await connected(prefix, token)
            (pid,) = pids
            os.kill(pid, signal.SIGKILL)
            note = await notes.get()
            await connected(prefix, token)
            assert pids and pid not in pids
        await pool.close(10.0)
        return [note] + [notes.get_nowait() for _ in range(notes.qsize())]

    with (tmp_path / "lock").open("w") as lock:
        notes = asyncio.run(scene(lock.fileno()))
    assert notes == ["the keeper of rank 0 was killed by signal 9"]
