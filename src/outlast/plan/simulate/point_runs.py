"""Runs of many sweep points, whose parts take turns in one queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import closing

import numpy as np
from msgspec.structs import replace

from outlast.plan.answers.parameter_sweep import PointRuns, SweepPoint
from outlast.plan.model.strategy_prediction import Prediction
from outlast.plan.simulate.part_executors import IN_FLIGHT
from outlast.plan.simulate.replications import ReplicationPart, parts, reason, results
from outlast.plan.simulate.scenario_job import bound_failures, job_of
from outlast.plan.simulate.simulation_kernel import TALLIES
from outlast.plan.simulate.tallies import StreamingSummary, tally, usd_per_s


class _Sums:
    """Sums over the runs at one point so far."""

    def __init__(self, point: SweepPoint, theory: Prediction) -> None:
        self.point, self.theory = point, theory
        self.job = bound_failures(job_of(point.scenario, point.strategy), theory)
        self.failed = ""
        self._wall, self._goodput, self._failures = (
            StreamingSummary(),
            StreamingSummary(),
            StreamingSummary(),
        )
        self._totals = np.zeros(len(TALLIES))

    def add(self, rows: np.ndarray) -> None:
        self._wall.add(rows["wall_s"])
        self._goodput.add(self.job.work_s / rows["wall_s"])
        self._failures.add(rows["failures"])
        self._totals += [rows[name].sum() for name in TALLIES]

    def runs(self) -> PointRuns | None:
        many = self._wall.count
        if not many:
            return None
        usd = usd_per_s(self.point.scenario, self.theory.spares)
        goodput = tally("goodput", "share", self._goodput)
        return PointRuns(
            replications=many,
            unfinished=self._wall.endless,
            takes=tally("takes", "s", self._wall, self.theory.wall_s),
            goodput=replace(goodput, predicted=self.theory.outcome.goodput),
            costs=tally("costs", "USD", self._wall, self.theory.usd, times=usd),
            failures=tally("failures", "times", self._failures),
            means=dict(zip(TALLIES, (self._totals / many).tolist(), strict=True)),
        )


def simulate_points(
    wanted: Mapping[int, tuple[SweepPoint, Prediction]],
    replications: int,
    *,
    seed: int,
    executor: Executor | None,
    in_flight: int | None,
    on_progress: Callable[[int, int], None],
) -> dict[int, tuple[PointRuns | None, str]]:
    """Return the runs and the error, if any, of each point by its number."""
    sums = {at: _Sums(*one) for at, one in wanted.items()}
    done, whole = 0, replications * len(sums)
    queue = _by_turns(sums, replications, seed)
    with closing(results(queue, executor, in_flight or IN_FLIGHT)) as found:
        for at, part, rows in found:
            if isinstance(rows, Exception):
                sums[at].failed = f"{reason(rows)}; what was simulated before is kept"
            elif not sums[at].failed:
                sums[at].add(rows)
            done += part.count
            on_progress(done, whole)
    return {at: (one.runs(), one.failed) for at, one in sums.items()}


def _by_turns(
    sums: Mapping[int, _Sums], replications: int, seed: int
) -> Iterator[tuple[int, ReplicationPart]]:
    """Yield a part of each point in turn, skipping points that have failed."""
    waiting = deque((at, parts(one.job, replications, seed)) for at, one in sums.items())
    while waiting:
        at, rest = waiting.popleft()
        part = None if sums[at].failed else next(rest, None)
        if part is not None:
            yield at, part
            waiting.append((at, rest))
