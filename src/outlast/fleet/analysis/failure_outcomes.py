"""Failure outcomes: outages and wide failures that followed, and failures that jobs survived."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from outlast.fleet.analysis.exposure import KEY, SECOND_NS
from outlast.fleet.analysis.failure_attribution import AFTER_S, BEFORE_S, CAUSES, AttributedFailures
from outlast.fleet.analysis.node_attribution import NODE, attribute_to_nodes, worst_nodes
from outlast.fleet.host_lists import explode_hosts
from outlast.fleet.record_tables import Tables

OUTAGE_WITHIN_S = 3600  # an outage that begins this long after a failure is attributed to it


class FailureOutcomes(NamedTuple):
    """Outcomes of the `failures` of attempts above a size.

    `wide`: outages, or findings that can end a job, took half of the job's nodes or more (two at
    least) within the window of attribution. `went_on`, of the others: no attributed node had an
    outage at the end or within OUTAGE_WITHIN_S.
    """

    failures: int
    went_on: int
    wide: int


def failure_outcomes(
    tables: Tables, found: AttributedFailures, *, above_gpus: int
) -> FailureOutcomes:
    """Count the outcomes of failures above a size.

    Meaningless for a cluster without outages: check for them first.
    """
    large = found.failures.filter(pl.col("gpus") > above_gpus)
    chosen = AttributedFailures(large, found.causes)
    wide = _wide(tables, chosen)
    away = tables.outages.select(
        *NODE, begun_ns="t_ns", back_ns=pl.col("until_ns").fill_null(2**62)
    )
    after = pl.col("begun_ns") - pl.col("t_ns")
    there = (after <= OUTAGE_WITHIN_S * SECOND_NS) & (pl.col("back_ns") > pl.col("t_ns"))
    taken = (
        attribute_to_nodes(tables, worst_nodes(chosen))
        .join(away, on=NODE)
        .filter(there)
        .select(KEY)
        .unique()
        .collect()
    )
    narrow = large.select(KEY).join(wide, on=KEY, how="anti")
    return FailureOutcomes(
        failures=len(large),
        went_on=len(narrow.join(taken, on=KEY, how="anti")),
        wide=len(wide),
    )


def _wide(tables: Tables, found: AttributedFailures) -> pl.DataFrame:
    """Return KEY of the failures that took half of the nodes or more."""
    near = (pl.col("begun_ns") - pl.col("t_ns")).is_between(
        -BEFORE_S * SECOND_NS, AFTER_S * SECOND_NS
    )
    failed = tables.jobs.join(found.failures.lazy().select(KEY), on=KEY, how="semi")
    away = (
        explode_hosts(failed.select(*KEY, "t_ns", "hosts"))
        .join(tables.outages.select(*NODE, begun_ns="t_ns"), on=NODE)
        .filter(near)
        .select(*KEY, "node")
    )
    broken = found.causes.lazy().filter(pl.col("severity").is_in(CAUSES)).select(*KEY, "node")
    hit = pl.concat([away, broken]).unique().group_by(KEY).agg(hit=pl.len()).collect()
    enough = (2 * pl.col("hit") >= pl.col("nodes")) & (pl.col("hit") >= 2)
    return found.failures.join(hit, on=KEY).filter(enough).select(KEY)


def survived_failures(tables: Tables, above_gpus: int) -> pl.DataFrame:
    """Return the interruptions in the window that jobs above this size survived, one row each."""
    inside = pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
    return tables.interruptions.filter(inside, pl.col("gpus") > above_gpus).collect()


def survived_by_cause(tables: Tables) -> pl.DataFrame:
    """Count survived failures by kind of fault and rung of the recovery ladder.

    `cause`, `rung`, `failures`, `nodes` (hosts with such a failure), `lost_nodes` (failures that
    took their host), `pause_s` (mean time until every rank had committed the interrupted step).
    """
    return (
        survived_failures(tables, -1)
        .group_by("cause", "rung")
        .agg(
            failures=pl.len().cast(pl.Int64),
            nodes=pl.struct("cluster", "node").n_unique().cast(pl.Int64),
            lost_nodes=(pl.col("took_node") > 0).sum().cast(pl.Int64),
            pause_s=pl.col("length_ns").mean() / 1e9,
        )
        .sort(["failures", "cause", "rung"], descending=[True, False, False])
    )
