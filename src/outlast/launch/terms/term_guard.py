"""Right of a process to act as the controller of its term.

A *round* writes a record of successors, if they have changed, and the beat, if it is due, and then
looks for the next term. Whatever a controller
cannot take back waits for a round that began later and found none: what was made durable before the
round is then read by any later controller. While the controller hears none of its other nodes, its
beat stands still, so that one of them may create the next term.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from outlast.errors import OutlastError
from outlast.launch.terms.term_records import (
    SuccessorRecord,
    TermBeat,
    TermLedger,
    TermRecord,
)

BEATS = 8  # in a lease
RETRY_S = 0.2


class TermAgents(Protocol):
    """Agents of a term, as its owner knows them."""

    def is_alone(self) -> bool:
        """Return whether the owner hears none of its other nodes."""
        ...

    def next_successors(self) -> SuccessorRecord | None:
        """Return the record of successors to be written; None if the newest one holds."""
        ...

    def on_recorded(self, record: SuccessorRecord) -> None:
        """Note that a record is in the store, and that no newer term existed after that."""


class TermGuard:
    """Beat and reads of one term's owner. `on_deposed` is called once, with the newer term."""

    def __init__(
        self,
        ledger: TermLedger,
        term: int,
        address: tuple[str, int],
        lease_s: float,
        on_deposed: Callable[[TermRecord], None],
        note: Callable[[str], None],
        meeting: tuple[str, int] | None = None,
    ) -> None:
        self._ledger, self._term = ledger, term
        self._address, self._meeting = address, meeting
        self._period_s = lease_s / BEATS
        self._on_deposed, self._note = on_deposed, note
        self.before_read: Callable[[], None] = lambda: None  # first part of each round
        self._count = 0
        self._due_s = time.monotonic()
        self._waiting: list[Callable[[], None]] = []
        self._wanted = asyncio.Event()
        self._is_away = self._was_alone = False

    def confirm(self, then: Callable[[], None]) -> None:
        """Call `then` in the event loop after a round that begins from now on."""
        self._waiting.append(then)
        self._wanted.set()

    async def run(self, agents: TermAgents) -> None:
        """Do rounds until a newer term is found, or cancelled; an outage of the store is waited
        out."""
        while True:
            rest_s = max(0.0, self._due_s - time.monotonic())
            await asyncio.wait(
                {wanted := asyncio.ensure_future(self._wanted.wait())}, timeout=rest_s
            )
            wanted.cancel()
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            record = agents.next_successors()
            try:
                newer = await asyncio.to_thread(self._round, self._may_beat(agents), record)
            except OutlastError as error:
                self._waiting = waiting + self._waiting
                self._wanted.set()  # not only when the next beat is due
                self._note_outage(str(error))
                await asyncio.sleep(RETRY_S)
                continue
            self._note_outage("")
            if newer is not None:
                self._on_deposed(newer)
                return
            if record is not None:
                agents.on_recorded(record)
            for then in waiting:
                then()

    async def end(self, outcome: str, exit_code: int, cause: str) -> None:
        """Leave the end of the run in the store, for agents that are away. Raises OutlastError."""
        beat = self._next_beat(outcome=outcome, exit_code=exit_code, cause=cause)
        await asyncio.to_thread(self.before_read)
        await asyncio.to_thread(self._ledger.beat, self._term, beat)

    def _may_beat(self, agents: TermAgents) -> bool:
        if self._was_alone != (is_alone := agents.is_alone()):
            self._was_alone = is_alone
            self._note(
                "this controller hears none of its other nodes: its beat stands still, so that one"
                " of them can take over"
                if is_alone
                else "this controller's beat goes on"
            )
        return not is_alone

    def _round(self, may_beat: bool, record: SuccessorRecord | None) -> TermRecord | None:
        self.before_read()
        if record is not None:
            self._ledger.record_successors(record)
        now_s = time.monotonic()
        if now_s >= self._due_s:
            if may_beat:
                self._ledger.beat(self._term, self._next_beat())
            self._due_s = now_s + self._period_s
        return self._ledger.read(self._term + 1)

    def _next_beat(self, outcome: str = "", exit_code: int = 0, cause: str = "") -> TermBeat:
        self._count += 1
        return TermBeat(
            count=self._count,
            address=self._address,
            meeting=self._meeting,
            outcome=outcome,
            exit_code=exit_code,
            cause=cause,
        )

    def _note_outage(self, why: str) -> None:
        if bool(why) != self._is_away:
            self._is_away = bool(why)
            self._note(
                f"the store of terms is out of reach ({why}); training goes on, decisions wait"
                if why
                else "the store of terms answers again"
            )
