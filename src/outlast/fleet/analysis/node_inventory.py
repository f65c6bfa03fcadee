"""Inventory of a cluster's nodes, and the days of each in the window."""

from __future__ import annotations

import polars as pl

from outlast.fleet.host_lists import HOSTS_MAX, nodes_of
from outlast.fleet.record_tables import DAY_NS, Tables
from outlast.text_formatting import plural

DENSE = 0.5  # of a numbering, from which on its gaps count as nodes without records
NODE = ["cluster", "node"]


def node_inventory(tables: Tables) -> pl.DataFrame:
    """Return `cluster`, `node`, `begin_ns` and the `days` of the window in which it existed.

    A node exists from its first NodeSeen on. Without one, a node that an outage, a finding, a
    repair or a job names existed in the whole window; so did, without any NodeSeen or job, the
    nodes in the gaps of a dense numbering. Nodes without any record are missing, and rates come out
    too high (see `inventory_notes`).
    """
    return (
        pl.concat([_listed_from(tables), *_mentioned_nodes(tables), _gaps(tables)])
        .group_by(NODE)
        .agg(begin_ns=pl.col("t_ns").min().clip(lower_bound=tables.since_ns))
        .with_columns(days=(tables.until_ns - pl.col("begin_ns")) / DAY_NS)
        .sort(NODE)
        .collect()
    )


def inventory_notes(tables: Tables) -> list[str]:
    """Return a note if the window's records only name nodes with problems."""
    if _listed(tables):
        return []
    named = pl.concat(_mentioned_nodes(tables)).select(pl.struct(NODE).n_unique()).collect().item()
    if not named:
        return []
    added = _gaps(tables).select(pl.len()).collect().item()
    how = f"{plural(named, 'node')} named by outages, findings and repairs"
    if added:
        how += f", and {added:,} in the gaps of their numbers"
    return [
        f"no log lists the nodes: {how} are taken for all. If there are more, rates are too high"
        ' and lemons are missed; ingest a list of nodes (rows = "nodes" in a mapping)'
    ]


def _listed(tables: Tables) -> bool:
    """Return whether a NodeSeen or a job names nodes, not only problems of nodes."""
    ran = pl.col("start_ns").is_not_null() & (pl.col("hosts") != "")
    return bool(
        tables.nodes.select(pl.len()).collect().item()
        or tables.jobs.select(ran.any()).collect().item()
    )


def _listed_from(tables: Tables) -> pl.LazyFrame:
    return tables.nodes.filter(pl.col("t_ns") < tables.until_ns).select(*NODE, "t_ns")


def _mentioned_nodes(tables: Tables) -> list[pl.LazyFrame]:
    """Return the nodes that records name without a NodeSeen, from the window's begin on."""
    begun = pl.lit(tables.since_ns, dtype=pl.Int64).alias("t_ns")
    ran = tables.jobs.filter(pl.col("start_ns").is_not_null(), pl.col("hosts") != "")
    lists = ran.select("cluster", "hosts").unique()
    of_jobs = lists.join(nodes_of(lists), on="hosts").select(NODE)
    kinds = (tables.outages, tables.findings, tables.repairs)
    listed = tables.nodes.select(NODE).unique()
    return [
        each.unique().join(listed, on=NODE, how="anti").with_columns(begun)
        for each in (of_jobs, *(kind.filter(pl.col("node") != "").select(NODE) for kind in kinds))
    ]


def _gaps(tables: Tables) -> pl.LazyFrame:
    """Return the nodes in the gaps of numberings of which at least DENSE is named."""
    none = pl.LazyFrame(schema={"cluster": pl.String, "node": pl.String, "t_ns": pl.Int64})
    if _listed(tables):
        return none
    number = pl.col("node").str.extract(r"(\d{1,9})$")
    found = (
        pl.concat(_mentioned_nodes(tables))
        .select(NODE)
        .unique()
        .with_columns(digits=number)
        .drop_nulls("digits")
        .with_columns(
            stem=pl.col("node").str.replace(r"\d{1,9}$", ""),
            # 9 and 10 belong together, and so do 09 and 10, by their width
            width=pl.when(pl.col("digits").str.starts_with("0"))
            .then(pl.col("digits").str.len_chars())
            .otherwise(0),
            number=pl.col("digits").cast(pl.Int64),
        )
        .collect()
    )
    padded = found.filter(pl.col("width") > 0).select("cluster", "stem", as_wide="width").unique()
    wide = found.join(
        padded.group_by("cluster", "stem").agg(pl.col("as_wide").max()),
        on=["cluster", "stem"],
        how="left",
    ).with_columns(pl.col("as_wide").fill_null(0))
    groups = wide.group_by("cluster", "stem", "as_wide").agg(
        many=pl.len(), low=pl.col("number").min(), high=pl.col("number").max()
    )
    size = pl.col("high") - pl.col("low") + 1
    dense = groups.filter(pl.col("many") >= 3, pl.col("many") >= DENSE * size, size <= HOSTS_MAX)
    if dense.is_empty():
        return none
    spelled = pl.col("number").cast(pl.String)
    filled = (
        dense.with_columns(number=pl.int_ranges("low", pl.col("high") + 1))
        .explode("number")
        .with_columns(node=pl.concat_str("stem", spelled.str.zfill(pl.col("as_wide"))))
        .select(NODE)
        .join(found.select(NODE), on=NODE, how="anti")
        .with_columns(t_ns=pl.lit(tables.since_ns, dtype=pl.Int64))
    )
    return filled.lazy()
