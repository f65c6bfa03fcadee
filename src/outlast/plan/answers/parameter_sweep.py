"""Sweep of one or two fields of a scenario: each point by theory and by runs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from outlast.errors import ConfigError, UsageError
from outlast.plan.answers.run_distribution import (
    StreamingSummary,
    Tally,
    tally,
    usd_per_s,
    without_advice,
)
from outlast.plan.answers.sweep_axes import parse_axis
from outlast.plan.model.answer_values import Answer, Assumed, answer
from outlast.plan.model.ladder_costs import STRATEGIES, Strategy, matters
from outlast.plan.model.scenario import Scenario, read_file, scenario_of
from outlast.plan.model.strategy_prediction import Prediction, predict, reason_impossible
from outlast.plan.simulate.simulated_job import TALLIES, bound_failures, job_of

if TYPE_CHECKING:
    from outlast.plan.simulate.replications import ReplicationPart

AXES_MAX = 2
POINTS_MAX = 2000
RUNS_MAX = 1_000_000_000
NAMED_MAX = 3


class SweepPoint(NamedTuple):
    """One point of a sweep. `values`: the varied fields, by key, as text."""

    values: dict[str, str]
    scenario: Scenario
    strategy: Strategy


class PointRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Runs at one point. `means`: of all tallies of a run, by the simulator's names."""

    replications: int
    unfinished: int
    takes: Tally
    goodput: Tally
    costs: Tally
    failures: Tally
    means: dict[str, float]


class PointResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results at one point.

    Theory: None where the strategy is impossible there (`why`). Runs: None where none were
    requested or done, or where they `failed`.
    """

    values: dict[str, str]
    strategy: Strategy
    theory: Prediction | None
    runs: PointRuns | None = None
    why: str = ""
    failed: str = ""


class Sweep(Answer, frozen=True, kw_only=True):
    """Answer of a sweep with `requested` replications at each point."""

    over: dict[str, list[str]]
    strategies: list[Strategy]
    seed: int
    requested: int = msgspec.field(name="asked")
    interrupted: bool
    points: list[PointResult]


def sweep_points(
    flags: Mapping[str, str], file: Path | None, over: Sequence[str], strategies: Sequence[Strategy]
) -> list[SweepPoint]:
    """Return the points: all combinations of the values of `over`, with each strategy.

    Raises ConfigError, UsageError, naming the invalid point.
    """
    if not 1 <= len(over) <= AXES_MAX:
        raise UsageError("--over takes one or two fields, for example --over gpus=1k,4k,16k")
    flags = {name.replace("_", "-"): text for name, text in flags.items()}
    given = {**(read_file(file) if file else {}), **flags}
    axes = [parse_axis(text, given) for text in over]
    for key, _ in axes:
        if key in flags or sum(ax.key == key for ax in axes) > 1:
            raise UsageError(f"--over {key}: the field is given twice")
    count = math.prod(len(ax.texts) for ax in axes) * len(strategies)
    if count > POINTS_MAX:
        raise UsageError(f"--over: {count:,} points with all strategies; at most {POINTS_MAX:,}")
    points: list[SweepPoint] = []
    for texts in product(*(ax.texts for ax in axes)):
        values = dict(zip((ax.key for ax in axes), texts, strict=True))
        try:
            scenario = scenario_of({**flags, **values}, file)
        except ConfigError as error:
            name = " ".join(f"{key}={text}" for key, text in values.items())
            raise ConfigError(f"--over {name}: {error}") from error
        points += [SweepPoint(values, scenario, strategy) for strategy in strategies]
    return points


def sweep(
    wanted: Sequence[SweepPoint],
    replications: int = 100,
    *,
    seed: int = 0,
    executor: Executor | None = None,
    in_flight: int | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Sweep:
    """Predict each point by theory, and by `replications` simulated runs (0: none).

    The k-th replications of all points meet the same failures. The parts of all points take turns
    in one queue: after Ctrl-C every point has its first runs, and `executor` is never idle. The
    runs of a point do not depend on the order. A point whose part failed reports the error, and the
    others continue. Raises UsageError.
    """
    if not 0 <= replications <= RUNS_MAX:
        raise UsageError(f"--replications {replications}: from 0 to {RUNS_MAX:,}")
    points = [_in_theory(point) for point in wanted]
    interrupted = False
    if replications:
        here = {at: point.theory for at, point in enumerate(points) if point.theory}
        ended = _simulate_points(
            {at: (wanted[at], theory) for at, theory in here.items()},
            replications,
            seed=seed,
            executor=executor,
            in_flight=in_flight,
            on_progress=on_progress,
        )
        for at, (runs, failed) in ended.items():
            points[at] = replace(points[at], runs=runs, failed=failed)
        interrupted = any(
            not failed and (runs is None or runs.replications < replications)
            for runs, failed in ended.values()
        )
    return _answer(wanted, points, seed, replications, interrupted=interrupted)


class _PointSums:
    """Sums over the runs at one point so far."""

    def __init__(self, point: SweepPoint, theory: Prediction) -> None:
        self.point = point
        self.theory = theory
        self.job = bound_failures(job_of(point.scenario, point.strategy), theory)
        self.failed = ""
        self._wall = StreamingSummary()
        self._goodput = StreamingSummary()
        self._failures = StreamingSummary()
        self._totals = np.zeros(len(TALLIES))

    def add(self, rows: np.ndarray) -> None:
        self._wall.add(rows["wall_s"])
        self._goodput.add(self.job.work_s / rows["wall_s"])
        self._failures.add(rows["failures"])
        self._totals += [rows[name].sum() for name in TALLIES]

    def runs(self) -> PointRuns | None:
        count = self._wall.count
        if not count:
            return None
        usd = usd_per_s(self.point.scenario, self.theory.spares)
        goodput = tally("goodput", "share", self._goodput)
        return PointRuns(
            replications=count,
            unfinished=self._wall.endless,
            takes=tally("takes", "s", self._wall, self.theory.wall_s),
            goodput=replace(goodput, predicted=self.theory.outcome.goodput),
            costs=tally("costs", "USD", self._wall, self.theory.usd, times=usd),
            failures=tally("failures", "times", self._failures),
            means=dict(zip(TALLIES, (self._totals / count).tolist(), strict=True)),
        )


def _simulate_points(
    wanted: Mapping[int, tuple[SweepPoint, Prediction]],
    replications: int,
    *,
    seed: int,
    executor: Executor | None,
    in_flight: int | None,
    on_progress: Callable[[int, int], None],
) -> dict[int, tuple[PointRuns | None, str]]:
    """Return the runs and the error, if any, of each point by its number."""
    # The simulator takes a while to import, and theory alone does not need it.
    from outlast.plan.simulate.replications import IN_FLIGHT, reason, results

    sums = {at: _PointSums(*point) for at, point in wanted.items()}
    done = 0
    total = replications * len(sums)
    queue = _by_turns(sums, replications, seed)
    with closing(results(queue, executor, in_flight or IN_FLIGHT)) as ended:
        for at, part, rows in ended:
            if isinstance(rows, Exception):
                sums[at].failed = f"{reason(rows)}; earlier simulated runs are kept"
            elif not sums[at].failed:
                sums[at].add(rows)
            done += part.count
            on_progress(done, total)
    return {at: (point.runs(), point.failed) for at, point in sums.items()}


def _by_turns(
    sums: Mapping[int, _PointSums], replications: int, seed: int
) -> Iterator[tuple[int, ReplicationPart]]:
    """Yield a part of each point in turn, skipping points that have failed."""
    from outlast.plan.simulate.replications import parts

    waiting = deque((at, parts(point.job, replications, seed)) for at, point in sums.items())
    while waiting:
        at, rest = waiting.popleft()
        part = None if sums[at].failed else next(rest, None)
        if part is not None:
            yield at, part
            waiting.append((at, rest))


def _in_theory(point: SweepPoint) -> PointResult:
    why = reason_impossible(point.scenario, point.strategy)
    theory = None if why else predict(point.scenario, point.strategy)
    return PointResult(values=point.values, strategy=point.strategy, theory=theory, why=why)


def _answer(
    wanted: Sequence[SweepPoint],
    points: list[PointResult],
    seed: int,
    replications: int,
    *,
    interrupted: bool,
) -> Sweep:
    over = {
        key: list(dict.fromkeys(point.values[key] for point in points)) for key in points[0].values
    }
    strategies: list[Strategy] = [
        strategy for strategy in STRATEGIES if any(point.strategy == strategy for point in points)
    ]
    about = frozenset[str]().union(*(matters(strategy) for strategy in strategies), {"gpu-hour"})
    answers = [answer("", point.scenario, [], [], about) for point in wanted]
    rates = dict.fromkeys(result.failures for result in answers)
    return Sweep(
        question=f"What {'does' if len(over) == 1 else 'do'} {' and '.join(over)} change?",
        failures=next(iter(rates)) if len(rates) == 1 else "by point",
        quantities=[],
        assumed=list(_agreed(answers)),
        warnings=list(_warnings(points, replications)),
        over=over,
        strategies=strategies,
        seed=seed,
        requested=replications,
        interrupted=interrupted,
        points=points,
    )


def _agreed(answers: Sequence[Answer]) -> Iterator[Assumed]:
    """Return the assumptions common to all points, and the fields derived from others."""
    for first in answers[0].assumed:
        texts = {
            assumption.text
            for each in answers
            for assumption in each.assumed
            if assumption.key == first.key
        }
        yield first if len(texts) == 1 else Assumed(first.key, "by point")


def _warnings(points: Sequence[PointResult], replications: int) -> Iterator[str]:
    """Yield each warning once, with its points."""
    where: dict[str, list[str]] = {}
    for point in points:
        name = " ".join([*(f"{key}={text}" for key, text in point.values.items()), point.strategy])
        for text in _warnings_at(point, replications):
            where.setdefault(text, []).append(name)
    for text, names in where.items():
        more = f" and {len(names) - NAMED_MAX:,} more" if len(names) > NAMED_MAX else ""
        yield f"{', '.join(names[:NAMED_MAX])}{more}: {text}"


def _warnings_at(point: PointResult, replications: int) -> Iterator[str]:
    runs = point.runs
    if point.why:
        yield point.why
    if point.failed:
        yield f"the simulation failed: {point.failed}"
    if point.theory:
        yield from without_advice(point.theory.warnings) if replications else point.theory.warnings
        if math.isinf(point.theory.wall_s):
            yield "no end: failures come faster than the run makes progress"
    if (
        replications
        and point.theory
        and not point.failed
        and (runs is None or runs.replications < replications)
    ):
        yield "interrupted, with fewer runs than requested"
    if runs and runs.unfinished:
        yield "some runs have no end"
    if runs and (differs := runs.takes.differs()):
        yield f"runs take {'longer' if differs > 0 else 'less'} than theory predicts"


def strategies_of(text: str) -> list[Strategy]:
    """Parse `outlast,migrate`, or `all`. Raises UsageError."""
    named = STRATEGIES if text == "all" else [name.strip() for name in text.split(",")]
    if unknown := next((name for name in named if name not in STRATEGIES), None):
        raise UsageError(f"--strategy {unknown}: known are {', '.join(STRATEGIES)}, and all")
    return [strategy for strategy in STRATEGIES if strategy in named]
