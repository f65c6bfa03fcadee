"""Failure rates and durations fitted to a cluster, for `outlast plan --rates`."""

from __future__ import annotations

import msgspec
import polars as pl

from outlast.errors import LakeError
from outlast.fleet.analysis.confidence_intervals import estimate_share, garwood, jeffreys
from outlast.fleet.analysis.exposure import DAY_S, LARGE_GPUS, gpus_per_node
from outlast.fleet.analysis.failure_attribution import (
    AttributedFailures,
    attribute_failures,
    worst_nodes,
)
from outlast.fleet.analysis.failure_rates import ALL, failure_rate, rates_by_cause
from outlast.fleet.analysis.job_runs import attempts_of_runs
from outlast.fleet.analysis.lemons import failure_basis, rank_lemons
from outlast.fleet.analysis.outages import (
    failure_outcomes,
    outage_rate,
    outages_by_symptom,
    repair_time,
    survived_failures,
)
from outlast.fleet.record_tables import DAY_NS, Tables
from outlast.log_records import COST_NAMES, CostName
from outlast.telemetry.run_costs import mean_of
from outlast.text_formatting import duration, plural

OUTAGES = "outages"  # the basis where no job failed
ENOUGH = 10  # failures: with fewer, smaller jobs are included
WEIGHT_LEAST = 0.5
WEIGHT_MOST = 1e6
FACTOR_MOST = 1e6  # of lemons: a node on which all jobs die at once hardly ran; limit of plans
MANY_MOST = 1000  # weight limit of one run's mean step
DESCRIPTIONS: dict[CostName, str] = {
    "detect": "mean time from a fault until it was noticed",
    "pause": "mean time of a recovery from live ranks, from there on",
    "restore": "mean time of a recovery from memory, from there on",
    "restart": "mean time of a recovery from storage, or of a later launcher's start",
    "cost": "mean time that a checkpoint blocked the slowest rank",
    "flush": "mean time from there until the checkpoint was complete",
    "step": "mean step of the slowest rank",
}
LEMONS_LEAST = 0.05  # smallest rise of the fleet's rate by lemons that is reported


class FittedRate(msgspec.Struct, frozen=True, kw_only=True):
    """Failures per GPU-second of running.

    `basis`: the jobs or outages counted. `low`, `high`: 90 % interval of independent failures;
    `weight_failures`: independent failures of the same certainty (failures over dispersion).
    """

    basis: str
    failures: int
    node_days: float
    per_gpu_second: float
    low_per_gpu_second: float
    high_per_gpu_second: float
    per_1000_node_days: float
    dispersion: float | None
    weight_failures: float


class MeasuredValue(msgspec.Struct, frozen=True, kw_only=True):
    """Measured value in SI units, with its 90 % interval and the number of observations.

    `description`: for people.
    """

    value: float
    low: float | None
    high: float | None
    count: int
    description: str = msgspec.field(name="said")


class CauseShare(msgspec.Struct, frozen=True):
    """Failures of one cause, and their share of all."""

    cause: str
    failures: int
    share: float


class FittedRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates and durations of a cluster.

    `scenario`: fields of `outlast plan`. `measured`: these and the values without such a field.
    `notes`: values that could not be measured, and why.
    """

    since_ns: int
    until_ns: int
    node_gpus: int
    rate: FittedRate
    scenario: dict[str, str | int | float]
    measured: dict[str, MeasuredValue]
    causes: list[CauseShare]
    notes: list[str]


def fit_rates(tables: Tables, *, above_gpus: int = LARGE_GPUS) -> FittedRates:
    """Fit rates and durations to a cluster.

    Raises LakeError if no job ran on GPUs and no node had an outage in the window.
    """
    found = attribute_failures(tables)
    notes: list[str] = []
    node_gpus = _node_gpus(tables, notes)
    rate, size = _rate(tables, found, above_gpus, node_gpus, notes)
    measured = _repair(tables, notes)
    measured |= _shares(tables, found, size, notes)
    measured |= _lemons(tables, found, notes)
    measured |= _durations(tables)
    scenario: dict[str, str | int | float] = {"gpus-per-node": node_gpus}
    for key, measure in measured.items():
        scenario[key] = _scenario_value(key, measure.value)
    return FittedRates(
        since_ns=tables.since_ns,
        until_ns=tables.until_ns,
        node_gpus=node_gpus,
        rate=rate,
        scenario=scenario,
        measured=measured | _queue(tables, found),
        causes=_causes(tables, found, rate),
        notes=notes,
    )


def _scenario_value(key: str, value: float) -> str | float:
    """Return a value in the form of a scenario."""
    if key == "repair":
        return f"{max(1, round(value))}s"
    return f"{value:.6f}s" if key in (*COST_NAMES, "window") else round(value, 6)


def _durations(tables: Tables) -> dict[str, MeasuredValue]:
    """Return the mean durations of recoveries, saves and steps that `outlast run` measured."""
    inside = pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
    costs = tables.costs.filter(inside).collect()
    means: dict[str, MeasuredValue] = {}
    for what in COST_NAMES:
        ours = costs.filter(pl.col("what") == what)
        if not len(ours):
            continue
        each = zip(ours["length_ns"].to_list(), ours["many"].to_list(), strict=True)
        mean = mean_of([ns / 1e9 for ns, count in each for _ in range(min(count, MANY_MOST))])
        means[what] = MeasuredValue(
            value=mean.mean_s,
            low=mean.low_s,
            high=mean.high_s,
            count=int(ours["many"].sum()),
            description=DESCRIPTIONS[what],
        )
    if "pause" in means:
        means["window"] = MeasuredValue(
            value=0.0,
            low=None,
            high=None,
            count=means["pause"].count,
            description="the pause includes the transfer that makes the replica whole again",
        )
    return means


def _causes(tables: Tables, found: AttributedFailures, rate: FittedRate) -> list[CauseShare]:
    """Return the causes of the jobs' failures, or of the outages if these were counted."""
    if rate.basis == OUTAGES:
        share = pl.col("outages") / rate.failures
        outages = outages_by_symptom(tables).select("symptom", "outages", share=share)
        return [CauseShare(*row) for row in outages.iter_rows()]
    rates = rates_by_cause(tables, found).filter(pl.col("cause") != ALL)
    return [CauseShare(*row) for row in rates.select("cause", "failures", "share").iter_rows()]


def _rate(
    tables: Tables, found: AttributedFailures, above_gpus: int, node_gpus: int, notes: list[str]
) -> tuple[FittedRate, int]:
    """Return r_f and the job size above which it was measured.

    With few failures of that size, the rate of all jobs on GPUs; without job failures, that of
    outages.
    """
    for above in (above_gpus, 0):
        jobs = failure_rate(tables, found, above_gpus=above)
        survived = len(survived_failures(tables, above))
        failures = jobs.failures + survived
        if failures >= ENOUGH or not above:
            break
        notes.append(
            f"jobs above {above:,} GPUs had {plural(failures, 'failure')} in"
            f" {jobs.node_days:,.0f} node-days, fewer than {ENOUGH}: smaller jobs were included"
        )
    if jobs.node_days and (failures or not _count(tables.outages)):
        basis = f"jobs above {above:,} GPUs" if above else "all jobs on GPUs"
        if survived:
            basis += f", {survived:,} of which they survived"
        weight = jobs.sure_as + survived / max(1.0, jobs.dispersion or 1.0)
        rate = _make_rate(basis, failures, jobs.node_days, jobs.gpu_days, jobs.dispersion, weight)
        return rate, above
    away = outage_rate(tables)
    if away.per_1000_node_days is None or not away.outages:
        raise LakeError("no job ran on GPUs and no node had an outage then: nothing to measure")
    notes.append("no job failed: the rate counts outages of nodes, with and without jobs")
    widest = max(away.per_node_variance or 1.0, away.per_day_variance or 1.0)
    gpu_days = away.node_days * node_gpus
    rate = _make_rate(OUTAGES, away.outages, away.node_days, gpu_days, widest, away.sure_as)
    return rate, above


def _make_rate(
    basis: str,
    failures: int,
    node_days: float,
    gpu_days: float,
    dispersion: float | None,
    weight: float,
) -> FittedRate:
    """Return the rate; without a failure that of half a failure, which is below the upper end."""
    gpu_s, (low, high) = gpu_days * DAY_S, jeffreys(failures)
    return FittedRate(
        basis=basis,
        failures=failures,
        node_days=node_days,
        per_gpu_second=max(failures, 0.5) / gpu_s,
        low_per_gpu_second=low / gpu_s,
        high_per_gpu_second=high / gpu_s,
        per_1000_node_days=1000 * failures / node_days,
        dispersion=dispersion,
        weight_failures=min(max(weight, WEIGHT_LEAST), WEIGHT_MOST),
    )


def _node_gpus(tables: Tables, notes: list[str]) -> int:
    """Return `exposure.gpus_per_node`, with a note if they are only assumed."""
    nodes = gpus_per_node(tables)
    if nodes.source == "assumed":
        notes.append(f"the number of GPUs per node is unknown: {nodes.gpus} are assumed")
    return nodes.gpus


