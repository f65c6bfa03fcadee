"""Watch of an agent over the terms of its run, while its controller is silent.

silence ── a quarter of the lease ──► read the newest term and its beat, by this host's clock
  newer term with a beat ──────────► its controller is to be followed
  a beat with the end of the run ──► the run is over
  the beat stands still for a quarter, silence for a half ──► create the next term
  the same, without a lease, the beat for a whole lease ────► create it, if the term's owner had
                                                              not struck this host off before
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from outlast.errors import OutlastError
from outlast.launch.terms.term_records import (
    SuccessorRecord,
    TermBeat,
    TermLedger,
    TermRecord,
)

LOOKS = 16  # in a lease
STILL = 0.25  # share of the lease
UNLEASED_STILL = 1.0  # share of the lease: agents that have one come first
ORDERED = 0.1  # share of the lease in which the agents try, by node rank


class WatchedLease(Protocol):
    """Lease of the agent, as the watch reads it."""

    lease_s: float

    @property
    def unheard_s(self) -> float:
        """Return for how long no answer was received."""
        ...

    @property
    def may_claim(self) -> bool:
        """Return whether its agent may create a term."""
        ...

    @property
    def may_succeed(self) -> bool:
        """Return whether its agent may create a term as a successor."""
        ...

    def saw_newer_term(self) -> None:
        """Record that a newer term exists."""


class TermNews(NamedTuple):
    """Newest term. `beat`: its owner's, or None if this process owns it, and takes it over from the
    owner on host `before`. `successors`: hosts that could have done so without a lease."""

    term: int
    host: str
    beat: TermBeat | None
    before: str = ""
    successors: tuple[str, ...] = ()


class TermWatch:
    """Watch of one agent. `order`: its node rank as a share of all nodes, from 0 to 1."""

    def __init__(
        self,
        ledger: TermLedger,
        record: TermRecord,
        lease: WatchedLease,
        order: float,
        note: Callable[[str], None],
    ) -> None:
        """`record`: the term that the agent is in, with this host and a random claim."""
        self._ledger, self._record, self._lease = ledger, record, lease
        self._term = record.term
        self._order_s = order * ORDERED * lease.lease_s
        self._note = note
        self._newest: tuple[int, TermBeat | None] = (-1, None)
        self._since_s = 0.0  # when that was first seen
        self._steady_s = 0.0  # since when no read of the store has failed
        self._is_away = False
        self._search: asyncio.Task[TermNews] | None = None

    async def wait(self, timeout_s: float) -> TermNews | None:
        """Return the next news, or None after `timeout_s`. The search goes on meanwhile: cut off,
        it could create a term that nobody uses."""
        self._search = self._search or asyncio.create_task(self._news())
        await asyncio.wait({self._search}, timeout=timeout_s)
        if not self._search.done():
            return None
        found, self._search = self._search.result(), None
        return found

    def close(self) -> None:
        """End the search."""
        if self._search:
            self._search.cancel()

    async def _news(self) -> TermNews:
        """Return the next newer term that has a controller, or this term with the run's end."""
        lease = self._lease
        while True:
            await asyncio.sleep(lease.lease_s / LOOKS)
            if lease.unheard_s < lease.lease_s / 4:
                self._newest = (-1, None)
                self._steady_s = time.monotonic()
                continue
            try:
                found = await self._look()
            except OutlastError as error:
                self._note_outage(str(error))
                self._steady_s = time.monotonic()
            else:
                self._note_outage("")
                if found:
                    self._term = found.term
                    return found

    async def _look(self) -> TermNews | None:
        newest = await asyncio.to_thread(self._ledger.newest, self._term)
        if newest is not None:
            self._lease.saw_newer_term()
        term = newest.term if newest else self._term
        beat = await asyncio.to_thread(self._ledger.read_beat, term)
        if beat is not None and (newest or beat.outcome):
            return TermNews(term, newest.host if newest else "", beat)
        if (term, beat) != self._newest:
            self._newest, self._since_s = (term, beat), time.monotonic()
        elif self._may_claim():
            await asyncio.sleep(self._order_s)
            return await self._claim(term + 1, None) if self._may_claim() else None
        elif self._may_succeed():
            return await self._succeed(term)
        return None

    async def _succeed(self, term: int) -> TermNews | None:
        """Create the next term without a lease, if the newest record lets this host do so."""
        record = await asyncio.to_thread(self._ledger.successors, term, self._term)
        if record is None or (record.hosts and self._record.host not in record.hosts):
            return None
        await asyncio.sleep(self._order_s)
        return await self._claim(term + 1, record) if self._may_succeed() else None

    async def _host_of(self, term: int) -> str:
        """Return the host of a term's owner, for people; "" if the store does not tell."""
        try:
            record = await asyncio.to_thread(self._ledger.read, term)
        except OutlastError:
            return ""
        return record.host if record else ""

    def _may_claim(self) -> bool:
        is_still = time.monotonic() - self._since_s >= STILL * self._lease.lease_s
        return is_still and self._lease.may_claim

    def _may_succeed(self) -> bool:
        since_s = max(self._since_s, self._steady_s)
        is_still = time.monotonic() - since_s >= UNLEASED_STILL * self._lease.lease_s
        return is_still and self._lease.may_succeed

    async def _may_act(self, term: int, before: SuccessorRecord | None) -> bool:
        """Return whether this process may act as the owner of a term that it has created. A record
        that is newer than `before` says that its writer may have renewed leases meanwhile."""
        if before is None:
            return self._may_claim()
        record = await asyncio.to_thread(self._ledger.successors, term - 1, before.term)
        return record == before and self._lease.may_succeed

    async def _claim(self, term: int, record: SuccessorRecord | None) -> TermNews | None:
        """Create a term; return it if this process owns it and may still act. `record`: by which it
        may do so without a lease."""
        claimed = TermRecord(
            term=term,
            run=self._record.run,
            host=self._record.host,
            claim=secrets.token_hex(16),
        )
        before = await self._host_of(term - 1) or "another host"
        known = record or await asyncio.to_thread(self._ledger.successors, term - 1, self._term)
        if not await asyncio.to_thread(self._ledger.claim, claimed):
            return None
        # Stopped meanwhile, or answered: leases may have been granted.
        if not await self._may_act(term, record):
            self._note(f"term {term} was created too late by this node, which does not use it")
            return None
        return TermNews(term, claimed.host, None, before, known.hosts if known else ())

    def _note_outage(self, why: str) -> None:
        if bool(why) != self._is_away:
            self._is_away = bool(why)
            if why:
                self._note(
                    f"the store of terms cannot be reached while the controller is silent: {why}"
                )
