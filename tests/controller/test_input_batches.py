"""Several inputs in one turn have the same result as inputs in separate turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.controller.controller_state import ControllerState
from outlast.controller.inputs import Action, Input, Received, Wake
from outlast.controller.state_machine import handle, handle_all
from outlast.transport import messages

WORLD = 4


def frames(desk: ControllerDriver, bodies: dict[str, messages.AnyBody], seq: int) -> list[Input]:
    """From workers, or from their agent where the name is empty."""
    return [
        Received(
            t_ns=desk.now_ns,
            envelope=messages.MessageEnvelope(
                run="r", term=1, agent="a", incarnation=1, worker=worker, seq=seq, body=body
            ),
        )
        for worker, body in bodies.items()
    ]


def one_by_one(state: ControllerState, inputs: list[Input]) -> tuple[ControllerState, list[Action]]:
    actions: list[Action] = []
    for each in inputs:
        state, more = handle(state, each)
        actions += more
    return state, actions


def said(actions: list[Action]) -> list[str]:
    return sorted(str(action) for action in actions if not isinstance(action, Wake))


def broken() -> tuple[ControllerDriver, list[Input]]:
    """Rank 2 is lost, and the others answer: the decision is due."""
    desk = ControllerDriver(world=WORLD, spares=1).begin().open()
    lost = messages.WorkerLostReport(
        worker=desk.seats()[2],
        fault=events.Fault(kind="killed", detail="SIGKILL", signal=9),
        n=3, step=3, state="running", slots={"before:3": b"own"},
    )  # fmt: skip
    status = messages.Status(generation=1, n=3, step=3, state="running")
    rest: dict[str, messages.AnyBody] = {desk.seats()[seat]: status for seat in (0, 1, 3)}
    return desk, frames(desk, {"": lost, **rest}, 1000)


def ready() -> tuple[ControllerDriver, list[Input]]:
    """Everybody is ready for the next generation."""
    desk, inputs = broken()
    desk.state, _ = handle_all(desk.state, inputs)
    answers: dict[str, messages.AnyBody] = dict.fromkeys(
        desk.seats(), messages.WorkerReady(generation=2, n=3)
    )
    return desk, frames(desk, answers, 2000)


@pytest.mark.parametrize(("scene", "mode"), [(broken, "gathering"), (ready, "connecting")])
def test_together_as_one_by_one(
    scene: Callable[[], tuple[ControllerDriver, list[Input]]], mode: str
) -> None:
    desk, inputs = scene()
    apart, apart_actions = one_by_one(desk.state, inputs)
    before = repr(desk.state)
    together, actions = handle_all(desk.state, inputs)
    assert together.mode == mode
    apart.clock.path = together.clock.path  # of the newest turn, which is another one
    assert together == apart and said(actions) == said(apart_actions)
    assert repr(desk.state) == before
