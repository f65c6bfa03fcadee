"""Keepers and trainers killed at any moment: the newest commit is whole, and saves continue."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.keeper_orders import (
    TIMEOUT_S,
    Desk,
    complete,
    directory,
    filled,
    gone,
    holds,
    manifest_of,
    newest,
    order_of,
    steps_of_a_save,
    until,
)

from outlast.checkpoint.keeper import keeper_launch
from outlast.checkpoint.keeper.arena import Arena
from outlast.checkpoint.keeper.keeper_client import ANSWER_S, KeeperClient
from outlast.checkpoint.keeper.keeper_disk import DiskFault
from outlast.checkpoint.keeper.keeper_frames import KeeperSetup, Lend, Outcome, SaveOrder, Write
from outlast.checkpoint.keeper.keeper_launch import ServedKeeper, TrainerEnd
from outlast.checkpoint.keeper.order_ledger import RESTARTS_MAX
from outlast.errors import CorruptionError, StorageError, UsageError

pytestmark = pytest.mark.process
TOKEN = "a token"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "root")
    yield desk
    desk.close()


def give(
    end: TrainerEnd, arena: Arena, order: SaveOrder, attempt: int, written: bool = False
) -> None:
    end.stream.send(Lend(arena=order.arena, size_bytes=arena.size_bytes), [arena.fd])
    end.stream.send(
        Write(order=order, stamp=1, attempt=attempt, written=written, deadline_s=TIMEOUT_S)
    )


def heard(end: TrainerEnd, kind: str | None) -> list[Outcome]:
    """Outcomes until one of `kind`, or until the keeper's end."""
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + TIMEOUT_S
    while not outcomes or outcomes[-1].kind != kind:
        select.select([end.stream.sock], [], [], max(0.0, deadline - time.monotonic()))
        assert time.monotonic() < deadline
        frames = end.stream.receive()
        if frames is None:
            break
        outcomes += [one.frame for one in frames if isinstance(one.frame, Outcome)]
    return outcomes


@pytest.mark.extended
def test_killed_at_every_step(tmp_path: Path) -> None:
    """Whatever it had done: what is committed is whole, and another one brings it to its end."""
    count = len(steps_of_a_save(tmp_path / "count"))
    assert count > 25
    arena = filled()
    committed: list[int] = []
    for nth in range(1, count + 1):
        root = tmp_path / str(nth)
        order = order_of(1, root, DiskFault("kill", nth=nth))
        first = keeper_launch.start_keeper("the first")
        give(first, arena, order, attempt=0)
        before = heard(first, None)
        assert first.close_and_reap(TIMEOUT_S) == "was killed by signal 9"
        at_death = newest(root)
        committed.append(at_death or 0)
        assert at_death == 1 or not any(told.kind == "committed" for told in before)
        second = keeper_launch.start_keeper("the second")
        written = any(told.kind == "written" for told in before)
        give(second, arena, order, attempt=1, written=written)
        assert heard(second, "committed")[-1].kind == "committed"
        second.close_and_reap(TIMEOUT_S)
        assert newest(root) == 1 and complete(root, 1) and holds(root, 1, arena)
    assert committed == sorted(committed) and set(committed) == {0, 1}
    arena.close()


def test_a_dead_keeper_is_replaced(desk: Desk) -> None:
    keeper = desk.keeper()
    desk.save(keeper, 1)
    outcome = desk.save(keeper, 2, DiskFault("kill", "write", nth=3, attempts=RESTARTS_MAX))
    assert outcome.kind == "committed" and newest(desk.root) == 2
    assert holds(desk.root, 2, desk.arenas[0])
    kinds = [(told.save, told.kind) for told in keeper.outcomes()]
    assert kinds == [(1, "written"), (1, "committed"), (2, "written"), (2, "committed")]


def test_the_budget_of_replacements(desk: Desk) -> None:
    keeper = desk.keeper()
    desk.save(keeper, 1)
    outcome = desk.save(keeper, 2, DiskFault("kill", "sync", "shard", attempts=99))
    assert outcome.kind == "failed" and newest(desk.root) == 1 and not keeper.busy(0)
    assert "so did 3 successors; the last one was killed by" in outcome.error
    assert desk.save(keeper, 3).kind == "committed"


def test_what_was_written_is_not_read_again(desk: Desk) -> None:
    """Between "written" and the commit the arena is given up, and the keeper dies."""
    keepers = [desk.keeper(), desk.keeper()]
    keepers[0].order(order_of(1, desk.root, DiskFault("kill", "link"), world=2))
    until(lambda: not keepers[0].busy(0), "the part is written")
    keepers[0].drop(0)
    keepers[1].order(order_of(1, desk.root, rank=1, world=2))
    assert keepers[0].wait(1, TIMEOUT_S).kind == "committed" and newest(desk.root) == 1
    assert holds(desk.root, 1, desk.arenas[0])


