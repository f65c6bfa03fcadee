"""Keeper process: orders are written, committed, or reported as failed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.checkpoint.keeper_orders import (
    SIZE_BYTES,
    TIMEOUT_S,
    Desk,
    commit_of,
    complete,
    directory,
    filled,
    gone,
    holds,
    manifest_of,
    names,
    newest,
    order_of,
    place_of,
    until,
)

from outlast.checkpoint.format.manifests import Commit, Manifest, manifest_name, seal, unseal
from outlast.checkpoint.keeper import order_ledger
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_disk import DiskFault
from outlast.errors import StorageError, UsageError

pytestmark = pytest.mark.process


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "not there yet" / "root")
    yield desk
    desk.close()


def test_a_save_is_on_the_disk(desk: Desk) -> None:
    keeper = desk.keeper()
    outcome = desk.save(keeper, 1)
    assert (outcome.kind, outcome.error, outcome.place) == ("committed", "", place_of(1))
    assert outcome.size_bytes == SIZE_BYTES and 0 < outcome.seconds < TIMEOUT_S
    assert [told.kind for told in keeper.outcomes()] == ["written", "committed"]
    assert keeper.outcomes() == []
    assert newest(desk.root) == 1 and complete(desk.root, 1)
    assert holds(desk.root, 1, desk.arenas[0])
    assert (desk.root / "latest").read_text() == f"{place_of(1).directory}\n"
    assert names(desk.root) == ["latest", place_of(1).directory]


@pytest.mark.parametrize("size_bytes", [0, 4096, 64 << 10, 1 << 20])
def test_shards_of_all_sizes(desk: Desk, size_bytes: int) -> None:
    keeper = desk.keeper()
    outcome = desk.save(keeper, 1, manifest=manifest_of(1, size_bytes=size_bytes))
    assert outcome.kind == "committed" and newest(desk.root) == 1
    assert holds(desk.root, 1, desk.arenas[0])


def test_four_ranks_make_one_checkpoint(desk: Desk) -> None:
    keepers = [desk.keeper() for _ in range(4)]
    for rank in (0, 3, 1):
        keepers[rank].order(order_of(1, desk.root, rank=rank, world=4))
    assert [keepers[rank].wait(1, TIMEOUT_S).kind for rank in (1, 3)] == ["written"] * 2
    with pytest.raises(StorageError, match=r"step 1 has not ended within 0.1 s; it continues"):
        keepers[0].wait(1, 0.1)
    assert newest(desk.root) is None and not keepers[0].busy(0)
    keepers[2].order(order_of(1, desk.root, rank=2, world=4))
    outcome = keepers[0].wait(1, TIMEOUT_S)
    assert (outcome.kind, outcome.size_bytes) == ("committed", 4 * SIZE_BYTES)
    assert newest(desk.root) == 1 and complete(desk.root, 1, world=4)
    assert all(holds(desk.root, 1, desk.arenas[rank], rank) for rank in range(4))


def test_two_saves_in_flight(desk: Desk) -> None:
    """The other rank comes late, and with both."""
    first, other = desk.keeper(), desk.keeper()
    arenas = [keeper.lend(filled()) for keeper in (first, other)]
    first.order(order_of(1, desk.root, world=2))
    first.order(order_of(2, desk.root, world=2, arena=arenas[0]))
    other.order(order_of(1, desk.root, rank=1, world=2))
    other.order(order_of(2, desk.root, rank=1, world=2, arena=arenas[1]))
    assert [first.wait(save, TIMEOUT_S).kind for save in (1, 2)] == ["committed"] * 2
    assert newest(desk.root) == 2
    assert (desk.root / "latest").read_text() == f"{place_of(2).directory}\n"


def test_a_save_that_a_later_one_has_overtaken_waits_for_nobody(desk: Desk) -> None:
    """A rank died before it copied its part, and the save was made again."""
    first, other = desk.keeper(), desk.keeper()
    arenas = [keeper.lend(filled()) for keeper in (first, other)]
    first.order(order_of(1, desk.root, world=2))
    first.order(order_of(2, desk.root, world=2, arena=arenas[0]))
    other.order(order_of(2, desk.root, rank=1, world=2, arena=arenas[1]))
    assert first.wait(2, TIMEOUT_S).kind == "committed"
    outcome = first.wait(1, TIMEOUT_S)
    assert outcome.kind == "failed"
    assert "a later save, of step 2, is complete" in outcome.error and "rank 1" in outcome.error


def test_a_run_that_has_gone_back_saves_the_same_steps_again(desk: Desk) -> None:
    """The keeper outlives that; the other rank comes late, and nothing has overtaken it."""
    first, other = desk.keeper(), desk.keeper()
    orders = [order_of(9, desk.root, rank=rank, world=2) for rank in (0, 1)]
    again = [
        msgspec.structs.replace(order_of(3, desk.root, rank=rank, world=2), save=10)
        for rank in (0, 1)
    ]
    first.order(orders[0])
    other.order(orders[1])
    assert first.wait(9, TIMEOUT_S).kind == "committed"
    first.order(again[0])
    with pytest.raises(StorageError, match=r"step 3 has not ended within 0.3 s; it continues"):
        first.wait(10, 0.3)
    other.order(again[1])
    assert first.wait(10, TIMEOUT_S).kind == "committed" and complete(desk.root, 3, world=2)


def test_an_arena_is_busy_until_it_was_read(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_ledger, "GRACE_S", 0.2)
    keeper = desk.keeper()
    desk.save(keeper, 1)
    keeper.order(order_of(2, desk.root, DiskFault("hang", "sync", "shard"), deadline_s=0.5))
    assert keeper.busy(0)
    for forbidden in (keeper.drop, keeper.reuse):
        with pytest.raises(UsageError, match="arena 0 is still being read by a save"):
            forbidden(0)
    with pytest.raises(UsageError, match="arena 0 is still being read by a save"):
        keeper.order(order_of(3, desk.root))
    until(lambda: not keeper.busy(0), "the stuck keeper is replaced")


def test_orders_that_cannot_be_taken(desk: Desk) -> None:
    keeper = desk.keeper()
    desk.save(keeper, 1)
    with pytest.raises(UsageError, match="save number 1 was used before"):
        keeper.order(order_of(1, desk.root))
    with pytest.raises(UsageError, match="arena 7 was not lent"):
        keeper.order(order_of(2, desk.root, arena=7))
    with pytest.raises(UsageError, match="save 2 was not ordered"):
        keeper.wait(2, 1)
    too_large = order_of(3, desk.root, manifest=manifest_of(3, size_bytes=1 << 30))
    keeper.order(too_large)
    outcome = keeper.wait(3, TIMEOUT_S)
    assert outcome.kind == "failed" and "arena 0 is missing or too small" in outcome.error
    keeper.close(TIMEOUT_S)
    with pytest.raises(UsageError, match="is closed"):
        keeper.order(order_of(4, desk.root))


def test_saves_that_never_end_are_bounded(desk: Desk) -> None:
    keeper = desk.keeper()
    for step in range(1, order_ledger.ORDERS_MAX + 1):
        until(lambda: not keeper.busy(0), "the part before is written")
        keeper.order(order_of(step, desk.root, world=2, deadline_s=1.0))
    until(lambda: not keeper.busy(0), "the last part is written")
    with pytest.raises(StorageError, match=r"16 saves have not ended yet, from 1 on; nothing of"):
        keeper.order(order_of(99, desk.root))
    assert keeper.wait(order_ledger.ORDERS_MAX, TIMEOUT_S).kind == "failed"
    until(lambda: names(desk.root) == [], "what was never committed is removed")


def test_a_rank_that_never_comes(desk: Desk) -> None:
    keeper = desk.keeper()
    outcome = desk.save(keeper, 1, world=12, deadline_s=0.4)
    assert outcome.kind == "failed"
    assert "0.4 s passed without the parts of ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3" in outcome.error
    until(lambda: names(desk.root) == [], "the directory is removed")
    assert desk.save(keeper, 2).kind == "committed"


def test_a_rank_that_fails_is_heard_at_once(desk: Desk) -> None:
    keepers = [desk.keeper(), desk.keeper()]
    desk.save(keepers[0], 1)
    keepers[0].order(order_of(2, desk.root, world=2))
    keepers[1].order(order_of(2, desk.root, DiskFault("ENOSPC", "allocate"), rank=1, world=2))
    failed = keepers[1].wait(2, TIMEOUT_S)
    assert failed.kind == "failed" and "rank 1 on" in failed.error
    assert "No space left on device (free space there" in failed.error
    heard = keepers[0].wait(2, TIMEOUT_S)
    assert heard.kind == "failed" and "rank 1: No space left on device" in heard.error
    until(lambda: not directory(desk.root, 2).exists(), "the directory is removed")
    assert newest(desk.root) == 1


STEPS = ["make_directory", "create", "allocate", "write", "sync", "rename", "link"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_disk_that_refuses(desk: Desk, step: str, error: str) -> None:
    keeper = desk.keeper()
    desk.save(keeper, 1)
    outcome = desk.save(keeper, 2, DiskFault(error, step))
    assert outcome.kind == "failed" and os.strerror(getattr(errno, error)) in outcome.error
    assert "step 2 failed on rank 0" in outcome.error and str(desk.root) in outcome.error
    until(lambda: not directory(desk.root, 2).exists(), "what was written is removed")
    assert newest(desk.root) == 1 and not keeper.busy(0)
    assert desk.save(keeper, 3).kind == "committed" and newest(desk.root) == 3


def test_latest_is_only_for_people(desk: Desk) -> None:
    keeper = desk.keeper()
    outcome = desk.save(keeper, 1, DiskFault("EIO", "rename", "latest"))
    assert outcome.kind == "committed" and newest(desk.root) == 1
    assert "`latest` could not be moved: Input/output error" in outcome.error


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_full_for_real(desk: Desk, small_disk: Path) -> None:
    """Also a file system without the page cache's other side: the same bytes."""
    desk.root = small_disk / "root"
    keeper = desk.keeper()
    assert desk.save(keeper, 1).kind == "committed"
    outcome = desk.save(keeper, 2)
    assert outcome.kind == "failed" and "No space left on device" in outcome.error
    until(lambda: not directory(desk.root, 2).exists(), "the second is removed")
    assert newest(desk.root) == 1 and holds(desk.root, 1, desk.arenas[0])
    keeper.close(TIMEOUT_S)


