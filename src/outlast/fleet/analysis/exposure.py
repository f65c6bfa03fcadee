"""Inventory of nodes, and the exposure of jobs, nodes and GPUs to failures."""

from __future__ import annotations

from typing import Literal, NamedTuple

import polars as pl

from outlast.errors import UsageError
from outlast.fleet.host_lists import HOSTS_MAX, NODE_GPUS_MAX, nodes_of
from outlast.fleet.lake import UNFINISHED
from outlast.fleet.record_tables import DAY_NS, Tables
from outlast.text_formatting import plural

KEY = ("cluster", "job", "attempt")
SECOND_NS = 10**9
HOUR_S = 3600.0
DAY_S = 86_400.0
LARGE_GPUS = 128  # failure rates are of jobs above this
NODE_GPUS = 8  # default without a list of nodes and without jobs
WHOLE_NODE_GPUS = 4  # per node, from which on a job on several nodes is assumed exclusive
USED_SHARE = 0.05  # of the GPU time, in jobs with at least so many GPUs per node


def check_size(above_gpus: int) -> None:
    """Raise UsageError for a size of jobs that no cluster has."""
    if not 0 <= above_gpus <= HOSTS_MAX * NODE_GPUS_MAX:
        raise UsageError(
            f"--above-gpus {above_gpus}: give a number of GPUs from 0 to"
            f" {HOSTS_MAX * NODE_GPUS_MAX:,}"
        )


class NodeGpus(NamedTuple):
    """GPUs per node. `source`: a list of nodes, the jobs' allocations, or neither (NODE_GPUS)."""

    gpus: int
    source: Literal["nodes", "jobs", "assumed"]


def gpus_per_node(tables: Tables) -> NodeGpus:
    """Return the GPUs of most listed nodes; else the most that jobs held of a node.

    Jobs count if they hold equally many GPUs of each of their nodes, and if those with so many or
    more have USED_SHARE of their GPU time.
    """
    listed = tables.nodes.filter(pl.col("gpus") > 0).group_by("gpus").len().sort("len", "gpus")
    table = listed.collect()
    if len(table):
        return NodeGpus(int(table["gpus"][-1]), "nodes")
    used = _gpus_of_a_node(tables).collect()
    if not len(used):
        return NodeGpus(NODE_GPUS, "assumed")
    return NodeGpus(int(used["each"].item()), "jobs")


