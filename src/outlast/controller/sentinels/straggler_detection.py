"""Detection of slow ranks from the own times of all ranks.

`observe(record, row, kinds)` takes one row: of each rank the mean own time of the same few steps
(worker/sentinels/own_time.py). Ranks are compared with their peers, the ranks of the same kind:
stages of a pipeline differ by design. The *excess* of a rank is its own time over the median of its
peers, less 1.

    excess > SLACK     the rank is suspected: each row counts for or against it (a bounded CUSUM)
    suspected          over its newest 8, 16, 32 or 48 rows: the median excess is large against its
                       noise, against what its peers differ from each other, and in most rows
                       -> it is slow, since the row that divides its series best
    rows without it    the CUSUM falls to 0: no longer suspected, or slow

Noise raises the number of rows that it takes; single slow steps (a garbage collection, a save) and
ranks that take turns do not count up. A step whose rest has grown, while no rank's own time has, is
slow in its collectives: the same test runs on that rest, and names no rank.

Cost of a row of N ranks: O(N) and one sort of each kind. Memory: O(N), with few numbers a rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from outlast.controller.state_parts import StatePart

SLACK = 0.05  # excess that is not counted
EXCESS_MIN = 0.10  # smallest one that is reported
SPREADS = 3.0  # lasting differences between peers that it exceeds
Z_MIN = 6.0  # standard errors
SHARE_MIN = 0.8  # of the rows, in which it shows
STEP_PART_MIN = 0.03  # of a step
LOST_MIN_S = 0.25  # that all ranks have waited
STEPS_MIN = 12  # with the excess
WARM_STEPS = 8  # of a generation, not judged
WINDOWS = (8, 16, 32, 48)  # rows
_ROWS_MIN = 6
_SCORE_MAX = 16.0
_NOISE_MIN = 0.02
SUSPECTS_MAX = 512
WITNESSES_MAX = 64  # of a kind, whose lasting differences are measured
_WITNESS_PART = 1 / 16
_REST_PART = 1 / 128
_QUARTILE = 0.6745  # of a normal distribution, in standard deviations
_DEVIATION = 1 / (_QUARTILE * math.sqrt(2))  # of its values, by the median of their changes
_REST_ROWS = 16  # of the first value
REST = -1  # in place of a rank: the part of a step that is no rank's own
_TOPS = 64  # rows


class RankTime(NamedTuple):
    """Mean times of a rank in one row, in seconds a step."""

    own_s: float
    before_s: float = 0.0  # of that, before the phase: the script's own code, loading data


class StepRow(NamedTuple):
    """Times of all ranks over `steps` steps, the last of which is `step`."""

    step: int
    steps: int
    step_s: float
    ranks: Mapping[int, RankTime]


class SuspectRow(NamedTuple):
    """One row of a suspected rank."""

    step: int  # the first one of the row
    steps: int
    excess: float
    lost_s: float  # that all ranks waited for it, beyond the next slower one
    own_s: float
    peers_s: float
    before_s: float  # above that of the peers


class SuspectedRank(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence against one rank, or against the REST of the step."""

    score: float = 0.0
    rows: tuple[SuspectRow, ...] = ()
    is_slow: bool = False
    since: int = 0  # step from which it is slow
    excess: float = 0.0  # median, since then
    z: float = 0.0  # of that, in standard errors
    lost_s: float = 0.0  # that all ranks have waited for it since then
    own_s: float = 0.0
    peers_s: float = 0.0
    is_before: bool = False  # most of the excess lies before the phase

    @property
    def confidence(self) -> float:
        """Return the probability that noise alone would not look like this."""
        return min(0.9999, 0.5 * (1 + math.erf(self.z / math.sqrt(2))))


class SpreadRecord(StatePart, kw_only=True):
    """Usual differences between ranks, and lengths of steps."""

    excess: dict[int, float] = msgspec.field(default_factory=dict)  # of witnesses, decaying mean
    newest: dict[int, float] = msgspec.field(default_factory=dict)  # against peers, in the last row
    noise: float = 0.0  # of the excess from row to row, as a standard deviation
    rest_s: float = 0.0  # of a step that is no rank's own, as a rule
    step_s: float = 0.0
    rest_first: tuple[tuple[float, float], ...] = ()  # until there are _REST_ROWS
    tops: tuple[int, ...] = ()  # slowest ranks of the newest rows without a slow rank
    uneven_s: float = 0.0  # waits of the others for the slowest rank in such rows
    total_s: float = 0.0  # length of such rows


class StragglerRecord(StatePart, kw_only=True):
    """Memory of the detector in one generation."""

    begun: int = 0  # step of the first row
    suspects: dict[int, SuspectedRank] = msgspec.field(default_factory=dict)
    spread: SpreadRecord = msgspec.field(default_factory=SpreadRecord)

    @property
    def slow(self) -> dict[int, SuspectedRank]:
        """Return the slow ranks, or REST."""
        return {rank: one for rank, one in self.suspects.items() if one.is_slow}