def test_a_disk_that_turns_read_only(desk: Desk, small_disk: Path) -> None:
    desk.root = small_disk / "root"
    keeper = desk.keeper()
    assert desk.save(keeper, 1).kind == "committed"
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    outcome = desk.save(keeper, 2)
    assert outcome.kind == "failed"
    assert "Read-only file system (mount it for writing" in outcome.error
    assert newest(desk.root) == 1 and not keeper.busy(0)
    keeper.close(TIMEOUT_S)


def test_where_nothing_may_be_written(desk: Desk, tmp_path: Path) -> None:
    keeper = desk.keeper()
    (tmp_path / "file").touch()
    outcome = desk.save(keeper, 1)
    for step, root, says in (
        (2, tmp_path / "file", "Not a directory"),
        (3, tmp_path / "file" / "below", "Not a directory"),
        (4, Path("/proc/nowhere"), "No such file"),
    ):
        keeper.order(order_of(step, root))
        outcome = keeper.wait(step, TIMEOUT_S)
        assert outcome.kind == "failed" and says in outcome.error and str(root) in outcome.error


def test_a_directory_that_vanishes(desk: Desk) -> None:
    keeper = desk.keeper()
    keeper.order(order_of(1, desk.root, world=2, deadline_s=5))
    until(lambda: not keeper.busy(0), "its part is written")
    directory(desk.root, 1).rename(desk.root / "elsewhere")
    outcome = keeper.wait(1, TIMEOUT_S)
    assert outcome.kind == "failed" and "it was removed meanwhile" in outcome.error


