"""Start of a restarted run: at a verified checkpoint, after all workers have ended."""

from __future__ import annotations

import msgspec
import pytest
from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.controller.inputs import CheckpointFound, Verify
from outlast.transport import messages

NEWEST = messages.Checkpointed(n=8, step=8, path="ck/8")
OLDER = messages.Checkpointed(n=4, step=4, path="ck/4")


def verifying() -> ControllerDriver:
    """Both ranks are gone; the newest checkpoint that was told of is NEWEST."""
    desk = ControllerDriver(world=2, spares=0, join_s=5, lease_s=100).begin().open()
    desk.verifies = False
    desk.say("w1-0", NEWEST)
    desk.lose("w1-0", 9)
    desk.lose("w1-1", 9)
    assert desk.state.mode == "verifying" and not desk.sent(messages.Spawn)
    return desk


def found(desk: ControllerDriver, point: messages.Checkpointed | None, generation: int = 1) -> None:
    desk.feed(CheckpointFound(t_ns=desk.now_ns, generation=generation, checkpoint=point))


def seats(desk: ControllerDriver) -> set[tuple[int, str]]:
    desk.history.clear()
    for name in desk.seats():
        desk.hello(name)
    return {
        (body.n, body.checkpoint.path if body.checkpoint else "")
        for _, body in desk.sent(messages.Seat, history=True)
    }


@pytest.mark.parametrize(
    ("point", "start"), [(NEWEST, (8, "ck/8")), (OLDER, (4, "ck/4")), (None, (0, ""))]
)
def test_all_start_from_what_is_whole(point: messages.Checkpointed | None, start: object) -> None:
    desk = verifying()
    found(desk, point)
    said = [decided.reason for decided in desk.emitted(events.Decided)]
    assert any("phase 8 (step 8) is not whole" in text for text in said) == (point != NEWEST)
    assert seats(desk) == {start}


def test_nobody_looks_while_somebody_may_write() -> None:
    desk = ControllerDriver(world=2, spares=0).begin().open()
    desk.lose("w1-0", 9)
    desk.status("w1-1", 9, "running")
    assert desk.state.mode == "clearing"
    assert not any(isinstance(action, Verify) for action in desk.history)
    desk.lose("w1-1", 9)
    assert [action for action in desk.actions if isinstance(action, Verify)]


def test_an_answer_to_an_earlier_question_is_none() -> None:
    desk = verifying()
    found(desk, OLDER, generation=0)
    assert desk.state.mode == "verifying"


def test_a_disk_that_does_not_answer_holds_nobody_up_for_ever() -> None:
    desk = verifying()
    desk.tick(6)
    assert desk.state.mode == "gathering" and seats(desk) == {(8, "ck/8")}
    found(desk, OLDER)
    assert desk.state.saves.checkpoint == NEWEST


def test_a_stop_meanwhile_has_nothing_to_save() -> None:
    desk = verifying()
    desk.stop()
    end = desk.end()
    assert end is not None and end.outcome == "interrupted"


def test_a_copy_in_memory_is_nearer_than_the_disk() -> None:
    desk = ControllerDriver(world=2, spares=0).begin().open()
    desk.say("w1-0", NEWEST)
    desk.say("w1-0", msgspec.structs.replace(NEWEST, tier="memory", path="step 8"))
    desk.say("w1-0", NEWEST)  # the same one, on the disk by now
    desk.lose("w1-0", 9)
    desk.lose("w1-1", 9)
    (decided,) = desk.emitted(events.Decided)
    assert decided.rung == "rollback" and "the copy in memory at phase 8" in decided.reason


def test_a_newer_checkpoint_is_nearer_than_an_older_copy() -> None:
    desk = ControllerDriver(world=2, spares=0).begin().open()
    desk.say("w1-0", msgspec.structs.replace(OLDER, tier="memory"))
    desk.say("w1-0", NEWEST)
    desk.lose("w1-0", 9)
    desk.lose("w1-1", 9)
    (decided,) = desk.emitted(events.Decided)
    assert decided.rung == "restart" and "the checkpoint at phase 8" in decided.reason


def test_a_copy_that_is_gone_sends_everybody_to_the_disk() -> None:
    desk = ControllerDriver(world=2, spares=0, join_s=5, lease_s=100).begin().open()
    desk.verifies = False
    desk.say("w1-0", msgspec.structs.replace(NEWEST, tier="memory"))
    desk.lose("w1-0", 9)
    desk.lose("w1-1", 9)
    found(desk, OLDER)
    (decided,) = desk.emitted(events.Decided)
    assert (decided.rung, decided.n) == ("restart", 4)
    assert "the copy in memory at phase 8 (step 8) is not whole" in decided.reason
    assert seats(desk) == {(4, "ck/4")}
