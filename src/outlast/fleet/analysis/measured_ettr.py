"""Measured ETTR of job runs beside the expected one, and with one condition changed.

Kokolis et al. 2025 (arXiv 2410.21680), II.D, III and appendix A. ETTR is productive time over wall
time. Accounting records neither checkpoints nor the duration of a start: both are assumed. Closed
forms are those of `outlast.theory.ettr`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import polars as pl

from outlast.errors import UsageError
from outlast.fleet.analysis import job_runs
from outlast.fleet.record_tables import Tables
from outlast.theory import ettr as theory
from outlast.theory.numerics import check_not_negative, check_positive

HOUR_S = 3600.0
DAY_S = 86_400.0
INTERVAL_S = HOUR_S
INIT_S = 300.0
LEAST_S = DAY_S
Z_95 = 1.6448536269514722  # the normal 95 % point: 5 % on either side of a 90 % interval


def measured_ettr(
    tables: Tables,
    infra: pl.LazyFrame,
    *,
    interval_s: float = INTERVAL_S,
    init_s: float = INIT_S,
    least_s: float = LEAST_S,
    qos: Collection[str] | None = None,
    priority_min: int | None = None,
    across_s: float | None = None,
) -> pl.DataFrame:
    """Return the ETTR of each job run that held nodes for `least_s` seconds in all.

    Filtered by `qos` and by a priority of at least `priority_min`, if given.

    ETTR = (scheduled - U)/(scheduled + waits), with
    U = min(u0, W_0) + sum over j of min(u0 + c_(j-1), W_j),
    c_j = max(0, W_j - u0) mod tau, W_j the time that attempt j held its nodes. In `ettr_kept` the
    productive time is the work saved at each interruption and that of the last attempt after its
    start; it is lower if an attempt ended before it had caught up, which the sum above ignores.
    Other columns and `across_s` as of `job_runs.job_runs`, and `bucket`.
    """
    check_positive("interval_s", interval_s)
    check_not_negative("init_s", init_s)
    check_not_negative("least_s", least_s)
    chosen = tables.jobs
    if qos is not None:
        chosen = chosen.filter(pl.col("qos").is_in(list(qos)))
    chosen = _long_runs(chosen, least_s, None if across_s is None else infra)
    found = job_runs.attempts_of_runs(tables._replace(jobs=chosen), infra, across_s=across_s)
    runs = job_runs.runs_of(found).join(
        _productive_time(found, interval_s, init_s), on="run", maintain_order="left"
    )
    wanted = (pl.col("scheduled_s") >= least_s) & (pl.col("scheduled_s") > 0)
    if priority_min is not None:
        wanted &= pl.col("priority") >= priority_min
    wall_s = pl.col("scheduled_s") + pl.col("wait_s")
    return runs.filter(wanted).with_columns(
        job_runs.size_bucket(),
        ettr=pl.col("productive_s") / wall_s,
        ettr_kept=pl.col("kept_s") / wall_s,
    )


def top_qos(tables: Tables) -> str | None:
    """Return the QOS whose attempts have the highest median priority; None without jobs."""
    by = tables.jobs.group_by("qos").agg(pl.col("priority").median())
    found = by.sort("priority", "qos", descending=[True, False]).first().collect()
    return found["qos"][0] if len(found) else None


def ettr_by_size(
    runs: pl.DataFrame,
    node_rate_per_s: float,
    *,
    interval_s: float = INTERVAL_S,
    init_s: float = INIT_S,
) -> pl.DataFrame:
    """Return the mean of `measured_ettr` by size, and the expected ETTR of each size's mean run.

    `low` and `high`: the 90 % interval of the mean by Student's t, cut to 0 and 1 (null for a
    single run). `expected`: equations 4 to 6, `equation_1`: the paper's printed form, `exact`: the
    long-run form; with the failure rate nodes x `node_rate_per_s` and the size's mean wait for a
    start as q. `in_regime`: first order holds. `hidden`: the share of runs with missing attempts,
    whose ETTR is too high.
    """
    return _add_expected(_mean_by_size(runs), node_rate_per_s, interval_s, init_s)


def t_95(freedom: float) -> float:
    """Return the 95 % point of Student's t.

    Exact for 1 and 2 degrees of freedom, else to 0.3 % by the first three terms of Fisher and
    Cornish's series (Abramowitz and Stegun, 26.7.5). Raises UsageError below 1.
    """
    if freedom < 1:
        raise UsageError(f"Student's t needs a degree of freedom, not {freedom!r}")
    if freedom == 1:
        return math.tan(math.pi * 0.45)
    if freedom == 2:
        return 0.9 * math.sqrt(2 / (4 * 0.95 * 0.05))
    z = Z_95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _long_runs(jobs: pl.LazyFrame, least_s: float, infra: pl.LazyFrame | None) -> pl.LazyFrame:
    """Return the attempts of ids that held nodes for `least_s`, before the expensive sort.

    With `infra`, also those that may continue an id that infrastructure ended.
    """
    held_ns = (pl.col("t_ns") - pl.col("start_ns")).clip(lower_bound=0).fill_null(0)
    least_ns = least_s * job_runs.NS_PER_SECOND * (1 - 1e-9)
    marked = jobs.with_columns(id=pl.struct("cluster", "job").hash())
    long = marked.group_by("id").agg(held_ns.sum().alias("held_ns"))
    long = long.filter(pl.col("held_ns") >= least_ns).select("id")
    if infra is None:
        return marked.join(long, on="id", how="semi").drop("id")
    same = pl.struct(job_runs.SAME).hash()
    failed = jobs.join(
        infra.select(job_runs.ATTEMPT_KEY).unique(), on=job_runs.ATTEMPT_KEY, how="semi"
    )
    yes = pl.lit(value=True)
    return (
        marked.with_columns(same=same)
        .join(long.with_columns(long=yes), on="id", how="left")
        .join(failed.select(same=same).unique().with_columns(near=yes), on="same", how="left")
        .filter(pl.col("long").is_not_null() | pl.col("near").is_not_null())
        .drop("id", "same", "long", "near")
    )


def _productive_time(found: pl.DataFrame, interval_s: float, init_s: float) -> pl.DataFrame:
    held_s = pl.col("runtime_s")
    worked_s = (held_s - init_s).clip(lower_bound=0)
    saved_s = (worked_s / interval_s).floor() * interval_s
    redone_s = (worked_s - saved_s).shift(1, fill_value=0.0)
    again_s = pl.when(pl.col("nth") > 0).then(redone_s).otherwise(0.0)
    return (
        found.lazy()
        .select(
            "run",
            productive_s=held_s - pl.min_horizontal(init_s + again_s, held_s),
            kept_s=pl.when("last").then(worked_s).otherwise(saved_s),
        )
        .group_by("run")
        .sum()
        .collect()
    )


def _mean_by_size(runs: pl.DataFrame) -> pl.DataFrame:
    starts = pl.col("attempts").sum()
    columns = {
        "runs": pl.len().cast(pl.Int64),
        "ettr": pl.col("ettr").mean(),
        "ettr_kept": pl.col("ettr_kept").mean(),
        "deviation": pl.col("ettr").std(),
        "productive_s": pl.col("productive_s").mean(),
        "wait_s": pl.col("wait_s").sum() / starts,
        "nodes": pl.col("nodes").mean(),
        "interruptions": pl.col("interruptions").mean(),
        "hidden": (pl.col("hidden") > 0).mean(),
    }
    found = runs.group_by("bucket").agg(**columns).sort("bucket")
    half = [
        t_95(count - 1) * deviation / math.sqrt(count) if count > 1 else None
        for count, deviation in found.select("runs", "deviation").iter_rows()
    ]
    return (
        found.with_columns(half=pl.Series(half, dtype=pl.Float64))
        .with_columns(
            low=(pl.col("ettr") - pl.col("half")).clip(lower_bound=0),
            high=(pl.col("ettr") + pl.col("half")).clip(upper_bound=1),
        )
        .drop("deviation", "half")
    )


def _add_expected(
    means: pl.DataFrame, node_rate_per_s: float, interval_s: float, init_s: float
) -> pl.DataFrame:
    check_not_negative("node_rate_per_s", node_rate_per_s)
    rows = [
        _expected(nodes, productive_s, wait_s, node_rate_per_s, interval_s, init_s)
        for nodes, productive_s, wait_s in means.select(
            "nodes", "productive_s", "wait_s"
        ).iter_rows()
    ]
    floats = dict.fromkeys(("mtbf_s", "expected", "equation_1", "exact"), pl.Float64())
    schema = pl.Schema({**floats, "in_regime": pl.Boolean()})
    return means.hstack(pl.DataFrame(rows, schema=schema, orient="row"))


def _expected(
    nodes: float,
    productive_s: float,
    wait_s: float,
    node_rate_per_s: float,
    interval_s: float,
    init_s: float,
) -> tuple[float, float | None, float | None, float, bool]:
    rate = nodes * node_rate_per_s
    mtbf_s = 1 / rate if rate else math.inf
    first_order = equation_1 = None  # undefined for a run without productive time
    if productive_s > 0:
        first_order, equation_1 = (
            form(interval_s, mtbf_s, productive_s=productive_s, init_s=init_s, queue_s=wait_s)
            for form in (theory.equation_6, theory.equation_1)
        )
    exact = theory.exact(interval_s, mtbf_s, init_s=init_s, queue_s=wait_s)
    return (
        mtbf_s,
        first_order,
        equation_1,
        exact,
        theory.in_regime(interval_s, mtbf_s, init_s=init_s),
    )


HALF = 0.5
AS_IS = "as it is"


class EttrSetting(NamedTuple):
    """Parameters of an ETTR."""

    node_rate_per_s: float
    init_s: float
    interval_s: float
    queue_factor: float = 1.0


def counterfactual_ettr(
    sizes: pl.DataFrame,
    node_rate_per_s: float,
    *,
    interval_s: float = INTERVAL_S,
    init_s: float = INIT_S,
    cost_s: float = 0.0,
    factor: float = HALF,
    without_lemons: float | None = None,
) -> pl.DataFrame:
    """Return the long-run ETTR of each size of `ettr_by_size` under changed conditions.

    `ettr`: L tau/(e^(L (tau + C)) - 1) e^(-L u0)/(1 + L q) with L = nodes x rate
    (`theory.ettr.exact`); `gained` over the unchanged size, from 0 to 1; `mtbf_s` of such a job.

    Changes: `factor` times the failure rate, the start (u0), the interval, the wait after a
    failure, all of them; and `without_lemons` times the failure rate
    (`rate_share_without_lemons`). A save costs `cost_s`, so that a shorter interval can lose. Only
    nodes, waits and rates are measured.
    """
    check_not_negative("node_rate_per_s", node_rate_per_s)
    check_positive("interval_s", interval_s)
    check_not_negative("init_s", init_s)
    check_not_negative("cost_s", cost_s)
    if not 0 < factor < math.inf:
        raise UsageError(f"factor must be above 0 and finite, not {factor!r}")
    rows: list[tuple[int, str, float, float, float]] = []
    settings = _settings(node_rate_per_s, interval_s, init_s, factor, without_lemons)
    for bucket, nodes, wait_s in sizes.select("bucket", "nodes", "wait_s").iter_rows():
        before = None
        for change, setting in settings.items():
            mtbf_s = _mtbf_s(nodes, setting.node_rate_per_s)
            at = theory.exact(
                setting.interval_s,
                mtbf_s,
                init_s=setting.init_s,
                queue_s=wait_s * setting.queue_factor,
                cost_s=cost_s,
            )
            before = at if before is None else before
            rows.append((bucket, change, at, at - before, mtbf_s))
    schema = {
        "bucket": pl.Int64,
        "change": pl.String,
        "ettr": pl.Float64,
        "gained": pl.Float64,
        "mtbf_s": pl.Float64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def rate_share_without_lemons(ranking: pl.DataFrame) -> float | None:
    """Return the failure rate of nodes that are no lemons over that of all nodes.

    Rates per node-day of the last days in the ranking of `rank_lemons`; None without node-days or
    failures.
    """
    rates = [
        float(nodes["failures"].sum()) / days if (days := float(nodes["node_days"].sum())) else None
        for nodes in (ranking.filter(~pl.col("lemon")), ranking)
    ]
    sound, all_nodes = rates
    return None if sound is None or not all_nodes else sound / all_nodes


def _settings(
    rate: float, interval_s: float, init_s: float, factor: float, without_lemons: float | None
) -> dict[str, EttrSetting]:
    times = "half" if factor == HALF else f"{factor:g} times"
    found = {
        AS_IS: EttrSetting(rate, init_s, interval_s),
        f"{times} the failure rate": EttrSetting(rate * factor, init_s, interval_s),
        f"{times} the start": EttrSetting(rate, init_s * factor, interval_s),
        f"{times} the checkpoint interval": EttrSetting(rate, init_s, interval_s * factor),
        f"{times} the wait": EttrSetting(rate, init_s, interval_s, factor),
        f"{times} of all these": EttrSetting(
            rate * factor, init_s * factor, interval_s * factor, factor
        ),
    }
    if without_lemons is not None:
        check_not_negative("without_lemons", without_lemons)
        found["without the lemons"] = EttrSetting(rate * without_lemons, init_s, interval_s)
    return found


def _mtbf_s(nodes: float, rate: float) -> float:
    return 1 / (nodes * rate) if nodes * rate else math.inf