@pytest.mark.parametrize("left", ["shard-00000", "shard-00000.part", "rank-00000.json"])
def test_a_place_is_never_written_twice(desk: Desk, left: str) -> None:
    keeper = desk.keeper()
    directory(desk.root, 1).mkdir(parents=True)
    (directory(desk.root, 1) / left).write_text("of somebody else")
    outcome = desk.save(keeper, 1)
    assert outcome.kind == "failed" and "exists already" in outcome.error
    assert names(directory(desk.root, 1)) == [left]
    assert (directory(desk.root, 1) / left).read_text() == "of somebody else"


def test_a_committed_place_is_never_written_twice(desk: Desk) -> None:
    one, two = desk.keeper(), desk.keeper()
    desk.save(one, 1)
    outcome = desk.save(two, 1)
    assert outcome.kind == "failed" and "exists already" in outcome.error
    assert newest(desk.root) == 1 and holds(desk.root, 1, desk.arenas[0])


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("job", "another", "rank 1: its manifest is of job 'another'"),
        ("plan", "another", "rank 1: its manifest is of plan 'another'"),
        ("world", 3, "rank 1: its manifest is of world 3"),
        ("place", place_of(7), "rank 1: its manifest is of place"),
        ("rank", 0, "rank 1: its manifest is of rank 0"),
        ("size_bytes", 8192, "rank 1: its manifest"),
        ("digest", "", "do not match its digest"),
    ],
)
def test_a_manifest_that_does_not_belong(desk: Desk, field: str, value: object, says: str) -> None:
    keepers = [desk.keeper(), desk.keeper()]
    keepers[1].order(order_of(1, desk.root, rank=1, world=2))
    keepers[1].wait(1, TIMEOUT_S)
    path = directory(desk.root, 1) / manifest_name(1)
    own = unseal(path.read_bytes(), Manifest, "")
    foreign = seal(msgspec.structs.replace(own, **{field: value}))
    path.write_bytes(foreign if field != "digest" else foreign.replace(b':"job"', b':"jot"'))
    outcome = desk.save(keepers[0], 1, world=2)
    assert outcome.kind == "failed" and "cannot be committed" in outcome.error
    assert says in outcome.error
    until(lambda: not directory(desk.root, 1).exists(), "the directory is removed")


