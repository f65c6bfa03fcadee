"""Pages of this host that may hold the own state of lost ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from outlast.transport import messages
from outlast.transport.partner_memory import newest_slots, read_records
from outlast.transport.worker_page import KINDS, Page


class HasPage(Protocol):
    """A live worker."""

    page: Page


class PartnerPages:
    """Pages of the last `kept` reaped workers, which hold the state of their partners."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._pages: deque[Page] = deque()

    def keep(self, page: Page) -> None:
        """Keep the page of a reaped worker; close the oldest one beyond the limit."""
        self._pages.append(page)
        while len(self._pages) > self._kept:
            self._pages.popleft().close()

    def answer(
        self, body: messages.PartnerSlotsRequest, live: Iterable[HasPage]
    ) -> messages.PartnerSlots:
        """Return what these pages and those of live workers hold of lost ranks."""
        pages = [*self._pages, *(worker.page for worker in live)]
        records = [one for page in pages for one in read_records(page.fd, page.end, body.seats)]
        keys = {f"{kind}:{body.n}" for kind in KINDS}
        slots = newest_slots(records, keys, body.since)
        return messages.PartnerSlots(n=body.n, since=body.since, slots=slots)
