"""Verification of a memory copy that may be lost with its host before the start."""

from __future__ import annotations

import pytest
from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.controller.inputs import AgentLost, CheckpointFound, Verify
from outlast.transport import messages

COPY = messages.Checkpointed(n=8, step=8, path="step 8", tier="memory")
OLDER = messages.Checkpointed(n=4, step=4, path="ck/4")


def found(desk: ControllerDriver, point: messages.Checkpointed | None) -> None:
    generation = desk.state.generation
    desk.feed(CheckpointFound(t_ns=desk.now_ns, generation=generation, checkpoint=point))


def verifying(told: messages.Checkpointed = COPY, **limits: float) -> ControllerDriver:
    """Both ranks are gone; what was told of last is a copy in memory."""
    desk = ControllerDriver(world=2, spares=0, **{"lease_s": 100, **limits}).begin().open()
    desk.verifies = False
    desk.say("w1-0", told)
    desk.lose("w1-0", 9)
    desk.lose("w1-1", 9)
    assert desk.state.mode == "verifying"
    return desk


def starting(point: messages.Checkpointed = COPY) -> ControllerDriver:
    """It was found, and two workers are on their way to start from it."""
    desk = verifying(point)
    found(desk, point)
    desk.hello("w1-2")
    desk.history.clear()
    return desk


def blink(desk: ControllerDriver) -> None:
    """The agent's connection breaks, and is there again."""
    desk.feed(AgentLost(t_ns=desk.now_ns, agent="a", incarnation=1))
    desk.agent(*desk.state.members.workers)


def origins(desk: ControllerDriver) -> set[str]:
    told = desk.sent(messages.Seat, history=True)
    return {body.checkpoint.path if body.checkpoint else "" for _, body in told}


def asked(desk: ControllerDriver) -> int:
    return sum(isinstance(action, Verify) for action in desk.history)


@pytest.mark.parametrize(
    ("now", "origin", "corrections"), [(COPY, "step 8", 0), (OLDER, "ck/4", 1), (None, "", 1)]
)
def test_it_is_looked_for_again(
    now: messages.Checkpointed | None, origin: str, corrections: int
) -> None:
    desk = starting()
    blink(desk)
    desk.hello("w1-3")
    assert asked(desk) == 1 and not origins(desk)
    found(desk, now)
    assert origins(desk) == {origin}
    assert desk.seats() == ("w1-2", "w1-3") and not desk.sent(messages.Spawn, history=True)
    assert len(desk.emitted(events.Decided, history=True)) == corrections
    assert desk.decision().n == (now.n if now else 0)


def test_once_for_whatever_was_lost_on_the_way() -> None:
    desk = verifying(lease_s=5, hello_s=100, join_s=100)
    desk.feed(AgentLost(t_ns=desk.now_ns, agent="a", incarnation=1))
    found(desk, COPY)
    desk.tick(11)  # its lease is out
    desk.history.clear()
    desk._seqs.clear()
    desk.agent(incarnation=2)
    for name in desk.seats():
        desk.say(name, messages.WorkerHello(pid=1, fingerprint={}, address=name), incarnation=2)
    assert asked(desk) == 1 and not origins(desk)
    found(desk, OLDER)
    assert origins(desk) == {"ck/4"}


def test_nobody_looks_again_where_nobody_was_lost() -> None:
    desk = starting()
    desk.hello("w1-3")
    assert asked(desk) == 0 and origins(desk) == {"step 8"}


def test_a_disk_outlives_agents() -> None:
    desk = starting(OLDER)
    blink(desk)
    desk.hello("w1-3")
    assert asked(desk) == 0 and origins(desk) == {"ck/4"}


def test_an_agent_that_is_lost_again_and_again_holds_nobody_up_for_ever() -> None:
    desk = starting()
    blink(desk)
    desk.hello("w1-3")
    for _ in range(10):
        if desk.state.mode == "verifying":
            blink(desk)
            found(desk, COPY)
    assert asked(desk) == desk.limits.attempts_max and origins(desk) == {"step 8"}


def test_whoever_cannot_start_from_it_sends_all_to_the_disk() -> None:
    desk = starting()
    desk.hello("w1-3")
    assert origins(desk) == {"step 8"}
    why = "CorruptionError: memory/step 8 is missing"
    for name in ("w1-2", "w1-3"):
        desk.lose(name, 8, state="waiting", kind="exited", exit_code=1, traceback=why)
    assert asked(desk) == 1
    desk.history.clear()
    found(desk, OLDER)
    for name in desk.seats():
        desk.hello(name)
    assert origins(desk) == {"ck/4"} and desk.end() is None


def test_a_restart_counts_once_and_from_where_it_began() -> None:
    desk = starting()
    blink(desk)
    desk.hello("w1-3")
    found(desk, OLDER)
    measured = desk.state.intervals.measured
    assert (measured.failures, measured.from_memory, measured.from_disk) == (1, 0, 1)


def test_a_copy_that_nobody_had_told_of_is_no_correction() -> None:
    disk = messages.Checkpointed(n=8, step=8, path="ck/8")
    desk = verifying(disk)
    desk.history.clear()
    found(desk, COPY)
    assert not desk.emitted(events.Decided, history=True)
