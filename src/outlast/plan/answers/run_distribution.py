"""Distribution of many simulated runs of one strategy, by quantiles."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import closing

import msgspec
import numpy as np

from outlast.errors import OutlastError
from outlast.plan.model.answer_values import Answer, Unit, answer
from outlast.plan.model.ladder_costs import Strategy, matters
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import Prediction, predict
from outlast.plan.simulate.replications import parts, reason, results
from outlast.plan.simulate.simulated_job import TALLIES, SimulatedJob, bound_failures, job_of
from outlast.plan.simulate.tallies import StreamingSummary, Tally, tally, usd_per_s, without_advice
from outlast.process_pool import IN_FLIGHT

LONG_RUN = "drop: theory is of a long run; a simulated one begins with all its replicas"
_TALLIES: dict[str, tuple[str, Unit]] = {
    "wall_s": ("takes", "s"),
    "redo_s": ("redone work", "s"),
    "save_s": ("saving", "s"),
    "detect_s": ("detection", "s"),
    "restart_s": ("restart", "s"),
    "wait_s": ("waiting", "s"),
    "slow_s": ("slowness", "s"),
    "failures": ("failures", "times"),
    "incidents": ("stops", "times"),
    "from_live": ("from live state", "times"),
    "from_memory": ("from memory", "times"),
    "from_storage": ("from storage", "times"),
    "stalls": ("waits", "times"),
}


class RunDistribution(Answer, frozen=True, kw_only=True):
    """Quantiles of simulated runs.

    `replications` of `requested` were done; `unfinished` of them did not end.
    """

    strategy: Strategy
    seed: int
    requested: int = msgspec.field(name="asked")
    replications: int
    unfinished: int
    interrupted: bool
    interval_s: float
    memory_interval_s: float | None
    spares: int
    tallies: list[Tally]


def run_distribution(
    scenario: Scenario,
    strategy: Strategy,
    replications: int,
    *,
    seed: int = 0,
    executor: Executor | None = None,
    in_flight: int = IN_FLIGHT,
    on_rows: Callable[[np.ndarray], None] = lambda _: None,
) -> RunDistribution:
    """Simulate runs of one strategy and return their quantiles.

    Memory does not grow with `replications`: `on_rows` receives the rows (replications.ROWS) in
    order, and they are discarded. After Ctrl-C the answer covers the first runs. Raises UsageError
    naming the invalid field, OutlastError where a part failed.
    """
    predicted = predict(scenario, strategy)
    job = bound_failures(job_of(scenario, strategy), predicted)
    wanted = ((None, part) for part in parts(job, replications, seed))
    summaries = {name: StreamingSummary() for name in (*TALLIES, "goodput")}
    with closing(results(wanted, executor, in_flight)) as done:
        for _, part, rows in done:
            if isinstance(rows, Exception):
                context = f"replications from {part.first:,} failed, and nothing was kept: "
                raise OutlastError(context + reason(rows)) from rows
            for name in TALLIES:
                summaries[name].add(rows[name])
            summaries["goodput"].add(job.work_s / rows["wall_s"])
            on_rows(rows)
    base = answer(
        f"What do runs of {scenario.gpus:,} GPUs with {strategy} come to?",
        scenario,
        [],
        [],
        matters(strategy) | {"gpu-hour"},
    )
    wall = summaries["wall_s"]
    tallies = _make_tallies(scenario, predicted, summaries) if wall.count else []
    return RunDistribution(
        question=base.question,
        failures=base.failures,
        assumed=base.assumed,
        quantities=[],
        warnings=_warnings(strategy, predicted, job, wall, tallies, replications),
        strategy=strategy,
        seed=seed,
        requested=replications,
        replications=wall.count,
        unfinished=wall.endless,
        interrupted=wall.count < replications,
        interval_s=job.interval_s,
        memory_interval_s=predicted.memory_interval_s,
        spares=job.spares,
        tallies=tallies,
    )


def _make_tallies(
    scenario: Scenario, predicted: Prediction, summaries: dict[str, StreamingSummary]
) -> list[Tally]:
    theory = {"wall_s": predicted.wall_s}
    if predicted.strategy != "drop":  # where theory counts replicas that leave, not failures
        theory["failures"] = predicted.outcome.failures_per_s * predicted.wall_s
    tallies = [
        tally(label, unit, summaries[name], theory.get(name))
        for name, (label, unit) in _TALLIES.items()
    ]
    # A mean of goodputs is not the goodput of the mean time, which theory gives: no z.
    goodput = tally("goodput", "share", summaries["goodput"])
    costs = tally(
        "costs",
        "USD",
        summaries["wall_s"],
        predicted.usd,
        times=usd_per_s(scenario, predicted.spares),
    )
    plain = msgspec.structs.replace(goodput, predicted=predicted.outcome.goodput)
    return [tallies[0], plain, costs, *tallies[1:]]


def _warnings(
    strategy: Strategy,
    predicted: Prediction,
    job: SimulatedJob,
    wall: StreamingSummary,
    tallies: list[Tally],
    replications: int,
) -> list[str]:
    texts = without_advice(predicted.warnings) + [LONG_RUN] * (strategy == "drop")
    if wall.count < replications:
        texts.append(f"interrupted: the first {wall.count:,} of {replications:,} replications")
    if wall.endless:
        texts.append(
            f"{wall.endless:,} of {wall.count:,} runs have no end: {job.failures_max:,} failures"
            " came first, or no node would ever have come back"
        )
    differs = tallies[0].differs() if tallies else 0.0
    if differs:
        longer = "longer" if differs > 0 else "less"
        texts.append(f"simulated runs take {abs(differs):.1%} {longer} than theory says")
    return texts
