"""The seven lemon signals of each node, and its exposure (Kokolis et al. 2025).

Kokolis et al. 2025, IV.A and figure 11, which covers 28 days.
"""

from __future__ import annotations

import polars as pl

from outlast.fleet.analysis.exposure import SECOND_NS
from outlast.fleet.analysis.node_attribution import NODE, attribute_to_nodes
from outlast.fleet.host_lists import explode_hosts, nodes_of
from outlast.fleet.record_tables import DAY_NS, Tables

SIGNALS = (
    "excl_jobid_count", "xid_cnt", "tickets", "out_count", "multi_node_nodefails",
    "single_node_nodefails", "single_node_nodefailure_rate",
)  # fmt: skip


def node_signals(
    tables: Tables, infra: pl.LazyFrame, nodes: pl.LazyFrame | None = None
) -> pl.LazyFrame:
    """Return one row for each node that any record of the window names.

    - `excl_jobid_count`: different jobs that excluded it;

    - `xid_cnt`: different XIDs found on it;

    - `tickets`: repair tickets; `out_count`: outages that began or lasted in the window;

    - `multi_node_nodefails`, `single_node_nodefails`: attempts of several nodes, or of one, that
    infrastructure ended (`infra`), attributed to it (`attribute_to_nodes`: by weight if no node was
    named);

    - `single_node_nodefailure_rate`: of the attempts that had this node alone, the share that
    infrastructure ended; null without any;

    and `kind`, and `node_days` of running (`node_exposure`, which takes `nodes`).
    """
    window = clip_tables(tables, tables.since_ns, tables.until_ns)
    blame = attribute_to_nodes(window, infra)
    alone = pl.col("nodes") == 1
    fails = blame.group_by(NODE).agg(
        multi_node_nodefails=pl.col("weight").filter(~alone).sum(),
        single_node_nodefails=pl.col("weight").filter(alone).sum(),
    )
    parts = [
        node_exposure(window, nodes),
        fails,
        _excluded(window),
        window.findings.filter(pl.col("code").str.starts_with("XID"))
        .group_by(NODE)
        .agg(xid_cnt=pl.col("code").n_unique().cast(pl.Int64)),
        window.repairs.filter(pl.col("kind") == "ticket").group_by(NODE).agg(tickets=_many()),
        window.outages.group_by(NODE).agg(out_count=_many()),
    ]
    found = window.nodes.select(NODE).unique()
    for part in parts:
        found = found.join(part, on=NODE, how="full", coalesce=True)
    kinds = window.nodes.sort("t_ns").group_by(NODE).agg(pl.col("kind").last())
    counts = pl.col(
        "excl_jobid_count", "xid_cnt", "tickets", "out_count", "multi_node_nodefails",
        "single_node_nodefails", "node_days",
    )  # fmt: skip
    rate = pl.when(pl.col("alone") > 0).then(pl.col("single_node_nodefails") / pl.col("alone"))
    return (
        found.join(kinds, on=NODE, how="left")
        .filter(pl.col("node") != "")
        .with_columns(counts.fill_null(0), pl.col("kind").fill_null(""))
        .with_columns(single_node_nodefailure_rate=rate)
        .select(*NODE, "kind", "node_days", *SIGNALS)
        .sort(NODE)
    )


def node_exposure(tables: Tables, nodes: pl.LazyFrame | None = None) -> pl.LazyFrame:
    """Return by node the `node_days` of jobs in the window, and `alone`: single-node attempts.

    A job counts for its share of a node's GPUs; no node runs for longer than the window. Of jobs
    without GPUs the time alone counts. `nodes`: `host_lists.nodes_of`, if known already.
    """
    begun = pl.max_horizontal("start_ns", pl.lit(tables.since_ns))
    ended = pl.min_horizontal("t_ns", pl.lit(tables.until_ns))
    ran_ns = (ended - begun).clip(lower_bound=0)
    each = pl.col("gpus") / pl.col("nodes").clip(lower_bound=1)
    lists = (
        tables.jobs.filter(pl.col("start_ns").is_not_null() & (pl.col("hosts") != ""))
        .group_by("cluster", "hosts")
        .agg(
            ran_ns=ran_ns.sum(),
            gpu_ns=(ran_ns * each).sum(),
            gpus=each.max(),
            alone=(pl.col("nodes") == 1).sum().cast(pl.Int64),
        )
    )
    has = tables.nodes.sort("t_ns").group_by(NODE).agg(has=pl.col("gpus").last())
    gpus = pl.when(pl.col("has") > 0).then(pl.col("has")).otherwise(pl.col("gpus"))
    time_ns = pl.when(gpus > 0).then(pl.col("gpu_ns") / gpus).otherwise(pl.col("ran_ns"))
    return (
        lists.join(nodes_of(lists) if nodes is None else nodes, on="hosts")
        .group_by(NODE)
        .agg(pl.col("ran_ns", "gpu_ns", "alone").sum(), pl.col("gpus").max())
        .join(has, on=NODE, how="left")
        .select(
            *NODE,
            "alone",
            node_days=(time_ns.clip(upper_bound=tables.until_ns - tables.since_ns)) / DAY_NS,
        )
    )


def clip_tables(tables: Tables, since_ns: int, until_ns: int) -> Tables:
    """Return the records of a window.

    Jobs that ran in it, events in it, outages that overlap it, nodes and checks known before its
    end.
    """
    at = pl.col("t_ns")
    inside = at.is_between(since_ns, until_ns, closed="left")
    lasts = pl.col("until_ns").is_null() | (pl.col("until_ns") > since_ns)
    begun = pl.col("start_ns").is_null() | (pl.col("start_ns") < until_ns)
    return Tables(
        jobs=tables.jobs.filter((at >= since_ns) & begun),
        findings=tables.findings.filter(inside),
        outages=tables.outages.filter((at < until_ns) & lasts),
        repairs=tables.repairs.filter(inside),
        nodes=tables.nodes.filter(at < until_ns),
        checks=tables.checks.filter(at < until_ns),
        interruptions=tables.interruptions.filter(inside),
        costs=tables.costs.filter(inside),
        since_ns=since_ns,
        until_ns=until_ns,
    )


def span_days(tables: Tables) -> float:
    """Return the length of the window in days."""
    return (tables.until_ns - tables.since_ns) / SECOND_NS / 86_400


def _excluded(tables: Tables) -> pl.LazyFrame:
    excluding = tables.jobs.filter(pl.col("excluded") != "").select("cluster", "job", "excluded")
    return (
        explode_hosts(excluding.unique(), "excluded")
        .group_by(NODE)
        .agg(excl_jobid_count=pl.col("job").n_unique().cast(pl.Int64))
    )


def _many() -> pl.Expr:
    return pl.len().cast(pl.Int64)