def _gpus_of_a_node(tables: Tables, *by: str) -> pl.LazyFrame:
    """Return `each`, the most GPUs of a node that jobs held for USED_SHARE of their GPU time."""
    held_ns = (pl.col("t_ns") - pl.col("start_ns")).clip(lower_bound=1).cast(pl.Float64)
    sums = (
        tables.jobs.filter(
            pl.col("start_ns").is_not_null(),
            pl.col("gpus") > 0,
            pl.col("nodes") > 0,
            pl.col("gpus") % pl.col("nodes") == 0,
        )
        .group_by(*by, each=pl.col("gpus") // pl.col("nodes"))
        .agg(spent=(held_ns * pl.col("gpus")).sum())
        .sort("each", descending=True)
    )
    so_far = pl.col("spent").cum_sum()
    total = pl.col("spent").sum()
    if by:
        so_far = so_far.over(by)
        total = total.over(by)
    enough = sums.filter(so_far >= USED_SHARE * total)
    return enough.group_by(*by).agg(pl.col("each").max()) if by else enough.head(1).select("each")


def attempts(tables: Tables) -> pl.LazyFrame:
    """Return the attempts that held nodes in the window, with their exposure.

    Added columns:

    - `begin_ns` and `ran_s`: begin and seconds of the time inside the window, in which a failure
    would have been counted. An attempt that ended later, or has not ended, counts until the window
    ends or until its last record. 0 if it ended before it began.

    - `held_nodes`: its nodes; a job on GPUs counts by its share of their GPUs, so that eight jobs
    with a GPU each are on one node.

    - `node_days`, `gpu_hours`: the time times `held_nodes`, or times its GPUs.

    - `ended`: its end lies in the window, so that it can have failed there.

    - `run`: one user's jobs of one name (or the job, if it has none), so that restarts belong
    together.
    """
    begin = pl.col("start_ns").clip(lower_bound=tables.since_ns)
    end = pl.col("t_ns").clip(upper_bound=tables.until_ns)
    inside = pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
    named = pl.when(pl.col("name") != "").then(pl.col("name")).otherwise(pl.col("job"))
    ran = (end - begin).clip(lower_bound=0) / SECOND_NS
    return (
        tables.jobs.filter(
            pl.col("start_ns").is_not_null(),
            pl.col("start_ns") < tables.until_ns,
            pl.col("t_ns") >= tables.since_ns,
        )
        .with_columns(
            begin_ns=begin,
            ran_s=ran,
            ended=inside & ~pl.col("state").is_in(UNFINISHED),
            run=pl.struct("cluster", "user", named.alias("named")).hash(),
        )
        .pipe(_with_held_nodes, tables)
        .with_columns(
            node_days=pl.col("held_nodes") * pl.col("ran_s") / DAY_S,
            gpu_hours=pl.col("gpus") * pl.col("ran_s") / HOUR_S,
        )
    )


def _with_held_nodes(jobs: pl.LazyFrame, tables: Tables) -> pl.LazyFrame:
    """Add `held_nodes`, by the GPUs of the job's own nodes if these are listed.

    Else by the GPUs that jobs on several nodes show for the partition, else by the cluster's.
    """
    count, source = gpus_per_node(tables)
    capacity = count * pl.col("nodes")
    if source == "nodes" and _kinds(tables) > 1:
        of = tables.nodes.sort("t_ns").group_by("cluster", "node").agg(pl.col("gpus").last())
        lists = nodes_of(tables.jobs).join(of, on="node")
        known = lists.group_by("cluster", "hosts").agg(
            listed=pl.len().cast(pl.Int64), has=pl.col("gpus").sum()
        )
        jobs = jobs.join(known, on=["cluster", "hosts"], how="left", maintain_order="left")
        own = pl.col("has") + count * (pl.col("nodes") - pl.col("listed"))
        capacity = pl.when(pl.col("has") > 0).then(own).otherwise(capacity)
    elif source == "jobs":
        several = tables._replace(jobs=tables.jobs.filter(pl.col("nodes") > 1))
        known = _gpus_of_a_node(several, "partition").filter(pl.col("each") >= WHOLE_NODE_GPUS)
        jobs = jobs.join(known, on="partition", how="left", maintain_order="left")
        capacity = pl.col("each").fill_null(count) * pl.col("nodes")
    share = (pl.col("gpus") / capacity).clip(upper_bound=1.0)
    on_some = (pl.col("gpus") > 0) & (pl.col("nodes") > 0)
    held_nodes = pl.when(on_some).then(pl.col("nodes") * share).otherwise(pl.col("nodes"))
    columns = tables.jobs.collect_schema().names()
    extra = ("begin_ns", "ran_s", "ended", "run", "held_nodes")
    return jobs.with_columns(held_nodes=held_nodes.cast(pl.Float64)).select(*columns, *extra)


def _kinds(tables: Tables) -> int:
    """Return the number of different GPU counts among the listed nodes."""
    return int(tables.nodes.select(pl.col("gpus").n_unique()).collect().item())


def on_gpus(tables: Tables) -> pl.LazyFrame:
    """Return the attempts that held GPUs."""
    return attempts(tables).filter(pl.col("gpus") > 0)


def has_gpus(tables: Tables) -> bool:
    """Return whether any job held GPUs."""
    return bool(tables.jobs.select((pl.col("gpus") > 0).any()).collect().item())


def in_whole_nodes(gpus: pl.Expr, node_gpus: int = NODE_GPUS) -> pl.Expr:
    """Round GPUs up to the next multiple of a node's."""
    return (gpus + node_gpus - 1) // node_gpus * node_gpus


def job_node_days(tables: Tables) -> pl.DataFrame:
    """Return the `node_days` that jobs held on each `day` of the window (days since 1970, UTC).

    If any job held GPUs, only jobs on GPUs count, by their share of a node's GPUs.
    """
    end_ns = pl.col("begin_ns") + (pl.col("ran_s") * SECOND_NS).cast(pl.Int64)
    ran = on_gpus(tables) if has_gpus(tables) else attempts(tables)
    intervals = ran.select("begin_ns", nodes="held_nodes", end_ns=end_ns)
    return node_days_by_day(intervals, tables).rename({"spent": "node_days"})


def node_days_by_day(intervals: pl.LazyFrame, tables: Tables) -> pl.DataFrame:
    """Return the node-days that `nodes` were held, for every `day` of the window.

    `intervals` has `begin_ns`, `end_ns` and `nodes`; days count since 1970, UTC; the last may be a
    part of one.

    With A(t) = sum of nodes x (t - begin) over what began before t, and B(t) the same of ends, up
    to a day's end A - B was held: two sums by day, and no row for each job and day.
    """
    first = tables.since_ns // DAY_NS
    last = (tables.until_ns - 1) // DAY_NS
    days = pl.DataFrame({"day": range(first, last + 1)}, schema={"day": pl.Int64})
    so_far = _days_since(intervals, "begin_ns", days) - _days_since(intervals, "end_ns", days)
    return days.with_columns(spent=(so_far - so_far.shift(1, fill_value=0.0)).clip(lower_bound=0))


def whole_days(calendar: pl.DataFrame, tables: Tables) -> pl.DataFrame:
    """Return the days of a calendar that lie completely in the window."""
    begun = pl.col("day") * DAY_NS
    over = (pl.col("day") + 1) * DAY_NS
    return calendar.filter(begun >= tables.since_ns, over <= tables.until_ns)


def per_1000(failures: str, node_days: str) -> pl.Expr:
    """Return failures per 1000 node-days; null below 1e-6 node-days."""
    spent_days = pl.col(node_days)
    return pl.when(spent_days > 1e-6).then(1000 * pl.col(failures) / spent_days)


def _days_since(intervals: pl.LazyFrame, moment: str, days: pl.DataFrame) -> pl.Series:
    """Return the node-days from the moments on, up to the end of each day."""
    origin_ns = int(days["day"][0]) * DAY_NS
    on = (pl.col(moment) - origin_ns) / (SECOND_NS * DAY_S)
    day = pl.min_horizontal(pl.col(moment) // DAY_NS, pl.lit(int(days["day"][-1])))
    sums = (
        intervals.group_by(day=day)
        .agg(nodes=pl.col("nodes").sum(), begun=(pl.col("nodes") * on).sum())
        .collect()
    )
    by_day = days.join(sums, on="day", how="left", maintain_order="left").fill_null(0)
    passed = (by_day["day"] - by_day["day"][0] + 1).cast(pl.Float64)
    return passed * by_day["nodes"].cum_sum() - by_day["begun"].cum_sum()


NAMED_SHARE = 0.5  # of jobs with a host list, from which on the lists show a cluster's size
DOMINANT_SHARE = 0.25  # of all node-days
ATTEMPTS_MIN = 10


def without_contradicted(tables: Tables, notes: list[str]) -> Tables:
    """Return tables without jobs that claim more nodes than the cluster is known to have.

    These have a number of nodes and no readable list, in a log where most jobs have one. `notes`
    gets their number and the largest.
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
    count = int(tables.jobs.select(wrong.sum()).collect().item())
    notes.append(
        f"{plural(count, 'job')} left out: without a readable list of nodes, and with up to"
        f" {largest:,} of them where all others name {nodes:,}"
    )
    return tables._replace(jobs=tables.jobs.filter(~wrong.fill_null(value=False)))


def dominant_attempts(tables: Tables) -> list[str]:
    """Return a note about each attempt that holds over DOMINANT_SHARE of all node-days on GPUs.

    Its record may be wrong.
    """
    ran = on_gpus(tables).select("job", "attempt", "nodes", "node_days").collect()
    total_days = float(ran["node_days"].sum())
    if len(ran) < ATTEMPTS_MIN or total_days <= 0:
        return []
    large = ran.filter(pl.col("node_days") > DOMINANT_SHARE * total_days).sort("node_days", "job")
    return [
        f"job {job} alone holds {100 * days / total_days:.0f} % of all node-days on GPUs"
        f" ({plural(nodes, 'node')} for {days / max(nodes, 1):.3g} days): rates rest on it"
        for job, nodes, days in large.select("job", "nodes", "node_days").iter_rows()
    ]


DENSE = 0.5  # of a numbering, from which on its gaps count as nodes without records
NODE = ["cluster", "node"]


def node_inventory(tables: Tables, host_lists: pl.LazyFrame | None = None) -> pl.DataFrame:
    """Return `cluster`, `node`, `begin_ns` and the `days` of the window in which it existed.

    A node exists from its first NodeSeen on. Without one, a node that an outage, a finding, a
    repair or a job names existed in the whole window; so did, without any NodeSeen or job, the
    nodes in the gaps of a dense numbering. Nodes without any record are missing, and rates come out
    too high (see `inventory_notes`). `host_lists`: `nodes_of` the jobs, if known already.
    """
    mentioned = _mentioned_nodes(tables, host_lists)
    return (
        pl.concat([_listed_nodes(tables), *mentioned, _inventory_gaps(tables)])
        .group_by(NODE)
        .agg(begin_ns=pl.col("t_ns").min().clip(lower_bound=tables.since_ns))
        .with_columns(days=(tables.until_ns - pl.col("begin_ns")) / DAY_NS)
        .sort(NODE)
        .collect()
    )


def inventory_notes(tables: Tables) -> list[str]:
    """Return a note if the window's records only name nodes with problems."""
    if _has_inventory(tables):
        return []
    named = pl.concat(_mentioned_nodes(tables)).select(pl.struct(NODE).n_unique()).collect().item()
    if not named:
        return []
    added = _inventory_gaps(tables).select(pl.len()).collect().item()
    how = f"{plural(named, 'node')} named by outages, findings and repairs"
    if added:
        how += f", and {added:,} in the gaps of their numbers"
    return [
        f"no log lists the nodes: {how} are taken for all. If there are more, rates are too high"
        ' and lemons are missed; ingest a list of nodes (rows = "nodes" in a mapping)'
    ]


def _has_inventory(tables: Tables) -> bool:
    """Return whether a NodeSeen or a job names nodes, not only problems of nodes."""
    ran = pl.col("start_ns").is_not_null() & (pl.col("hosts") != "")
    return bool(
        tables.nodes.select(pl.len()).collect().item()
        or tables.jobs.select(ran.any()).collect().item()
    )


def _listed_nodes(tables: Tables) -> pl.LazyFrame:
    return tables.nodes.filter(pl.col("t_ns") < tables.until_ns).select(*NODE, "t_ns")


def _mentioned_nodes(tables: Tables, host_lists: pl.LazyFrame | None = None) -> list[pl.LazyFrame]:
    """Return the nodes that records name without a NodeSeen, from the window's begin on."""
    begun = pl.lit(tables.since_ns, dtype=pl.Int64).alias("t_ns")
    ran = tables.jobs.filter(pl.col("start_ns").is_not_null(), pl.col("hosts") != "")
    lists = ran.select("cluster", "hosts").unique()
    names = nodes_of(lists) if host_lists is None else host_lists
    of_jobs = lists.join(names, on="hosts").select(NODE)
    kinds = (tables.outages, tables.findings, tables.repairs)
    listed = tables.nodes.select(NODE).unique()
    return [
        each.unique().join(listed, on=NODE, how="anti").with_columns(begun)
        for each in (of_jobs, *(kind.filter(pl.col("node") != "").select(NODE) for kind in kinds))
    ]


def _inventory_gaps(tables: Tables) -> pl.LazyFrame:
    """Return the nodes in the gaps of numberings of which at least DENSE is named."""
    none = pl.LazyFrame(schema={"cluster": pl.String, "node": pl.String, "t_ns": pl.Int64})
    if _has_inventory(tables):
        return none
    number = pl.col("node").str.extract(r"(\d{1,9})$")
    table = (
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
    padded = table.filter(pl.col("width") > 0).select("cluster", "stem", as_wide="width").unique()
    wide = table.join(
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
        .join(table.select(NODE), on=NODE, how="anti")
        .with_columns(t_ns=pl.lit(tables.since_ns, dtype=pl.Int64))
    )
    return filled.lazy()
