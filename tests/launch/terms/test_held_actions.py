"""Actions that wait for the store of terms: their order, and the end of a run without the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from outlast import events
from outlast.controller import inputs
from outlast.errors import StorageError
from outlast.launch.terms import held_actions
from outlast.launch.terms.held_actions import HeldActions
from outlast.transport import messages

END = inputs.EndRun(outcome="done", exit_code=0)


class Desk:
    """Actions that were done, and the store's answers that are still to come."""

    def __init__(self) -> None:
        self.done: list[inputs.Action] = []
        self.waiting: list[Callable[[], None]] = []
        self.ended: asyncio.Future[inputs.EndRun] = asyncio.get_running_loop().create_future()
        self.held = HeldActions(self.waiting.append, self.done.append, self.ended)


def order(worker: str) -> inputs.Send:
    body = messages.Spawn(worker=worker, seat=0)
    return inputs.Send(agent="a", workers=(), body=body)


def test_actions_behind_an_append_wait_for_a_later_read_and_keep_their_order() -> None:
    async def act() -> None:
        desk = Desk()
        first, second, third = order("w1"), order("w2"), order("w3")
        desk.held.do(first)
        desk.held.appended()
        desk.held.do(second)
        desk.held.appended()
        desk.held.do(third)
        assert desk.done == [first]
        desk.waiting.pop(0)()
        assert desk.done == [first, second]
        desk.waiting.pop(0)()
        assert desk.done == [first, second, third]
        desk.held.do(first)
        assert desk.done[-1] is first, "nothing is held any more"

    asyncio.run(act())


def test_a_long_wait_of_an_order_extends_deadlines_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        desk = Desk()
        now_s = [100.0]
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s[0])
        desk.held.do(order("w1"))
        now_s[0] += 60.0
        assert desk.held.excuse_s() == 0.0, "nothing has waited"
        desk.held.appended()
        desk.held.do(order("w2"))
        now_s[0] += 0.5
        assert desk.held.excuse_s() == 0.0, "a read takes a while"
        now_s[0] += 3.0
        assert desk.held.excuse_s() == 3.5
        now_s[0] += 2.0
        assert desk.held.excuse_s() == 2.0
        desk.waiting.pop()()
        now_s[0] += 9.0
        assert desk.held.excuse_s() == 0.0

    asyncio.run(act())


def test_a_loss_and_what_follows_it_wait_for_a_later_read() -> None:
    """A controller that is cut off takes all other nodes for lost."""

    async def act() -> None:
        desk = Desk()
        fault = events.Fault(kind="agent_lost", detail="no renewal for 2 s")
        lost = events.WorkerLost(t_ns=1, worker="w0", seat=0, fault=fault)
        desk.held.do(inputs.Emit(event=events.WorkerWarm(t_ns=1, worker="w0")))
        desk.held.do(inputs.Emit(event=lost))
        desk.held.do(order("w1"))
        assert [type(one) for one in desk.done] == [inputs.Emit]
        desk.waiting.pop()()
        assert desk.done[1:] == [inputs.Emit(event=lost), order("w1")]

    asyncio.run(act())


@pytest.mark.parametrize("answers", [True, False])
def test_the_end_of_a_run_waits_for_the_store_within_a_limit(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_actions, "END_S", 0.05)

    async def act() -> None:
        desk = Desk()
        desk.held.do(END)
        assert desk.done == []
        if answers:
            desk.waiting.pop()()
            assert desk.done == [END]
            desk.ended.set_result(END)  # as the shell does
        async with asyncio.timeout(30):
            if answers:
                assert await desk.ended is END
                return
            with pytest.raises(StorageError, match=r"\(done\).*has not answered for 0\.05 s"):
                await desk.ended

    asyncio.run(act())
