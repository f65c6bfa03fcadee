"""Drain to durable targets and pruning, with reported failures."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests.checkpoint.bucket_server import BucketServer
from tests.checkpoint.sample_checkpoint import checkpoint, flip, place

from outlast.checkpoint.format.manifests import COMMIT, SavePoint
from outlast.checkpoint.stores.catalog import checkpoint_places, open_checkpoint, verify
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.object_store import open_store
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.checkpoint.upkeep.checkpoint_copy import copy_checkpoint
from outlast.checkpoint.upkeep.drain_to_target import (
    DrainRule,
    StoreDrainer,
    drain_store,
    lacking_checkpoints,
)
from outlast.checkpoint.upkeep.durable_targets import SaveInterval
from outlast.checkpoint.upkeep.retention_policy import Keep, prune_store
from outlast.errors import OutlastError

pytestmark = pytest.mark.process
DEADLINE_S = 30.0


@pytest.fixture
def source(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "target")


def fail(place: SavePoint, error: OutlastError) -> None:
    pytest.fail(f"{place}: {error}")


def test_a_pass_brings_what_is_lacking_newest_first(source: Folder, target: Folder) -> None:
    for step in (1, 2, 3):
        checkpoint(source.root, step, size=9000, world=1)
    copy_checkpoint(source, place(2), target)
    copied = [one.place for one in drain_store(source, target, on_error=fail)]
    assert copied == [place(3), place(1)]
    assert list(drain_store(source, target, on_error=fail)) == []


def test_a_damaged_checkpoint_does_not_block_the_others(source: Folder, target: Folder) -> None:
    for step in (1, 2, 3):
        checkpoint(source.root, step, size=9000, world=1)
    flip(source.root / place(2).directory / "shard-00000", 0)
    errors: list[tuple[SavePoint, str]] = []
    copied = list(drain_store(source, target, on_error=lambda p, e: errors.append((p, str(e)))))
    assert [one.place for one in copied] == [place(3), place(1)]
    assert [p for p, _ in errors] == [place(2)]
    assert "shard-00000" in errors[0][1]


def test_a_checkpoint_deleted_after_the_listing_is_no_error(source: Folder, target: Folder) -> None:
    for step in (1, 2):
        checkpoint(source.root, step, size=9000, world=1)
    copied = drain_store(source, target, on_error=fail)
    assert next(copied).place == place(2)
    source.remove(place(1).directory)
    assert list(copied) == [] and checkpoint_places(target) == [place(2)]


def test_the_last_pass_brings_what_came_before_it(source: Folder, target: Folder) -> None:
    checkpoint(source.root, 1, size=9000, world=1)
    drainer = StoreDrainer(source, target, poll_s=600, on_error=pytest.fail)
    pause, waited = threading.Event(), 0
    while checkpoint_places(target) != [place(1)] and waited < 1000:
        pause.wait(0.02)
        waited += 1
    checkpoint(source.root, 2, size=9000, world=1)
    assert drainer.finish(DEADLINE_S)
    assert checkpoint_places(target) == [place(2), place(1)]


def test_a_failed_last_pass_is_reported_and_ends(source: Folder, tmp_path: Path) -> None:
    checkpoint(source.root, size=9000, world=1)
    (tmp_path / "file").write_text("")
    errors: list[str] = []
    drainer = StoreDrainer(source, Folder(tmp_path / "file"), poll_s=600, on_error=errors.append)
    assert not drainer.finish(DEADLINE_S)
    assert errors


def test_checkpoints_that_the_target_would_prune_are_not_copied(
    source: Folder, target: Folder
) -> None:
    for step in range(1, 9):
        checkpoint(source.root, step, size=100, world=1)
    keep = Keep(last=2, every=3)
    wanted = [place(step) for step in (8, 7, 6, 3)]
    assert lacking_checkpoints(source, target) == [place(step) for step in range(8, 0, -1)]
    list(drain_store(source, target, DrainRule(keep), on_error=fail))
    assert checkpoint_places(target) == wanted
    assert all(verdict.keep for verdict in prune_store(target, keep, time.time_ns()))
    assert list(drain_store(source, target, DrainRule(keep), on_error=fail)) == []


def test_of_a_span_the_next_one_comes_where_the_first_is_damaged(
    source: Folder, target: Folder
) -> None:
    for step in (10, 11, 12, 20):
        checkpoint(source.root, step, size=100, world=1)
    flip(source.root / place(10).directory / "shard-00000", 0)
    errors: list[SavePoint] = []
    every = SaveInterval(steps=10)
    copied = drain_store(
        source, target, DrainRule(every=every), on_error=lambda place, _: errors.append(place)
    )
    assert [one.place for one in copied] == [place(20), place(11)]
    assert errors == [place(10)]
    assert list(drain_store(source, target, DrainRule(every=every), on_error=fail)) == []


def test_reading_back_before_pruning_respects_the_rate(source: Folder, target: Folder) -> None:
    for step in (1, 2):
        checkpoint(target.root, step, size=300_000, world=1)
    begin = time.monotonic()
    drainer = StoreDrainer(
        source, target, DrainRule(Keep(last=1), rate_bytes_per_s=400_000), on_error=pytest.fail
    )
    assert drainer.finish(DEADLINE_S)
    assert checkpoint_places(target) == [place(2)]
    assert 0.3 < time.monotonic() - begin < 60  # 300 kB, less what haste is allowed


def test_two_drains_at_once_make_one_commit(
    source: Folder, server: BucketServer, address: str
) -> None:
    checkpoint(source.root, size=1_000_000, chunk=1 << 18)
    stores = [open_store(address), open_store(address)]
    together = threading.Barrier(2)

    def one(store: Store) -> None:
        together.wait(DEADLINE_S)
        list(drain_store(source, store, on_error=fail))

    threads = [threading.Thread(target=one, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    path = f"{address.rsplit('/', 1)[-1]}/{place(1).directory}/{COMMIT}"
    assert sorted(status for _, status in server.requests("PUT", path)) in ([200], [200, 412])
    assert verify(open_checkpoint(stores[0], place(1))) == []


def test_two_drains_into_one_folder_get_there(source: Folder, target: Folder) -> None:
    checkpoint(source.root, size=1_000_000)
    together = threading.Barrier(2)
    errors: list[str] = []

    def one() -> None:
        together.wait(DEADLINE_S)
        for _ in range(50):
            list(drain_store(source, target, on_error=lambda _, error: errors.append(str(error))))
            if checkpoint_places(target):
                return

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert verify(open_checkpoint(target, place(1))) == []
    assert [error for error in errors if "is writing it" not in error] == []


def test_a_drainer_in_the_background(source: Folder, server: BucketServer, address: str) -> None:
    checkpoint(source.root, 1, size=1000, world=1)
    arrived = threading.Semaphore(0)
    bucket = open_store(address)
    with StoreDrainer(
        source, bucket, DrainRule(Keep(last=1)), poll_s=60,
        on_copied=lambda _: arrived.release(), on_error=pytest.fail,
    ) as drainer:  # fmt: skip
        for step in (2, 3):
            assert arrived.acquire(timeout=DEADLINE_S)
            checkpoint(source.root, step, size=1000, world=1)
            drainer.nudge()
        assert arrived.acquire(timeout=DEADLINE_S)
        assert drainer.close(DEADLINE_S)
        assert not drainer.uses(place(3))
    assert checkpoint_places(bucket)[0] == place(3)
    assert verify(open_checkpoint(bucket, place(3))) == []


def test_a_drainer_reports_errors_and_continues(source: Folder, tmp_path: Path) -> None:
    checkpoint(source.root, size=1000, world=1)
    blocked = tmp_path / "target"
    blocked.write_text("a file where the folder should be")
    told, arrived = threading.Event(), threading.Event()
    errors: list[str] = []

    def tell(error: str) -> None:
        errors.append(error)
        told.set()

    drainer = StoreDrainer(
        source, Folder(blocked), poll_s=0.05, on_copied=lambda _: arrived.set(), on_error=tell
    )
    try:
        assert told.wait(DEADLINE_S)
        blocked.unlink()
        assert arrived.wait(DEADLINE_S)
    finally:
        assert drainer.close(DEADLINE_S)
    assert str(blocked) in errors[0]


def test_a_drainer_ends_in_the_middle_of_a_copy(source: Folder, target: Folder) -> None:
    checkpoint(source.root)
    rule = DrainRule(rate_bytes_per_s=1000)
    drainer = StoreDrainer(source, target, rule, on_error=pytest.fail)
    deadline, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while not drainer.uses(place(1)) and time.monotonic() < deadline:
        pause.wait(0.01)
    begin = time.monotonic()
    assert drainer.close(DEADLINE_S)
    assert time.monotonic() - begin < DEADLINE_S
    assert checkpoint_places(target) == []


def test_incomplete_copies_of_a_killed_drainer_are_removed(source: Folder, target: Folder) -> None:
    for step in (1, 2, 3, 5):
        checkpoint(source.root, step, size=9000, world=1)
    for step in (1, 2):
        copy_checkpoint(source, place(step), target)
        (target.root / place(step).directory / COMMIT).unlink()
    (target.root / place(9).directory).mkdir()  # a later one: somebody may be at it
    source.remove(place(1).directory)
    with StoreDrainer(source, target, DrainRule(Keep(last=2)), on_error=pytest.fail) as drainer:
        assert drainer.finish(DEADLINE_S)
    left = {path.name for path in target.root.glob("step-*")}
    assert left == {place(step).directory for step in (2, 3, 5, 9)}


def test_pruning_reads_the_newest_back_first(target: Folder) -> None:
    for step in range(1, 6):
        checkpoint(target.root, step, size=1000, world=1)
    flip(target.root / place(5).directory / "shard-00000", 0)
    foreseen = prune_store(target, Keep(last=1), time.time_ns(), dry_run=True)
    assert len(checkpoint_places(target)) == 5
    verdicts = prune_store(target, Keep(last=1), time.time_ns())
    assert verdicts == foreseen
    assert checkpoint_places(target) == [place(5), place(4)]
    assert verdicts[1].why == "the last verified one"


def test_pruning_deletes_nothing_without_a_complete_checkpoint(target: Folder) -> None:
    for step in (1, 2, 3):
        flip(checkpoint(target.root, step, size=1000, world=1) / "shard-00000", 0)
    prune_store(target, Keep(last=1), time.time_ns())
    assert checkpoint_places(target) == [place(3), place(2), place(1)]


def test_pruning_spares_what_is_in_use_or_unreadable(target: Folder) -> None:
    for step in (1, 2, 3, 4):
        checkpoint(target.root, step, size=1000, world=1)
    flip(target.root / place(1).directory / COMMIT, 10)
    verdicts = prune_store(
        target, Keep(last=1), time.time_ns(), spare=lambda where: where == place(3)
    )
    assert [(v.place.step, v.keep) for v in verdicts] == [
        (4, True), (3, True), (2, False), (1, True),
    ]  # fmt: skip
    assert checkpoint_places(target) == [place(4), place(3), place(1)]


def test_the_source_of_a_running_copy_is_not_deleted(source: Folder, tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint(source.root, step, size=9000, world=1)
    seen: list[bool] = []

    def look(_done: int, _all: int) -> None:
        (_, older) = prune_store(source, Keep(last=1), time.time_ns())
        seen.append(older.keep and older.why == "in use")

    copy_checkpoint(source, place(1), Folder(tmp_path / "far"), on_progress=look)
    assert seen and all(seen)
    assert not prune_store(source, Keep(last=1), time.time_ns())[1].keep
    assert checkpoint_places(source) == [place(2)]


def test_pruning_reads_nothing_where_nothing_goes(target: Folder) -> None:
    checkpoint(target.root, 1, size=1000, world=1)
    prune_store(target, Keep(), time.time_ns(), verified=lambda one: pytest.fail(one.where))


def test_barred_checkpoints_are_not_counted_or_copied(source: Folder, target: Folder) -> None:
    """Of the last two that stay, none is one that is never started from."""
    for step in (1, 2, 3, 4):
        checkpoint(source.root, step, size=9000, world=1)

    def barred(where: SavePoint) -> bool:
        return where in (place(3), place(4))

    rule = DrainRule(barred=barred)
    copied = [one.place for one in drain_store(source, target, rule, on_error=fail)]
    assert copied == [place(2), place(1)]
    verdicts = prune_store(source, Keep(last=2), time.time_ns(), barred=barred)
    assert {v.place: v.keep for v in verdicts} == {
        place(1): True, place(2): True, place(3): False, place(4): False,
    }  # fmt: skip
    assert checkpoint_places(source) == [place(2), place(1)]


def test_a_barred_checkpoint_stays_while_no_other_is_complete(source: Folder) -> None:
    for step in (1, 2):
        checkpoint(source.root, step, size=9000, world=1)
    flip(source.root / place(1).directory / "shard-00000", 0)
    prune_store(source, Keep(last=1), time.time_ns(), barred=lambda where: where == place(2))
    assert checkpoint_places(source) == [place(2), place(1)]