def _repair(tables: Tables, notes: list[str]) -> dict[str, MeasuredValue]:
    repair = repair_time(tables)
    if repair.mean_s is None:
        notes.append("no outage ended: how long repairs take is not known")
        return {}
    description = (
        f"mean time until a node is back; {repair.open} that last are in it for as long as they are"
        f" known; half are back after {duration(repair.median_s or 0.0)}"
    )
    return {
        "repair": MeasuredValue(
            value=repair.mean_s,
            low=repair.low_s,
            high=repair.high_s,
            count=repair.ended,
            description=description,
        )
    }


def _shares(
    tables: Tables, found: AttributedFailures, above_gpus: int, notes: list[str]
) -> dict[str, MeasuredValue]:
    """Return the shares of transient and of fatal failures.

    Of failures that ended jobs, by the outages that followed; of survived failures, as the runs
    reported them.
    """
    survived = survived_failures(tables, above_gpus)
    stored = pl.col("rung") == "restart"
    transient = len(survived.filter(~stored, pl.col("took_node") == 0))
    fatal = len(survived.filter(stored))
    failures = len(survived)
    if _count(tables.outages):
        outcomes = failure_outcomes(tables, found, above_gpus=above_gpus)
        transient = transient + outcomes.went_on
        fatal = fatal + outcomes.wide
        failures += outcomes.failures
    elif not failures:
        notes.append("no outages are known: the share of failures that take a node is unknown")
        return {}
    if not failures:
        notes.append("no job failed: the share of failures that take a node is unknown")
        return {}
    shares = {
        "transient": (transient, "share of failures after which no blamed node was away"),
        "fatal": (
            fatal,
            "share of failures that took half of the job's nodes or more, or that"
            " only storage was left after",
        ),
    }
    return {
        key: MeasuredValue(
            **estimate_share(count, failures)._asdict(), count=count, description=text
        )
        for key, (count, text) in shares.items()
    }


def _lemons(
    tables: Tables, found: AttributedFailures, notes: list[str]
) -> dict[str, MeasuredValue]:
    """Return the share and the factor of lemons that raise the fleet's rate by LEMONS_LEAST."""
    days = (tables.until_ns - tables.since_ns) / DAY_NS
    by = failure_basis(tables)
    if by == "jobs" and not len(found.failures):
        return {}
    nodes = rank_lemons(tables, worst_nodes(found), days=days, history_days=days, by=by)
    bad = nodes.filter("lemon")
    if len(bad) and float(nodes["failures"].sum()) - float(bad["failures"].sum()) < 1:
        notes.append("only lemons failed: their factor over the rate of other nodes is unknown")
        return {}
    failed = float(bad["failures"].sum())
    expected = float(bad["expected"].sum())
    if not len(bad) or not expected or len(bad) / len(nodes) * (failed / expected) < LEMONS_LEAST:
        return {}
    bounds = estimate_share(len(bad), len(nodes))
    low, high = (end / expected for end in garwood(round(failed)))
    return {
        "lemons": MeasuredValue(
            value=len(bad) / len(nodes),
            low=bounds.low,
            high=bounds.high,
            count=len(bad),
            description="share of nodes that fail more often than chance explains",
        ),
        "lemon-factor": MeasuredValue(
            value=min(failed / expected, FACTOR_MOST),
            low=low,
            high=high,
            count=round(failed),
            description="factor over the rate of other nodes; too high, as the worst are found",
        ),
    }


def _queue(tables: Tables, found: AttributedFailures) -> dict[str, MeasuredValue]:
    """Return the wait after a failure, for `outlast plan ettr --queue`; no field of a scenario."""
    runs = attempts_of_runs(tables, found.failures.lazy().select("cluster", "job", "attempt"))
    after = pl.col("infra").shift(1) & (pl.col("run") == pl.col("run").shift(1))
    waits = runs.filter(after, pl.col("start_ns").is_not_null())["wait_s"]
    if not len(waits):
        return {}
    ends = [waits.quantile(at, "linear") for at in (0.05, 0.5, 0.95)]
    description = (
        f"mean wait of a job after a failure until it ran again; half waited less than"
        f" {duration(ends[1] or 0.0)}; low and high are the 5 % and 95 % quantiles of waits, not of"
        " their mean"
    )
    mean = float(waits.to_numpy().mean())
    return {
        "queue": MeasuredValue(
            value=mean, low=ends[0], high=ends[2], count=len(waits), description=description
        )
    }


def _count(frame: pl.LazyFrame) -> int:
    return int(frame.select(pl.len()).collect().item())
