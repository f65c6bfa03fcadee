"""Does what is measured of a cluster hold what is true of it? Synthetic clusters, whose truth is
known, one after the other.

A measure is a function of a cluster that gives figures by name; a bar is a function of a figure's
values over all clusters. To add one, write both and name them in MEASURES and BARS.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import polars as pl
from harness import median, table, verdict

from outlast.fleet.analysis.failure_attribution import (
    AttributedFailures,
    attribute_failures,
    worst_nodes,
)
from outlast.fleet.analysis.failure_rates import failure_rate, mttf
from outlast.fleet.analysis.fitted_rates import fit_rates
from outlast.fleet.analysis.goodput_loss import lost_goodput, total_loss
from outlast.fleet.analysis.lemons import rank_lemons, score_ranking
from outlast.fleet.analysis.measured_ettr import ettr_by_size, measured_ettr
from outlast.fleet.record_tables import Tables
from outlast.fleet.synth import synthetic_cluster
from outlast.theory import numerics

TAIL = 0.05
DAY_S = 86_400.0
RESUBMITTED_S = 3600.0  # within which another id goes on with a run


class Made(NamedTuple):
    """One cluster, what is attributed in it, and what is true of it."""

    tables: Tables
    found: AttributedFailures
    truth: synthetic_cluster.GroundTruth


class Asked(NamedTuple):
    shape: str
    days: float
    nodes: int | None


Figures = dict[str, float]


def rate_of_large_jobs(made: Made) -> Figures:
    """r_f: is the true rate of failures that can be seen inside the 90 % interval?"""
    told, true = failure_rate(made.tables, made.found), 1000 * made.truth.r_f_counted
    return {
        "r_f true": true,
        "r_f": told.per_1000_node_days or 0.0,
        "r_f in Gamma": inside(told.low, true, told.high),
        "r_f in bootstrap": inside(told.boot_low, true, told.boot_high),
        "r_f failures": told.failures,
        "r_f failures missed or too many": abs(told.failures - made.truth.failures_counted),
        "r_f node-days off": abs(told.node_days / made.truth.node_days - 1),
        "r_f dispersion": told.dispersion or 1.0,
    }


def rate_for_plans(made: Made) -> Figures:
    """What `outlast plan --rates` takes for the band: Gamma with as many failures as it is sure
    as."""
    rate = fit_rates(made.tables).rate
    true, weight = 1000 * made.truth.r_f_counted, rate.weight_failures
    low, high = (numerics.gamma_quantile(weight, at) / weight for at in (TAIL, 1 - TAIL))
    mean = rate.per_1000_node_days
    return {"plan's rate in its band": inside(low * mean, true, high * mean)}


def mttf_by_size(made: Made) -> Figures:
    """Is 1/N, from the large jobs alone, inside the interval of sizes that failed some times?"""
    told = mttf(made.tables, made.found)
    rows = told.select("gpus", "failures", "low_h", "high_h").iter_rows()
    true_rate = made.truth.r_f_counted / 24
    hits = [
        inside(low_h, 8 / gpus / true_rate, high_h)
        for gpus, failures, low_h, high_h in rows
        if gpus > 128 and failures >= 3
    ]
    return {"MTTF true in interval, sizes above 128": sum(hits) / len(hits)} if hits else {}


def ettr_of_runs(made: Made) -> Figures:
    """Job runs of QOS high that held nodes for a day: mean ETTR, measured and true, in points."""
    truth = made.truth
    runs = measured_ettr(
        made.tables, worst_nodes(made.found), qos=["high"], across_s=RESUBMITTED_S,
        interval_s=truth.checkpoint_s, init_s=truth.restart_s,
    )  # fmt: skip
    if truth.ettr is None or not len(runs):
        return {}
    together = runs.with_columns(bucket=pl.lit(0, pl.Int64))
    (row,) = ettr_by_size(together, truth.r_f / DAY_S).iter_rows(named=True)
    return {
        "ETTR": 100 * row["ettr"],
        "ETTR true": 100 * truth.ettr,
        "ETTR off": 100 * abs(row["ettr"] - truth.ettr),
        "ETTR runs": row["runs"],
        "ETTR expected": 100 * row["expected"],
    }


def goodput_lost(made: Made) -> Figures:
    """The share of lost goodput that is of second order, in points, and who instigated what."""
    found = lost_goodput(made.tables, worst_nodes(made.found))
    told, truth = total_loss(made.tables, found), made.truth
    second = found.filter(pl.col("order") == 2)
    mine = set(second.select("job", "attempt", "by_job", "by_attempt").iter_rows())
    true = {(one.job, one.attempt, one.by_job, one.by_attempt) for one in truth.cascades}
    share = told.second_share or 0.0
    return {
        "second order": 100 * share,
        "second order true": 100 * truth.second_order_share,
        "second order off": 100 * abs(share - truth.second_order_share),
        "preemptions, of mine right": len(mine & true) / len(mine) if mine else 1.0,
        "preemptions, of true ones found": len(mine & true) / len(true) if true else 1.0,
    }


def lemon_nodes(made: Made) -> Figures:
    """Those that are called lemons, and the ranking down to where 80 % of them are found."""
    found = score_ranking(rank_lemons(made.tables, worst_nodes(made.found)), made.truth.lemons)
    precision = {} if found.precision is None else {"lemons precision": found.precision}
    at_80 = (
        {} if found.precision_at_80 is None else {"lemons precision at 80": found.precision_at_80}
    )
    return {
        **precision,
        **at_80,
        "lemons recall": found.recall or 0.0,
        "lemons called": found.called,
        "lemons true": found.true,
    }


MEASURES: tuple[Callable[[Made], Figures], ...] = (
    rate_of_large_jobs, rate_for_plans, mttf_by_size, ettr_of_runs, goodput_lost, lemon_nodes,
)  # fmt: skip


def inside(low: float | None, value: float, high: float | None) -> float:
    return float(low is not None and high is not None and low <= value <= high)


def off_90(values: Sequence[float]) -> float:
    """How far the share of clusters whose truth is inside is from 90 %, in points."""
    return 100 * abs(mean(values) - 0.9)


def missing(values: Sequence[float]) -> float:
    """How far a mean share is below 1, in points."""
    return 100 * (1 - mean(values))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


BARS: dict[str, tuple[str, Callable[[Sequence[float]], float], float]] = {
    "points: true r_f in its 90 % interval, from 90 %": ("r_f in Gamma", off_90, 4.0),
    "failures counted wrongly, in a cluster": ("r_f failures missed or too many", mean, 0.2),
    "points: ETTR from its truth, the mean": ("ETTR off", mean, 1.0),
    "points: second-order share from its truth, the mean": ("second order off", mean, 2.0),
    "points: ranking's wrong lemons at 80 % recall": ("lemons precision at 80", missing, 10.0),
    "points: called lemons that are none": ("lemons precision", missing, 10.0),
    "points: true lemons that are not called": ("lemons recall", missing, 20.0),
}


def one(asked: Asked, seed: int) -> Figures:
    tables, truth = synthetic_cluster.make_cluster(
        asked.shape, asked.days, seed=seed, nodes=asked.nodes
    )
    began_s = time.perf_counter()
    made = Made(tables, attribute_failures(tables), truth)
    figures: Figures = {}
    for measure in MEASURES:
        figures |= measure(made)
    return {**figures, "seconds": time.perf_counter() - began_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=200)
    parser.add_argument("--shape", default="rsc1", choices=sorted(synthetic_cluster.SHAPES))
    parser.add_argument("--days", type=float, default=28)
    parser.add_argument("--nodes", type=int, default=512, help="0: as many as the paper's")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    ask = partial(one, Asked(args.shape, args.days, args.nodes or None))
    with ProcessPoolExecutor(args.workers) as pool:
        found = list(pool.map(ask, range(args.clusters)))
    names = sorted({name for each in found for name in each})
    values = {name: [each[name] for each in found if name in each] for name in names}
    rows = [
        (name, f"{mean(each):.4g}", f"{median(each):.4g}", f"{min(each):.4g}", f"{max(each):.4g}")
        for name, each in values.items()
    ]
    table((f"{args.clusters} clusters", "mean", "median", "least", "most"), rows)
    figures = {
        "clusters": args.clusters,
        "shape": args.shape,
        "days": args.days,
        "nodes": args.nodes,
        "load_average": os.getloadavg()[0],
        "means": {name: mean(each) for name, each in values.items()},
    }
    bars = {bar: (of(values[name]), limit) for bar, (name, of, limit) in BARS.items()}
    return verdict("fleet_truth", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