def observe(record: StragglerRecord, row: StepRow, kinds: Sequence[Sequence[int]]) -> None:
    """Take a row into the record. `kinds`: ranks that do the same work."""
    first = row.step - row.steps + 1
    record.begun = record.begun or first
    if first < record.begun + WARM_STEPS:
        return
    was_slow = record.slow.keys() - {REST}
    for ranks in kinds:
        _observe_kind(record, row, [rank for rank in ranks if rank in row.ranks])
    _observe_rest(record, row)
    _observe_evenness(record.spread, row, was_slow)
    _bound(record)


def _observe_kind(record: StragglerRecord, row: StepRow, ranks: Sequence[int]) -> None:
    if len(ranks) < 2:  # a rank without peers is not judged
        return
    own = {rank: row.ranks[rank].own_s for rank in ranks}
    ordered = sorted(own.values())
    middle_s = _median(ordered)
    _observe_witnesses(record.spread, own, ordered)
    limit_s = (1 + SLACK) * middle_s
    others_s = max(
        (s for rank, s in own.items() if not record.suspects.get(rank, _NOBODY).is_slow),
        default=middle_s,
    )
    before_s: float | None = None
    for rank, own_s in own.items():
        if own_s <= limit_s and rank not in record.suspects:
            continue
        peers_s, excess = _against_peers(ordered, own_s, middle_s)
        if excess <= SLACK and rank not in record.suspects:
            continue
        if before_s is None:
            before_s = median(row.ranks[one].before_s for one in ranks)
        second_s = _next_below(ordered, own_s) if own_s >= others_s else own_s
        now = SuspectRow(
            step=row.step - row.steps + 1,
            steps=row.steps,
            excess=excess,
            lost_s=row.steps * max(0.0, own_s - max(second_s, peers_s)),
            own_s=own_s,
            peers_s=peers_s,
            before_s=row.ranks[rank].before_s - before_s,
        )
        _count(record, rank, now, row.step_s)


_NOBODY = SuspectedRank()


def _median(ordered: Sequence[float], first: int = 0, end: int | None = None) -> float:
    """Return the median of a sorted sequence, or of its part from `first` to `end`."""
    count = (len(ordered) if end is None else end) - first
    half = first + count // 2
    return ordered[half] if count % 2 else (ordered[half - 1] + ordered[half]) / 2


def _against_peers(ordered: Sequence[float], own_s: float, middle_s: float) -> tuple[float, float]:
    """Return the median of all but one rank's own time, and its excess over that."""
    count = len(ordered)
    # Without any one of the upper half, the median is that without the largest one.
    peers_s = _median(ordered, 0, count - 1) if own_s > middle_s else _median(ordered, 1)
    return peers_s, own_s / peers_s - 1 if peers_s else 0.0


def _next_below(ordered: Sequence[float], value: float) -> float:
    return next((one for one in reversed(ordered) if one < value), value)


