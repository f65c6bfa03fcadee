"""Phases that were committed and then rolled back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outlast.telemetry.history.event_columns import PhaseColumns


def undone_phases(
    phases: PhaseColumns, first: int, opened: Sequence[tuple[int, int]]
) -> NDArray[np.bool_]:
    """Return which phases were undone: a generation that opens at n undoes every later phase that
    its seat has done before.

    `first`: the first phase that counts. `opened`: of each generation, in order, how many phases
    there were before it, and its n.
    """
    is_undone = np.zeros(len(phases.t_ns), np.bool_)
    if first == len(is_undone):
        return is_undone
    order = np.argsort(phases.seat[first:], kind="stable") + first
    seat, n = phases.seat[order], phases.n[order]
    is_begin = np.ones(len(seat), np.bool_)
    is_begin[1:] = seat[1:] != seat[:-1]
    begins = np.flatnonzero(is_begin)  # of each seat's phases
    lane = np.cumsum(is_begin) - 1
    places = lane * (len(is_undone) + 1) + order
    lanes = np.arange(len(begins)) * (len(is_undone) + 1)
    is_kept = np.ones(len(seat), np.bool_)
    known, newest = begins.copy(), begins - 1  # behind the last opening; the newest phase kept
    for before, opened_n in opened:
        until = np.searchsorted(places, lanes + before)
        newest = np.where(until > known, until - 1, newest)
        known = until
        has_phase = newest >= begins
        ahead = np.flatnonzero(has_phase & (n[np.maximum(newest, 0)] > opened_n))
        for each in ahead:
            begin, end = begins[each], newest[each] + 1
            kept = np.flatnonzero(is_kept[begin:end]) + begin
            staying = kept[n[kept] <= opened_n]
            newest[each] = staying[-1] if len(staying) else begin - 1
            is_kept[kept[kept > newest[each]]] = False
    is_undone[order] = ~is_kept
    return is_undone