def test_a_keeper_that_is_stopped(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_ledger, "GRACE_S", 0.2)
    keeper = desk.keeper()
    desk.save(keeper, 1)
    pid = pid_of(keeper)
    os.kill(pid, signal.SIGSTOP)
    keeper.order(order_of(2, desk.root, deadline_s=0.5))
    assert keeper.busy(0)
    outcome = keeper.wait(2, TIMEOUT_S)
    assert outcome.kind == "failed"
    assert "neither finished nor answered within 0.5 s" in outcome.error
    until(lambda: not keeper.busy(0), "the arena is free once nobody can read it")
    assert gone(pid) and newest(desk.root) == 1
    assert desk.save(keeper, 3).kind == "committed" and pid_of(keeper) != pid


def test_close_waits_for_saves(desk: Desk) -> None:
    keeper = desk.keeper()
    pid = pid_of(keeper)
    keeper.order(order_of(1, desk.root))
    keeper.close(TIMEOUT_S)
    assert newest(desk.root) == 1 and gone(pid)
    assert [told.kind for told in keeper.outcomes()] == ["written", "committed"]


def test_close_says_what_it_left(desk: Desk) -> None:
    keepers = [desk.keeper(), desk.keeper()]
    keepers[0].order(order_of(1, desk.root, world=2))
    with pytest.raises(StorageError, match=r"saves \[1\] had not ended after 0.2 s; the keeper of"):
        keepers[0].close(0.2)
    keepers[1].order(order_of(1, desk.root, rank=1, world=2))
    assert keepers[0].wait(1, TIMEOUT_S).kind == "committed"


def test_no_thread_and_no_descriptor_is_left(desk: Desk) -> None:
    desk.save(desk.keeper(), 1)
    desk.keepers[0].close(TIMEOUT_S)
    threads, before = threading.active_count(), len(names(Path("/proc/self/fd")))
    for _ in range(3):
        keeper = KeeperClient.start("nobody")
        arena = filled()
        keeper.lend(arena)
        keeper.close(TIMEOUT_S)
        arena.close()
    until(lambda: threading.active_count() <= threads, "threads end")
    assert len(names(Path("/proc/self/fd"))) == before


def pid_of(keeper: KeeperClient) -> int:
    until(lambda: keeper._end and keeper._end.process, "there is a keeper")
    assert keeper._end and keeper._end.process
    return keeper._end.process.pid


def test_commit_records_are_those_that_were_ordered(desk: Desk) -> None:
    desk.save(desk.keeper(), 1)
    found = unseal((directory(desk.root, 1) / "commit.json").read_bytes(), Commit, "")
    assert found.origin == commit_of(1).origin and found.time_ns > 0 and len(found.manifests) == 1
