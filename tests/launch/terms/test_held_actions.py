"""Actions that wait for the store of terms: their order, and the end of a run without the store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from outlast import events
from outlast.controller import inputs
from outlast.errors import RunDirError, StorageError
from outlast.launch.terms import held_actions
from outlast.launch.terms.held_actions import HeldActions
from outlast.transport import messages

ENTRY = inputs.DrainRequested(reason="SIGTERM")
END = inputs.EndRun(outcome="done", exit_code=0)


class Desk:
    """Actions that were done, and the store's answers that are still to come."""

    def __init__(self) -> None:
        self.done: list[inputs.Action] = []
        self.waiting: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        self.ended: asyncio.Future[inputs.EndRun] = asyncio.get_running_loop().create_future()
        self.is_writable = threading.Event()
        self.is_writable.set()
        self.written: list[inputs.JournalEntry] = []
        self.held = HeldActions(self.waiting.put_nowait, self.done.append, self.ended, self.write)

    def write(self, entries: Sequence[inputs.JournalEntry]) -> None:
        assert self.is_writable.wait(30)
        self.written += entries

    async def read(self) -> Callable[[], None]:
        """Return the answer to the next read, once it has begun."""
        async with asyncio.timeout(30):
            return await self.waiting.get()


def order(worker: str) -> inputs.Send:
    body = messages.Spawn(worker=worker, seat=0)
    return inputs.Send(agent="a", workers=(), body=body)


def test_actions_behind_an_append_wait_for_a_later_read_and_keep_their_order() -> None:
    async def act() -> None:
        desk = Desk()
        first, second, third = order("w1"), order("w2"), order("w3")
        desk.held.do(first)
        desk.held.append([ENTRY])
        desk.held.do(second)
        desk.held.append([ENTRY])
        desk.held.do(third)
        assert desk.done == [first]
        (await desk.read())()
        assert desk.done == [first, second]
        (await desk.read())()
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
        desk.held.append([ENTRY])
        desk.held.do(order("w2"))
        now_s[0] += 0.5
        assert desk.held.excuse_s() == 0.0, "a read takes a while"
        now_s[0] += 3.0
        assert desk.held.excuse_s() == 3.5
        answer = await desk.read()
        now_s[0] += 2.0
        assert desk.held.excuse_s() == 2.0
        answer()
        now_s[0] += 9.0
        assert desk.held.excuse_s() == 0.0

    asyncio.run(act())


def test_a_write_that_stands_still_holds_what_follows_and_not_the_event_loop() -> None:
    async def act() -> None:
        desk = Desk()
        desk.is_writable.clear()
        wake = inputs.Wake(t_ns=1)
        desk.held.append([ENTRY])
        desk.held.do(order("w1"))
        desk.held.do(wake)
        await asyncio.sleep(0)
        assert desk.done == [wake] and desk.waiting.empty(), "no read begins before the write ends"
        desk.is_writable.set()
        (await desk.read())()
        assert desk.done == [wake, order("w1")] and desk.written == [ENTRY]

    asyncio.run(act())


def test_an_entry_that_cannot_be_written_ends_the_run_and_nothing_follows() -> None:
    async def act() -> None:
        desk = Desk()

        def refuse(_entries: Sequence[inputs.JournalEntry]) -> None:
            raise RunDirError("the journal cannot be written")

        held = HeldActions(desk.waiting.put_nowait, desk.done.append, desk.ended, refuse)
        held.append([ENTRY])
        held.do(order("w1"))
        async with asyncio.timeout(30):
            with pytest.raises(RunDirError):
                await desk.ended
        assert desk.done == [] and desk.waiting.empty()

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
        desk.waiting.get_nowait()()
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
            desk.waiting.get_nowait()()
            assert desk.done == [END]
            desk.ended.set_result(END)  # as the shell does
        async with asyncio.timeout(30):
            if answers:
                assert await desk.ended is END
                return
            with pytest.raises(StorageError, match=r"\(done\).*has not answered for 0\.05 s"):
                await desk.ended

    asyncio.run(act())
