"""Synthetic own times of ranks: slow ranks, slow collectives, uneven work, and what looks alike.

The mix follows what was published: about 40 % of the jobs that were hit had slow communication and
few a slow rank (GREYHOUND, ATC '25); most differences between ranks are uneven work (ByteDance,
OSDI '25).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from outlast.controller.sentinels.straggler_detection import (
    REST,
    RankTime,
    StepRow,
    StragglerRecord,
    observe,
)

SeriesKind = Literal[
    "communication",  # the collectives of all ranks slow down
    "compute",  # one rank slows down, its machine
    "input",  # one rank slows down before its phase
    "uneven",  # the ranks' work differs from step to step
    "noise",
    "warm-up",  # one rank is slow in its first steps
    "pauses",  # garbage collections
    "saves",  # rank 0 is slow in steps that follow a save
    "trend",  # all ranks slow down over the whole series
    "epochs",  # the last step of an epoch is short, the first one long
]
SHARES: dict[SeriesKind, int] = {
    "communication": 40,
    "compute": 15,
    "input": 3,
    "uneven": 15,
    "noise": 7,
    "warm-up": 4,
    "pauses": 4,
    "saves": 4,
    "trend": 4,
    "epochs": 4,
}  # of 100
assert SHARES.keys() == set(get_args(SeriesKind))
STEPS = 400


class StragglerSeries(NamedTuple):
    """Rows of one job, and what a detector should find: `rank` (REST: collectives) from step
    `since` on; None: nothing."""

    kind: SeriesKind
    rank: int | None
    since: int
    factor: float
    world: int
    rows: list[StepRow]


def draw_mix(count: int, seed: int) -> Iterator[StragglerSeries]:
    """Yield `count` series of the published mix, in a drawn order."""
    dice = random.Random(seed)
    for number in range(count):
        kind = dice.choices(tuple(SHARES), tuple(SHARES.values()))[0]
        yield draw_series(kind, f"{seed}:{number}")


def draw_series(kind: SeriesKind, seed: str, steps: int = STEPS) -> StragglerSeries:
    """Return one series of a kind. Work, world, noise and the change are drawn."""
    dice = random.Random(f"{kind}:{seed}")
    world = dice.choice((2, 4, 4, 8, 16, 64))
    own_s, rest_s = dice.uniform(0.05, 1.0), dice.uniform(0.005, 0.3)
    noise = dice.uniform(0.01, 0.06)
    since = dice.randint(60, 200)
    rank = dice.randrange(world)
    factor = dice.uniform(1.25, 2.0)
    uneven = dice.uniform(0.1, 0.35)
    lasting = [1 + dice.gauss(0, 0.01) for _ in range(world)]
    rows = []
    for step in range(1, steps + 1):
        is_after = step >= since
        common = 1.0
        rest = rest_s * (1 + abs(dice.gauss(0, noise)))
        if kind == "trend":
            common = 1 + step / steps
        if kind == "epochs" and step % 50 < 2:  # the last step and the first one
            common = 0.4 if step % 50 == 0 else 1.5
        if kind == "communication" and is_after:
            rest += (factor - 1) * (own_s + rest_s)
        times = []
        for each in range(world):
            own = own_s * common * lasting[each] * (1 + dice.gauss(0, noise))
            before = 0.05 * own
            is_hit = each == rank
            if kind == "uneven":
                own *= max(0.3, 1 + dice.gauss(0, uneven))
            elif kind == "compute" and is_hit and is_after:
                own *= factor
            elif kind == "input" and is_hit and is_after:
                before += (factor - 1) * own
                own *= factor
            elif kind == "warm-up" and is_hit and step <= 6:  # of the first steps
                own *= 10 / step
            elif kind == "pauses" and dice.random() < 0.01:  # of all steps
                own += dice.uniform(0.1, 2.0) * own_s
            elif kind == "saves" and each == 0 and step % 40 < 3:  # behind a save
                own *= 1.6
            times.append(RankTime(max(own, 1e-6), before))
        step_s = max(one.own_s for one in times) + rest
        rows.append(StepRow(step, 1, step_s, dict(enumerate(times))))
    found = {"communication": REST, "compute": rank, "input": rank}.get(kind)
    return StragglerSeries(kind, found, since, factor, world, rows)


class SeriesVerdict(NamedTuple):
    """First finding of a detector in a series: rank, and the step after which it came."""

    rank: int | None
    step: int


def judge(series: StragglerSeries) -> tuple[SeriesVerdict, ...]:
    """Return what the detector finds, each rank once, in order."""
    record, kinds = StragglerRecord(), [tuple(range(series.world))]
    found: dict[int, int] = {}
    for row in series.rows:
        observe(record, row, kinds)
        for rank in record.slow:
            found.setdefault(rank, row.step)
    return tuple(SeriesVerdict(rank, step) for rank, step in found.items())


class DetectionScore(NamedTuple):
    """Counts over many series. A finding is right if it names what was made slow, afterwards."""

    right: int
    wrong: int
    missed: int
    delays: tuple[int, ...]  # steps from the change to the right finding

    @property
    def precision(self) -> float:
        """Return the share of findings that are right."""
        return self.right / max(1, self.right + self.wrong)

    @property
    def recall(self) -> float:
        """Return the share of what was made slow that was found."""
        return self.right / max(1, self.right + self.missed)


def score(many: Iterator[StragglerSeries], *, ranks_only: bool = False) -> DetectionScore:
    """Judge many series. `ranks_only`: without slow collectives, and findings of them."""
    right = wrong = missed = 0
    delays: list[int] = []
    for series in many:
        wanted = None if ranks_only and series.rank == REST else series.rank
        is_found = False
        for verdict in judge(series):
            if ranks_only and verdict.rank == REST:
                continue
            if verdict.rank == wanted and verdict.step >= series.since:
                is_found = True
                delays.append(verdict.step - series.since + 1)
            else:
                wrong += 1
        right += is_found
        missed += wanted is not None and not is_found
    return DetectionScore(right, wrong, missed, tuple(sorted(delays)))
