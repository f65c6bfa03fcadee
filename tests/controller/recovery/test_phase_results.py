"""Phase results of ranks that were lost before they reported them."""

from __future__ import annotations

import pytest
from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.transport import messages

AFTER = {"after:5": b"a5", "before:4": b"b4"}


@pytest.mark.parametrize(
    ("results", "known"),
    [((b"same", b"same"), b"same"), ((b"one", b"two"), None), ((b"alone", None), None)],
)
def test_a_result_that_all_survivors_share_is_the_lost_ranks_too(
    results: tuple[bytes, bytes | None], known: bytes | None
) -> None:
    desk = ControllerDriver(world=3, spares=1).begin()
    desk.agent()
    for worker in ("w1-0", "w1-1", "w1-2", "w1-3"):
        desk.hello(worker)
    for worker in desk.seats():
        desk.say(worker, messages.WorkerReady(generation=1, n=0))
    for worker in desk.seats():
        desk.say(worker, messages.Joined(generation=1))
    desk.lose("w1-2", 4, slots=AFTER)
    for worker, result in zip(("w1-0", "w1-1"), results, strict=True):
        if result is None:
            desk.say(worker, messages.Status(generation=1, n=4, step=4, state="prepared"))
        else:
            desk.say(
                worker, messages.Status(generation=1, n=5, step=5, state="idle", result=result)
            )
    (seat,) = [body for worker, body in desk.sent(messages.Seat) if worker == "w1-3"]
    assert seat.slots.get("result:5") == known


@pytest.mark.parametrize("checkpoint", [0, 3])
def test_a_successor_that_needs_a_lost_result_takes_the_job_back_to_a_copy(checkpoint: int) -> None:
    """Without one, to its beginning: no other successor could know more."""
    desk = ControllerDriver(world=2, spares=2).begin().open()
    if checkpoint:
        desk.say("w1-0", messages.Checkpointed(n=checkpoint, step=checkpoint, path="ck/3"))
    desk.lose("w1-1", 4, slots=AFTER)
    desk.status("w1-0", 5, "idle")
    assert desk.seats() == ("w1-0", "w1-2")
    fault = events.Fault(kind="unknown", detail="the script uses what step:1 returned")
    desk.say("w1-2", messages.Status(generation=2, n=5, step=5, state="broken", fault=fault))
    desk.status("w1-0", 5, "idle")
    desk.lose("w1-2", 5, slots=AFTER)
    (decided,) = desk.emitted(events.Decided)
    assert (decided.rung, decided.n) == ("restart", checkpoint)
    assert "the own state of rank 1 is lost" in decided.reason
    assert "the script uses what step:1 returned" in decided.reason