def test_two_saves_survive_one_death(desk: Desk) -> None:
    keeper = desk.keeper()
    second = filled()
    keeper.lend(second)
    keeper.order(order_of(1, desk.root, DiskFault("kill", "write", nth=2)))
    keeper.order(order_of(2, desk.root, arena=1))
    assert [keeper.wait(step, TIMEOUT_S).kind for step in (1, 2)] == ["committed"] * 2
    assert holds(desk.root, 1, desk.arenas[0]) and holds(desk.root, 2, second)


def test_killed_while_idle(desk: Desk) -> None:
    keeper = desk.keeper()
    desk.save(keeper, 1)
    assert keeper._end and keeper._end.process
    os.kill(keeper._end.process.pid, signal.SIGKILL)
    until(lambda: keeper._end is None, "the death is noticed")
    assert desk.save(keeper, 2).kind == "committed" and newest(desk.root) == 2


TRAINER = """
import os, signal, sys
from pathlib import Path
sys.path.append(sys.argv[1])
from tests.checkpoint.keeper_orders import filled, order_of
from outlast.checkpoint.keeper.keeper_client import KeeperClient as Keeper
root, how = Path(sys.argv[2]), sys.argv[3]
keeper = Keeper.start("a trainer") if how != "connected" else Keeper.connect(sys.argv[4], "a token")
arena = filled()
number = keeper.lend(arena)
root.mkdir()
(root / "copy").write_bytes(bytes(arena.view))
if keeper._end.process:
    (root / "pid").write_text(str(keeper._end.process.pid))
if how == "stopped":
    os.kill(keeper._end.process.pid, signal.SIGSTOP)
if how == "forked":
    fork = os.fork()  # a data loader's worker, that holds the socket open
    if not fork:
        signal.pause()
    (root / "fork").write_text(str(fork))
keeper.order(order_of(1, root, arena=number))
if how == "connected":
    keeper.wait(1, 30)
    if sys.argv[5] == "copying":
        keeper.reuse(number)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_trainer(root: Path, *how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TRAINER, str(Path(__file__).parents[3]), str(root), *how]
    # Its output ends although the keeper goes on; a fork's does not.
    output = subprocess.DEVNULL if how[0] == "forked" else subprocess.PIPE
    return subprocess.run(
        command, stdout=output, stderr=output, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.parametrize("how", ["alone", "stopped", "forked"])
def test_a_trainer_that_is_killed_after_its_order(tmp_path: Path, how: str) -> None:
    """The keeper finishes alone, and ends: also where a fork of the trainer lives, or where the
    order and the trainer's death reach it at once."""
    root = tmp_path / "root"
    done = run_trainer(root, how)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int((root / "pid").read_text())
    os.kill(pid, signal.SIGCONT)
    until(lambda: gone(pid), "the keeper ends")
    assert newest(root) == 1
    shard = (directory(root, 1) / "shard-00000").read_bytes()
    assert (root / "copy").read_bytes().startswith(shard)
    if how == "forked":
        os.kill(int((root / "fork").read_text()), signal.SIGKILL)


def test_ctrl_c_and_hang_ups_are_for_the_trainer(desk: Desk) -> None:
    keeper = desk.keeper()
    assert desk.save(keeper, 1).kind == "committed"
    assert keeper._end and keeper._end.process
    pid = keeper._end.process.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert desk.save(keeper, 2).kind == "committed" and keeper._end.process.pid == pid


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[ServedKeeper, str]]:
    address = f"@outlast-test-{os.getpid()}-{tmp_path.name}"
    served = ServedKeeper(address, "a launcher", KeeperSetup(token=TOKEN))
    yield served, address
    with contextlib.suppress(OSError):
        served.close(TIMEOUT_S)


