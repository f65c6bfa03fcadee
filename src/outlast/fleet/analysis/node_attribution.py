"""Attribution of job failures to nodes."""

from __future__ import annotations

import polars as pl

from outlast.fleet.analysis.exposure import KEY, SECOND_NS
from outlast.fleet.analysis.failure_attribution import CAUSES, AttributedFailures
from outlast.fleet.host_lists import explode_hosts
from outlast.fleet.record_tables import Tables

SIMULTANEOUS_S = 600.0
NODE = ["cluster", "node"]


def attribute_to_nodes(tables: Tables, infra: pl.LazyFrame) -> pl.LazyFrame:
    """Return one row per failed attempt and responsible node.

    Columns: KEY, t_ns, nodes (of the attempt), node, `weight`, which sums to 1 per attempt, and
    `named`: only this node can be responsible.

    `infra`: cluster, job, attempt and optionally `node` ("" or null if unknown; several rows share
    the weight). Otherwise the responsible node is the scheduler's `failed_node`, else the attempt's
    only node, else all of its nodes with equal weight. A component of a heterogeneous job shares
    the failed node of the others. Attempts without any known node are dropped.
    """
    has_node = "node" in infra.collect_schema().names()
    reported_node = pl.col("node") if has_node else pl.lit("")
    named = infra.select(*KEY, said=reported_node.fill_null("").cast(pl.String)).unique()
    reported_nodes = named.group_by(KEY).agg(pl.col("said").filter(pl.col("said") != ""))
    failures = (
        tables.jobs.select(*KEY, "t_ns", "nodes", "hosts", "failed_node")
        .join(reported_nodes, on=KEY, how="inner")
        .with_columns(failed_node=_failed_node())
        .with_columns(
            said=pl.when(pl.col("said").list.len() > 0)
            .then("said")
            .when(pl.col("failed_node") != "")
            .then(pl.concat_list("failed_node"))
        )
    )
    columns = [*KEY, "t_ns", "nodes", "node"]
    reported = (
        failures.filter(pl.col("said").is_not_null())
        .explode("said", empty_as_null=False)
        .rename({"said": "node"})
        .select(columns)
    )
    unreported = explode_hosts(failures.filter(pl.col("said").is_null())).select(columns)
    weight = 1 / pl.len().over(KEY).cast(pl.Float64)
    return (
        pl.concat([reported, unreported])
        .with_columns(weight=weight)
        .with_columns(named=pl.col("weight") == 1)
    )


def _failed_node() -> pl.Expr:
    """Return the scheduler's failed node.

    A component of a heterogeneous job (12+1) without one takes that of the other components: they
    end with it, and their own nodes are healthy.
    """
    leader = pl.col("job").str.extract(r"^(\d+)\+\d+$")
    named = pl.col("failed_node").filter(pl.col("failed_node") != "").first()
    together = named.over("cluster", leader, "attempt")
    alone = (pl.col("failed_node") == "") & leader.is_not_null()
    return pl.when(alone & together.is_not_null()).then(together).otherwise("failed_node")


def worst_nodes(found: AttributedFailures) -> pl.LazyFrame:
    """Return the attempts that infrastructure ended, in the form of `attribute_to_nodes`.

    Each with the nodes of its worst findings that can have ended it, or with none.
    """
    rank = pl.col("severity").replace_strict(dict(zip(CAUSES, range(len(CAUSES)), strict=True)),
                                             default=None, return_dtype=pl.Int64)  # fmt: skip
    worst = (
        found.causes.lazy()
        .with_columns(how=rank)
        .filter(pl.col("how").is_not_null())
        .filter(pl.col("how") == pl.col("how").min().over(KEY))
        .select(*KEY, "node")
        .unique()
    )
    return found.failures.lazy().select(KEY).join(worst, on=KEY, how="left")


def merge_simultaneous(blame: pl.LazyFrame, same_s: float = SIMULTANEOUS_S) -> pl.LazyFrame:
    """Merge failures of a node within `same_s` of the previous one into one event.

    Eight jobs that share a node end by one failure. Keeps `t_ns` of the first and the highest
    `weight`.
    """
    apart = pl.col("t_ns") - pl.col("t_ns").shift(1) > round(same_s * SECOND_NS)
    new = apart | pl.any_horizontal(pl.col(name) != pl.col(name).shift(1) for name in NODE)
    return (
        blame.sort(*NODE, "t_ns")
        .with_columns(event=new.fill_null(value=True).cum_sum())
        .group_by("event")
        .agg(
            pl.col("cluster", "node", "t_ns").first(),
            pl.col("weight").max(),
            pl.col("named").any(),
        )
        .drop("event")
    )
