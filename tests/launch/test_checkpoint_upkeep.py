"""Checkpoint upkeep beside a run: pruning, durable copies and reported failures."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from tests.checkpoint.sample_checkpoint import checkpoint, flip, place
from tests.launch.conftest import Stage

from outlast import events
from outlast.checkpoint.stores.catalog import checkpoint_places
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.upkeep.durable_targets import DurableTarget, parse_durable
from outlast.checkpoint.upkeep.retention_policy import Keep
from outlast.controller.inputs import EndRun
from outlast.launch.checkpoint_upkeep import CheckpointUpkeep
from outlast.launch.run_display import DisplayRecord
from outlast.telemetry.event_store import EventWriter
from outlast.telemetry.live_view import LineDisplay


class Told(DisplayRecord):
    """A record that remembers."""

    def __init__(self, root: Path) -> None:
        super().__init__(EventWriter(root / "events", "test"), LineDisplay())
        self.events: list[events.AnyEvent] = []

    def emit(self, event: events.AnyEvent) -> None:
        super().emit(event)
        self.events.append(event)

    def texts(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, events.Note)]


def to(store: Folder, options: str = "") -> DurableTarget:
    return DurableTarget(parse_durable(f"{store.where} {options}"), store)


def end(
    upkeep: CheckpointUpkeep, timeout_s: float = 20.0, *, give_up: bool = False, done: bool = False
) -> None:
    async def close() -> None:
        over: asyncio.Future[EndRun] = asyncio.get_running_loop().create_future()
        if give_up:
            over.set_result(EndRun(outcome="interrupted", exit_code=4))
        await upkeep.close(timeout_s, over, done=done)

    asyncio.run(close())


@pytest.fixture
def record(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_what_no_rule_keeps_goes_and_the_rest_is_drained(tmp_path: Path, record: Told) -> None:
    root, far = tmp_path / "checkpoints", Folder(tmp_path / "far")
    for step in (1, 2, 3):
        checkpoint(root, step, size=9000, world=1)
    upkeep = CheckpointUpkeep(root, Keep(last=2), [to(far)], record)
    upkeep.committed()
    Stage.eventually(
        lambda: checkpoint_places(Folder(root)) == [place(3), place(2)], "step 1 is deleted"
    )
    Stage.eventually(lambda: len(checkpoint_places(far)) == 2, "two are drained")
    checkpoint(root, 4, size=9000, world=1)
    end(upkeep)  # a last look, without a word of the fourth
    assert checkpoint_places(far) == checkpoint_places(Folder(root)) == [place(4), place(3)]
    drained = [event for event in record.events if isinstance(event, events.Drained)]
    assert {event.step for event in drained} == {2, 3, 4}
    assert drained[-1].where == f"{far.where}/{place(4).directory}" and drained[-1].seconds > 0
    assert sum("was deleted: no rule keeps it" in text for text in record.texts()) == 2


def test_nothing_goes_while_nothing_newer_is_whole(tmp_path: Path, record: Told) -> None:
    for step in (1, 2, 3):
        flip(checkpoint(tmp_path / "c", step, size=9000, world=1) / "shard-00000", 0)
    upkeep = CheckpointUpkeep(tmp_path / "c", Keep(last=1), [], record)
    upkeep.committed()
    end(upkeep)
    assert len(checkpoint_places(Folder(tmp_path / "c"))) == 3 and record.texts() == []


def test_storage_that_fails_is_told_and_what_is_missing_there_is_said(
    tmp_path: Path, record: Told
) -> None:
    checkpoint(tmp_path / "c", size=9000, world=1)
    blocked = tmp_path / "far"
    blocked.write_text("a file where the folder should be")
    end(CheckpointUpkeep(tmp_path / "c", Keep(), [to(Folder(blocked))], record))
    failed = [event for event in record.events if isinstance(event, events.DrainFailed)]
    assert failed and failed[0].where == str(blocked)
    (note,) = record.texts()
    assert str(blocked) in note and "`outlast ckpt copy`" in note


def test_a_target_that_fails_holds_up_no_other_and_is_named(tmp_path: Path, record: Told) -> None:
    root, far, mirror = tmp_path / "c", Folder(tmp_path / "far"), Folder(tmp_path / "mirror")
    (tmp_path / "gone").write_text("a file where the folder should be")
    gone = Folder(tmp_path / "gone")
    for step in (10, 11, 12, 20, 21):
        checkpoint(root, step, size=9000, world=1)
    upkeep = CheckpointUpkeep(
        root, Keep(last=9), [to(gone), to(far), to(mirror, "every=10 keep=last=1")], record
    )
    Stage.eventually(lambda: len(checkpoint_places(far)) == 5, "all are in one")
    Stage.eventually(
        lambda: checkpoint_places(mirror) == [place(20)], "one of ten, and one stays there"
    )
    checkpoint(root, 22, size=9000, world=1)
    end(upkeep, done=True)
    assert checkpoint_places(mirror) == [place(22)]  # the last one of the run, too
    reached = {(Path(e.where).parent.name, e.step) for e in record.events
               if isinstance(e, events.Drained)}  # fmt: skip
    assert reached == {*(("far", step) for step in (10, 11, 12, 20, 21, 22)),
                       ("mirror", 20), ("mirror", 22)}  # fmt: skip
    failed = [event for event in record.events if isinstance(event, events.DrainFailed)]
    assert failed and {event.where for event in failed} == {str(gone.root)}
    (note,) = record.texts()
    assert note.startswith(f"{gone.root} lacks some checkpoints")


def test_whoever_asks_twice_does_not_wait_for_storage(tmp_path: Path, record: Told) -> None:
    class Slow(Folder):
        released = threading.Event()

        def directories(self) -> list[str]:
            self.released.wait(20)
            return super().directories()

    slow = Slow(tmp_path / "far")
    checkpoint(tmp_path / "c", size=9000, world=1)
    threads, begin = threading.active_count(), time.monotonic()
    upkeep = CheckpointUpkeep(tmp_path / "c", Keep(), [to(slow)], record)
    try:
        end(upkeep, give_up=True)
        assert time.monotonic() - begin < 10
        (note,) = record.texts()
        assert "lacks some checkpoints" in note
    finally:
        slow.released.set()
        pause = threading.Event()
        while threading.active_count() > threads and time.monotonic() < begin + 30:
            pause.wait(0.01)