def _observe_witnesses(
    spread: SpreadRecord, own: Mapping[int, float], ordered: Sequence[float]
) -> None:
    """Follow the excess of some ranks over many rows. Its noise is that against peers, as suspects
    have it: of two ranks, whose median is their mean, the other would be half as large."""
    ranks = tuple(own)
    stride = -(-len(ranks) // WITNESSES_MAX)
    middle_s = _median(ordered)
    changes: list[float] = []
    for rank in ranks[::stride]:
        excess = own[rank] / middle_s - 1 if middle_s else 0.0
        known = spread.excess.get(rank, excess)
        spread.excess[rank] = known + _WITNESS_PART * (excess - known)
        excess = _against_peers(ordered, own[rank], middle_s)[1]
        changes.append(abs(excess - spread.newest.get(rank, excess)))
        spread.newest[rank] = excess
    noise = median(changes) * _DEVIATION
    spread.noise += _WITNESS_PART * (noise - spread.noise)


def _lasting_spread(spread: SpreadRecord, rank: int) -> float:
    """Return by how much the lower half of the witnesses differ, as a standard deviation."""
    found = sorted(excess for one, excess in spread.excess.items() if one != rank)
    if len(found) < 2:  # one witness differs from nobody
        return 0.0
    return (_median(found) - found[len(found) // 4]) / _QUARTILE


def _count(record: StragglerRecord, rank: int, now: SuspectRow, step_s: float) -> None:
    """Count a row for or against a rank."""
    known = record.suspects.get(rank, _NOBODY)
    score = known.score + min(1.0, max(-1.0, (now.excess - SLACK) / SLACK))
    if score <= 0:
        record.suspects.pop(rank, None)
        return
    rows = (*known.rows, now)[-WINDOWS[-1] :]
    one = replace(known, score=min(score, _SCORE_MAX), rows=rows)
    if one.is_slow:
        one = _follow(one, now)
    elif score >= _ROWS_MIN:
        needed = max(EXCESS_MIN, SPREADS * _lasting_spread(record.spread, rank))
        one = _judged(one, needed, record.spread.noise, step_s)
    record.suspects[rank] = one


def _follow(one: SuspectedRank, now: SuspectRow) -> SuspectedRank:
    newest = one.rows[-WINDOWS[1] :]
    return replace(
        one,
        lost_s=one.lost_s + now.lost_s,
        excess=median(row.excess for row in newest),
        own_s=median(row.own_s for row in newest),
        peers_s=median(row.peers_s for row in newest),
    )


def _judged(one: SuspectedRank, needed: float, noise: float, step_s: float) -> SuspectedRank:
    """Return the suspect, slow if some of its newest rows show it."""
    for width in WINDOWS:
        rows = one.rows[-width:]
        z = _significance(rows, needed, noise, step_s)
        if z >= Z_MIN:
            return _slow(one, z)
        if len(rows) < width:
            break
    return one


def _significance(rows: Sequence[SuspectRow], needed: float, noise: float, step_s: float) -> float:
    """Return how many standard errors the excess is above SLACK; 0 where it does not matter.
    `noise`: of all ranks."""
    if len(rows) < _ROWS_MIN or sum(row.steps for row in rows) < STEPS_MIN:
        return 0.0
    excess = [row.excess for row in rows]
    middle = median(excess)
    own_s = median(row.own_s - row.peers_s for row in rows)
    if middle < needed or own_s < STEP_PART_MIN * step_s:
        return 0.0
    if sum(row.steps * (row.own_s - row.peers_s) for row in rows) < LOST_MIN_S:
        return 0.0
    if sum(one > SLACK for one in excess) < SHARE_MIN * len(rows):
        return 0.0
    changes = [abs(b - a) for a, b in pairwise(excess)]
    noise = max(_NOISE_MIN, noise, median(changes) * _DEVIATION)
    return (middle - SLACK) * math.sqrt(len(rows)) / noise


def _slow(one: SuspectedRank, z: float) -> SuspectedRank:
    """Return the suspect as slow, since the row that divides its series best."""
    middle = median(row.excess for row in one.rows[-_ROWS_MIN:])
    best, total, first = 0.0, 0.0, len(one.rows) - _ROWS_MIN
    for at in reversed(range(len(one.rows))):
        total += min(one.rows[at].excess, 2 * middle) - middle / 2
        if total > best:
            best, first = total, at
    rows = one.rows[first:]
    before_s = median(row.before_s for row in rows)
    own_s, peers_s = (median(row.own_s for row in rows), median(row.peers_s for row in rows))
    return replace(
        one,
        is_slow=True,
        since=rows[0].step,
        excess=median(row.excess for row in rows),
        z=z,
        lost_s=sum(row.lost_s for row in rows),
        own_s=own_s,
        peers_s=peers_s,
        is_before=before_s > (own_s - peers_s) / 2,
    )


def _observe_rest(record: StragglerRecord, row: StepRow) -> None:
    """Count a row for or against the part of a step that is no rank's own."""
    spread = record.spread
    rest_s = max(0.0, row.step_s - max((one.own_s for one in row.ranks.values()), default=0.0))
    if len(spread.rest_first) < _REST_ROWS:
        spread.rest_first = (*spread.rest_first, (rest_s, row.step_s))
        spread.rest_s = median(rest for rest, _ in spread.rest_first)
        spread.step_s = median(step for _, step in spread.rest_first)
        return
    excess = (rest_s - spread.rest_s) / spread.step_s if spread.step_s else 0.0
    if excess > SLACK or REST in record.suspects:
        lost_s = row.steps * max(0.0, rest_s - spread.rest_s)
        first = row.step - row.steps + 1
        now = SuspectRow(first, row.steps, excess, lost_s, rest_s, spread.rest_s, 0.0)
        _count(record, REST, now, row.step_s)
    if REST not in record.suspects:
        spread.rest_s += _REST_PART * (rest_s - spread.rest_s)
        spread.step_s += _REST_PART * (row.step_s - spread.step_s)


def _observe_evenness(spread: SpreadRecord, row: StepRow, slow: set[int]) -> None:
    """Add what the others wait for the slowest rank, while none is slow for long."""
    if slow or len(row.ranks) < 2:  # one rank waits for nobody
        return
    top = max(row.ranks, key=lambda rank: row.ranks[rank].own_s)
    middle_s = median(one.own_s for one in row.ranks.values())
    spread.tops = (*spread.tops, top)[-_TOPS:]
    spread.uneven_s += row.steps * (row.ranks[top].own_s - middle_s)
    spread.total_s += row.steps * row.step_s


def _bound(record: StragglerRecord) -> None:
    """Drop the weakest suspects where there are too many."""
    if len(record.suspects) > SUSPECTS_MAX:
        weights = {
            rank: sum(row.excess for row in one.rows) for rank, one in record.suspects.items()
        }
        for rank in sorted(weights, key=lambda rank: -weights[rank])[SUSPECTS_MAX:]:
            del record.suspects[rank]
