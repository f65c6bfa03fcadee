"""What failures left behind: did the node go on, was it taken away, were most of the nodes gone?"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from outlast.fleet.attribution import AFTER_S, BEFORE_S, CAUSES, Attributed
from outlast.fleet.blame import NODE, at_fault, blamed
from outlast.fleet.exposure import KEY, SECOND_NS
from outlast.fleet.hosts import expanded
from outlast.fleet.tables import Tables

TAKEN_S = 3600  # a node that is away within this time after the failure was taken by it


class Aftermath(NamedTuple):
    """Of `failures` of attempts above a size: `wide` took half of the job's nodes or more (two at
    least) within the window of attribution, by an outage or a finding that can end a job;
    `went_on`, of the others: no node that is blamed was away at the end or within TAKEN_S."""

    failures: int
    went_on: int
    wide: int


def aftermath(tables: Tables, found: Attributed, *, above_gpus: int) -> Aftermath:
    """Tells nothing of a cluster without outages: ask for them first."""
    large = found.failures.filter(pl.col("gpus") > above_gpus)
    chosen = Attributed(large, found.causes)
    wide = _wide(tables, chosen)
    away = tables.outages.select(
        *NODE, begun_ns="t_ns", back_ns=pl.col("until_ns").fill_null(2**62)
    )
    after = pl.col("begun_ns") - pl.col("t_ns")
    there = (after <= TAKEN_S * SECOND_NS) & (pl.col("back_ns") > pl.col("t_ns"))
    taken = (
        blamed(tables, at_fault(chosen))
        .join(away, on=NODE)
        .filter(there)
        .select(KEY)
        .unique()
        .collect()
    )
    left = large.select(KEY).join(wide, on=KEY, how="anti")
    return Aftermath(
        failures=len(large),
        went_on=len(left.join(taken, on=KEY, how="anti")),
        wide=len(wide),
    )


def _wide(tables: Tables, found: Attributed) -> pl.DataFrame:
    """KEY of those that took half of the nodes or more."""
    near = (pl.col("begun_ns") - pl.col("t_ns")).is_between(
        -BEFORE_S * SECOND_NS, AFTER_S * SECOND_NS
    )
    failed = tables.jobs.join(found.failures.lazy().select(KEY), on=KEY, how="semi")
    away = (
        expanded(failed.select(*KEY, "t_ns", "hosts"))
        .join(tables.outages.select(*NODE, begun_ns="t_ns"), on=NODE)
        .filter(near)
        .select(*KEY, "node")
    )
    broken = found.causes.lazy().filter(pl.col("severity").is_in(CAUSES)).select(*KEY, "node")
    hit = pl.concat([away, broken]).unique().group_by(KEY).agg(hit=pl.len()).collect()
    enough = (2 * pl.col("hit") >= pl.col("nodes")) & (pl.col("hit") >= 2)
    return found.failures.join(hit, on=KEY).filter(enough).select(KEY)
