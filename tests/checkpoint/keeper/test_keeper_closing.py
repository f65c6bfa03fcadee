"""Closing of the trainer's keeper client, and its last messages."""

from __future__ import annotations

import os
import resource
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.checkpoint.keeper_orders import (
    TIMEOUT_S,
    Desk,
    filled,
    gone,
    holds,
    manifest_of,
    newest,
    order_of,
    until,
)

from outlast.checkpoint.keeper import keeper_client
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_disk import DiskFault
from outlast.checkpoint.keeper.keeper_frames import KeeperSetup
from outlast.checkpoint.keeper.keeper_launch import ServedKeeper
from outlast.errors import StorageError

pytestmark = pytest.mark.process
LONG_S = 1800.0
UNSAYABLE = "no text: \udc80"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "root")
    yield desk
    desk.close()


def pid_of(keeper: KeeperClient) -> int:
    assert keeper._end and keeper._end.process
    return keeper._end.process.pid


def test_a_keeper_that_does_not_end(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """All saves have ended: however long they might have taken, the process has no such time."""
    monkeypatch.setattr(keeper_client, "ANSWER_S", 0.3)
    keeper = desk.keeper()
    assert desk.save(keeper, 1).kind == "committed"
    pid = pid_of(keeper)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    keeper.close(LONG_S)
    assert time.monotonic() - began < TIMEOUT_S and gone(pid)
    keeper._thread.join(TIMEOUT_S)
    assert not keeper._thread.is_alive()


def test_the_launchers_keeper_does_not_hear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not ours to kill; nor is its answer waited for."""
    address = f"@outlast-test-{os.getpid()}-{tmp_path.name}"
    served = ServedKeeper(address, "a launcher", KeeperSetup(token="a token"))
    keeper = KeeperClient.connect(address, "a token")
    monkeypatch.setattr(keeper_client, "ANSWER_S", 0.3)
    os.kill(served.process.pid, signal.SIGSTOP)
    keeper.close(LONG_S)
    keeper._thread.join(TIMEOUT_S)
    assert not keeper._thread.is_alive() and not gone(served.process.pid)
    os.kill(served.process.pid, signal.SIGCONT)
    assert served.close(TIMEOUT_S) == "ended with code 0"


def test_an_order_that_cannot_be_said(desk: Desk) -> None:
    """It fails, and no other does: also where that is found out by the thread."""
    keeper = desk.keeper()
    bad = msgspec.structs.replace(manifest_of(1), job=UNSAYABLE)
    keeper.order(order_of(1, desk.root, manifest=bad))
    outcome = keeper.wait(1, TIMEOUT_S)
    assert outcome.kind == "failed" and "a Write that cannot be written" in outcome.error
    assert not keeper.busy(0) and desk.save(keeper, 2).kind == "committed"
    second = filled()
    number = keeper.lend(second)
    with keeper._change:  # the thread cannot hear of the death before both are ordered
        os.kill(pid_of(keeper), signal.SIGKILL)
        assert keeper._end
        stream = keeper._end.stream
        until(lambda: select.select([stream.sock], [], [], 0)[0], "the keeper is dead")
        keeper.order(order_of(3, desk.root))
        assert stream.broken
        keeper.order(order_of(4, desk.root, arena=number, manifest=bad))
    assert keeper.wait(3, TIMEOUT_S).kind == "committed" and holds(desk.root, 3, desk.arenas[0])
    assert keeper.wait(4, TIMEOUT_S).kind == "failed" and newest(desk.root) == 3
    second.close()


def test_no_descriptor_is_free(desk: Desk) -> None:
    """Said by whoever lends; a keeper that is replaced is tried again."""
    keeper = desk.keeper()
    arena = filled()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(StorageError, match="no memory can be lent to the keeper"):
            keeper.lend(arena)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    keeper.lend(arena)
    assert desk.save(keeper, 1, DiskFault("kill", "sync", "shard")).kind == "committed"
    arena.close()


def test_again_and_again(tmp_path: Path) -> None:
    """Opened, ordered from, killed and closed at once, by several threads: nobody waits for long,
    and what was committed is whole."""
    took: list[float] = []

    def work(number: int) -> None:
        for turn in range(4):
            desk = Desk(tmp_path / f"{number}-{turn}")
            keeper = desk.keeper()
            keeper.order(order_of(1, desk.root))
            if turn % 2:
                os.kill(pid_of(keeper), signal.SIGKILL)
            began = time.monotonic()
            desk.close()
            took.append(time.monotonic() - began)
            assert newest(desk.root) == 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took) == 12 and max(took) < TIMEOUT_S
