"""Deadlines of silent agents, and their start at the first message."""

from __future__ import annotations

from typing import Any

import pytest
from tests.controller.controller_driver import ControllerDriver, S

from outlast import events
from outlast.controller.inputs import AgentLost, LauncherStalled, StopRequested
from outlast.transport import messages


def stand_still(desk: ControllerDriver, seconds: float) -> None:
    desk.now_ns += int(seconds * S)
    desk.feed(LauncherStalled(t_ns=desk.now_ns, gap_ns=int(seconds * S)))


def renew(desk: ControllerDriver, seconds: int) -> None:
    for _ in range(seconds):
        desk.tick(1)
        desk.say("", messages.Renew())


# --- a script that has not called init() yet, or never will ---------------------------------


def test_before_the_first_hello_nobody_is_late() -> None:
    desk = ControllerDriver(world=2, hello_s=5).begin()
    desk.agent()
    renew(desk, 50)
    assert not desk.killed() and desk.state.mode == "gathering"


def test_from_the_first_hello_on_the_others_have_the_whole_time() -> None:
    desk = ControllerDriver(world=2, spares=0, hello_s=5).begin()
    desk.agent()
    renew(desk, 50)
    desk.hello("w1-0")
    renew(desk, 4)
    assert not desk.killed()
    renew(desk, 2)
    assert "w1-1" in desk.killed()


# --- a controller that stood still ------------------------------------------------------------


@pytest.mark.parametrize(
    "first_words",
    [
        lambda t_ns: StopRequested(t_ns=t_ns, reason="SIGTERM"),
        lambda t_ns: AgentLost(t_ns=t_ns, agent="nobody", incarnation=1),
    ],
)
def test_its_workers_did_not_die_while_it_stood_still(first_words: Any) -> None:
    desk = ControllerDriver(world=2, lease_s=10, stop_s=30).begin().open()
    stand_still(desk, 3600)
    desk.feed(first_words(desk.now_ns))
    assert not desk.emitted(events.WorkerLost, history=True)
    desk.tick(11)
    assert desk.emitted(events.WorkerLost)  # silent while the controller listened


def test_every_wait_goes_on_where_it_was() -> None:
    desk = ControllerDriver(world=2, status_s=5, lease_s=100, shared_s=5, stop_s=5).begin().open()
    desk.say("w1-0", messages.SharedValueRequest(name="id"))
    desk.stop()
    desk.tick(4)
    stand_still(desk, 60)
    desk.tick(0.5)
    assert not desk.killed() and desk.state.mode == "closing"
    desk.tick(1)
    assert desk.killed() == {"w1-0", "w1-1", "w1-2"}
