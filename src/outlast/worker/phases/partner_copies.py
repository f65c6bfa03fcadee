"""Exchange of the ranks' own state with partners on other hosts, which outlives a host.

Each message is one all-gather among the partners. Messages are in the same order on all of them,
since phases and votes are:

| stage   | when                                  | waits      | slots                            |
|---------|---------------------------------------|------------|----------------------------------|
| carried | while a generation connects           | at once    | before:n, after:n, result:n      |
| before  | at the start of an attempt            | until vote | before:n                         |
| voted   | before the vote of phase n+1          | at once    | after:n+1                        |
| ended   | at the end of phase n+1               | until vote | result:n+1, a late after:n+1     |

A rank votes yes only with its partners' state of the phase: if the phase is committed, a host that
is lost has the state of its ranks on another one. All messages of a generation have one size, which
the partners raise together when one of them needs more: each then sends its message once more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import distributed as dist

from outlast.errors import GroupError
from outlast.transport import partner_memory
from outlast.transport.partner_memory import RECORD_BYTES, PartnerMemory, Slots, Stage
from outlast.transport.worker_page import Page
from outlast.worker.groups import GroupRegistry

FIRST_BYTES = 32 << 10


class _Sent(NamedTuple):
    """A message under way."""

    work: dist.Work
    stage: Stage
    n: int
    message: bytes
    landed: tuple[memoryview, ...]  # of the partners, in the order of their seats


class PartnerCopies:
    """Messages of one rank to its partners, and the memory for theirs."""

    def __init__(self, groups: GroupRegistry, page: Page) -> None:
        self._groups = groups
        self._memory = PartnerMemory(page)
        self._seats: tuple[int, ...] = ()  # of this generation, this rank's own among them
        self._generation = 0
        self._count = 0
        self._capacity = FIRST_BYTES
        self._pending: list[_Sent] = []

    def __bool__(self) -> bool:
        """Return whether this rank has partners in this generation."""
        return bool(self._seats)

    def connect(self, generation: int, seats: tuple[int, ...], n: int, carried: Slots) -> None:
        """Exchange the slots before phase n+1 with the partners of a generation, if there are any.

        Raises GroupError.
        """
        self._seats, self._generation = seats, generation
        self._pending.clear()
        if seats:
            self._capacity = FIRST_BYTES
            self._memory.begin(len(seats) - 1, self._capacity)
            self.exchange("carried", n, carried)

    def opened(self) -> None:
        """Keep the state that this generation has exchanged while the next one connects."""
        if self._seats:
            self._memory.opened()

    def start(self, stage: Stage, n: int, slots: Slots) -> None:
        """Send slots to the partners; `exchange` waits for the end."""
        if not self._seats or not self._groups.live:
            return
        try:
            self._send(stage, n, self._pack(slots))
        except (GroupError, RuntimeError) as error:
            if not self._groups.failed(error):
                raise

    def exchange(self, stage: Stage, n: int, slots: Slots) -> None:
        """Send slots to the partners, and wait for all that they have sent. Raises GroupError."""
        if not self._seats:
            return
        self._send(stage, n, self._pack(slots))
        pending, self._pending = self._pending, []
        for sent in pending:
            self._groups.controls().await_share(sent.work)
        # Attempts of one phase have sent the same slots to the same memory.
        for sent in {(one.stage, one.n): one for one in pending}.values():
            self._finish(sent)

    def _pack(self, slots: Slots) -> bytes:
        self._count += 1
        return partner_memory.pack(self._groups.seat, self._generation, self._count, slots)

    def _send(self, stage: Stage, n: int, message: bytes) -> None:
        data = (
            message if len(message) <= self._capacity else partner_memory.without_payload(message)
        )
        mine = torch.zeros(self._capacity, dtype=torch.uint8, device="cpu")
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        landed = tuple(
            self._memory.landing(place, stage, n, self._capacity)
            for place in range(len(self._seats) - 1)
        )
        outputs = [torch.frombuffer(memory, dtype=torch.uint8) for memory in landed]
        outputs.insert(self._seats.index(self._groups.seat), torch.zeros_like(mine))
        work = self._groups.controls().share(mine, outputs)
        self._pending.append(_Sent(work, stage, n, message, landed))

    def _finish(self, sent: _Sent) -> None:
        """Check an ended message; repeat it if one of the partners needed more room."""
        most = self._needed(sent)
        if most <= len(sent.landed[0]):
            return
        if most > self._capacity:
            self._capacity = min(1 << (most - 1).bit_length(), RECORD_BYTES)
            self._memory.reserve(len(sent.landed), self._capacity)
        self._send(sent.stage, sent.n, sent.message)
        again = self._pending.pop()
        self._groups.controls().await_share(again.work)
        self._needed(again)

    def _needed(self, sent: _Sent) -> int:
        """Return the most bytes that a message of the partners needs. Raises GroupError."""
        others = [seat for seat in self._seats if seat != self._groups.seat]
        most = len(sent.message)
        for seat, memory in zip(others, sent.landed, strict=True):
            need = partner_memory.needed(memory, seat, self._generation)
            if not 0 < need <= RECORD_BYTES:
                raise GroupError(
                    f"the own state of rank {seat} did not arrive whole ({sent.stage})"
                )
            most = max(most, need)
        return most
