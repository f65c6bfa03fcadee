"""Account of a running launcher's time, which new phases extend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from outlast.events import (
    AnyEvent,
    AttemptRefused,
    Decided,
    GenerationClosed,
    GenerationOpened,
    RunEnded,
    RunStarted,
)
from outlast.telemetry.history.event_columns import newest_rows, rows
from outlast.telemetry.history.launcher_terms import absent_now
from outlast.telemetry.history.run_history import RunHistory
from outlast.telemetry.history.time_buckets import TimeAccount, TimeTotals
from outlast.telemetry.lane_columns import LaneColumns, empty_columns
from outlast.telemetry.time_accounting import account, account_since

ROWS_MAX = 128  # ranks are drawn together beyond as many
COLUMNS_MAX = 600
_DIVIDING = (
    RunStarted,
    RunEnded,
    GenerationOpened,
    GenerationClosed,
    Decided,
    AttemptRefused,
)


class DrawnAccount(NamedTuple):
    """Totals of a run's time, and the time of its ranks, or of groups of `group` ranks, as columns.

    `columns`: those of at most `ROWS_MAX` rows.
    """

    totals: TimeTotals
    columns: LaneColumns
    group: int


def drawn_account(times: TimeAccount, columns_max: int = COLUMNS_MAX) -> DrawnAccount:
    """Return the totals, and the time of ranks as at most `columns_max` columns."""
    group = max(1, -(-times.seats // ROWS_MAX))
    width_ns = max(1, -(-times.wall_ns // columns_max))
    empty = empty_columns(times.begin_ns, width_ns, -(-times.seats // group))
    columns = empty.extended(times.claims, times.seat // group, times.end_ns)
    return DrawnAccount(times.totals, columns, group)


class GrowingAccount:
    """Account of a run that is read on. It is computed as a whole where more than phases came."""

    def __init__(self) -> None:
        self._known: DrawnAccount | None = None
        self._state: tuple[bool, int] = (False, 0)
        self._phases = 0  # that ended before the account's end
        self._arrived = 0  # phases so far
        self._is_known = False  # each rank has a phase that ends at the account's end or later

    def read(self, history: RunHistory, *, running: bool) -> DrawnAccount:
        """Return the account of the history so far. Raises as `account` does."""
        state = (running, _dividing(history.events))
        known = self._known
        if known is None or state != self._state or not self._is_settled(known, history):
            known = None
        found = _extended(known, history) if running and known else None
        if found is None:
            found = drawn_account(account(history, running=running))
        self._known, self._state = found, state
        self._phases = history.phases_until(found.totals.end_ns)
        self._arrived = int(history.phases.arrival.max(initial=-1))
        ends_ns = np.append(history.phases.t_ns, 0)[newest_rows(history.phases, found.totals.seats)]
        present = np.setdiff1d(np.arange(found.totals.seats), absent_now(history.events))
        self._is_known = bool((ends_ns[present] >= found.totals.end_ns).all())
        return found

    def _is_settled(self, known: DrawnAccount, history: RunHistory) -> bool:
        """Return whether the new phases began behind the account's end."""
        before = history.phases_until(known.totals.end_ns)
        later = rows(history.phases, slice(before, None))
        is_new = later.arrival > self._arrived
        is_late = is_new & (later.begin_ns < known.totals.end_ns)
        return self._is_known and before == self._phases and not is_late.any()


def _extended(known: DrawnAccount, history: RunHistory) -> DrawnAccount | None:
    more = account_since(history, known.totals.end_ns)
    if more is None or more.seats != known.totals.seats:
        return None
    totals = TimeTotals(
        begin_ns=known.totals.begin_ns,
        end_ns=more.end_ns,
        seats=more.seats,
        totals_ns={name: ns + more.totals_ns[name] for name, ns in known.totals.totals_ns.items()},
    )
    drawn = known.columns.extended(more.claims, more.seat // known.group, more.end_ns)
    return DrawnAccount(totals, drawn.joined(COLUMNS_MAX), known.group)


def _dividing(events: Sequence[AnyEvent]) -> int:
    return sum(isinstance(event, _DIVIDING) for event in events)