def test_a_trainers_memory_outlives_it(served: tuple[ServedKeeper, str], tmp_path: Path) -> None:
    root = tmp_path / "root"
    done = run_trainer(root, "connected", served[1], "whole")
    assert done.returncode == -signal.SIGKILL, done.stderr
    keeper = KeeperClient.connect(served[1], TOKEN)
    (held,) = keeper.held_versions()
    assert held.manifest.place == manifest_of(1).place
    assert (held.manifest.rank, held.manifest.world) == (0, 1)
    assert len(held.manifest.chunks) == 6
    memory, copy = keeper.take(held.arena), (root / "copy").read_bytes()
    data = bytearray(memory.size_bytes)
    memory.read(0, memoryview(data))
    assert data == copy
    with pytest.raises(CorruptionError, match="ends before"):
        memory.read(len(data) - 1, memoryview(bytearray(2)))
    with pytest.raises(UsageError, match="has not listed an arena"):
        keeper.take(held.arena)
    other = keeper.lend(filled())
    assert other != held.arena
    assert keeper.held_versions() == [held]  # still, and it can be had again
    keeper.drop(held.arena)
    assert keeper.held_versions() == []
    keeper.close(TIMEOUT_S)
    assert not gone(served[0].process.pid)
    memory.close()


def test_half_a_copy_is_no_version(served: tuple[ServedKeeper, str], tmp_path: Path) -> None:
    done = run_trainer(tmp_path / "root", "connected", served[1], "copying")
    assert done.returncode == -signal.SIGKILL, done.stderr
    keeper = KeeperClient.connect(served[1], TOKEN)
    assert keeper.held_versions() == []
    keeper.drop(0)
    with pytest.raises(UsageError, match="has not listed an arena 0"):
        keeper.take(0)
    keeper.close(TIMEOUT_S)


def test_a_wrong_token_is_turned_away(served: tuple[ServedKeeper, str]) -> None:
    with pytest.raises(StorageError, match="refuses this token"):
        KeeperClient.connect(served[1], "another token")
    KeeperClient.connect(served[1], TOKEN).close(TIMEOUT_S)


def test_one_trainer_at_a_time(served: tuple[ServedKeeper, str]) -> None:
    first = KeeperClient.connect(served[1], TOKEN)
    with pytest.raises(StorageError, match="it serves another trainer"):
        KeeperClient.connect(served[1], TOKEN, timeout_s=0.3)
    first.close(TIMEOUT_S)
    KeeperClient.connect(served[1], TOKEN).close(TIMEOUT_S)


def test_whoever_only_asks_waits_for_no_save_of_another(
    served: tuple[ServedKeeper, str], tmp_path: Path
) -> None:
    """Nor is memory kept that a trainer has lent and never ordered from."""
    first = KeeperClient.connect(served[1], TOKEN)
    lent, _ = first.lend(filled()), first.lend(filled())
    first.order(order_of(1, tmp_path, world=2, arena=lent, deadline_s=3))
    until(lambda: not first.busy(lent), "its part is written")
    with pytest.raises(StorageError, match=r"saves \[1\] had not ended"):
        first.close(0)
    begin_s = time.monotonic()
    asker = KeeperClient.connect(served[1], TOKEN)
    lying = asker.contents(TIMEOUT_S)
    asker.close(TIMEOUT_S)
    assert time.monotonic() - begin_s < ANSWER_S / 2
    assert (
        [held.arena for held in lying.versions] == [lent] == [number for number, _ in lying.arenas]
    )


COMES_AS_THE_LAUNCHER_GOES = """
import os, socket, sys
from outlast.checkpoint.keeper.keeper_process import KeeperProcess as Process
from outlast.checkpoint.keeper.keeper_frames import KeeperSetup as Setup

(reading, control), listener = os.pipe(), socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
keeper = Process(listener, reading, Setup(token=""))
os.close(control)
with socket.socket(socket.AF_UNIX) as trainer:
    trainer.connect(sys.argv[1])
    keeper.run()
"""


def test_a_trainer_that_comes_as_the_launcher_goes(tmp_path: Path) -> None:
    """Both are heard of in one moment: what was ordered before must not be lost with the keeper."""
    command = [sys.executable, "-c", COMES_AS_THE_LAUNCHER_GOES, str(tmp_path / "socket")]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)


def test_it_ends_with_its_launcher(tmp_path: Path) -> None:
    address = str(tmp_path / "socket")
    served = ServedKeeper(address, "a launcher", KeeperSetup(token=TOKEN))
    keeper = KeeperClient.connect(address, TOKEN)
    number = keeper.lend(filled())
    keeper.order(order_of(1, tmp_path / "root", arena=number))
    assert served.close(TIMEOUT_S) == "ended with code 0"
    assert newest(tmp_path / "root") == 1
    assert keeper.wait(1, TIMEOUT_S).kind == "committed"
    keeper.close(TIMEOUT_S)


def test_nobody_is_there() -> None:
    with pytest.raises(StorageError, match=r"at @nobody cannot be reached within 0.1 s"):
        keeper_launch.reach_keeper("@nobody", TOKEN, "a trainer", 0.1)
