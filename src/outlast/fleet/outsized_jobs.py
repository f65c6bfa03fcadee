"""Single jobs that would move every rate: records that others contradict, and dominant attempts."""

from __future__ import annotations

import polars as pl

from outlast.fleet.exposure import on_gpus
from outlast.fleet.hosts import nodes_of
from outlast.fleet.tables import Tables
from outlast.text_formatting import plural

NAMED_SHARE = 0.5  # of jobs with a host list, from which on the lists tell how large a cluster is
DOMINANT_SHARE = 0.25  # of all node-days
ATTEMPTS_MIN = 10


def without_contradicted(tables: Tables, notes: list[str]) -> Tables:
    """Return tables without jobs that claim more nodes than the cluster is known to have.

    These have a number of nodes and no readable list, in a log where most jobs have one. `notes`
    gets how many there were and the largest.
    """
    ran = pl.col("start_ns").is_not_null() & (pl.col("nodes") > 0)
    unnamed = ran & (pl.col("hosts") == "")
    listed = ran & (pl.col("hosts") != "")
    largest, most, named, every = (
        tables.jobs.select(
            pl.col("nodes").filter(unnamed).max().fill_null(0).alias("largest"),
            pl.col("nodes").filter(listed).max().fill_null(0).alias("most"),
            listed.sum().alias("named"),
            ran.sum().alias("every"),
        )
        .collect()
        .row(0)
    )
    if largest <= most or named < NAMED_SHARE * every:
        return tables
    known = [nodes_of(tables.jobs).select("node"), tables.nodes.select("node")]
    nodes = int(pl.concat(known).select(pl.col("node").n_unique()).collect().item())
    if largest <= nodes:
        return tables
    wrong = unnamed & (pl.col("nodes") > nodes)
    many = int(tables.jobs.select(wrong.sum()).collect().item())
    notes.append(
        f"{plural(many, 'job')} left out: without a readable list of nodes, and with up to"
        f" {largest:,} of them where all others name {nodes:,}"
    )
    return tables._replace(jobs=tables.jobs.filter(~wrong.fill_null(value=False)))


def dominant(tables: Tables) -> list[str]:
    """Return a note about each attempt that holds more than DOMINANT_SHARE of all node-days on
    GPUs: it may be one whose record is wrong."""
    ran = on_gpus(tables).select("job", "attempt", "nodes", "node_days").collect()
    whole = float(ran["node_days"].sum())
    if len(ran) < ATTEMPTS_MIN or whole <= 0:
        return []
    large = ran.filter(pl.col("node_days") > DOMINANT_SHARE * whole).sort("node_days", "job")
    return [
        f"job {job} alone holds {100 * days / whole:.0f} % of all node-days on GPUs"
        f" ({plural(nodes, 'node')} for {days / max(nodes, 1):.3g} days): rates rest on it"
        for job, nodes, days in large.select("job", "nodes", "node_days").iter_rows()
    ]
