"""Selection from a lake: one cluster, a time window, one name for each node."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from functools import lru_cache

import polars as pl

from outlast.errors import UsageError
from outlast.fleet.analysis import exposure
from outlast.fleet.host_lists import nodes_of
from outlast.fleet.lake import Lake, LakePart, day_number, format_time
from outlast.fleet.record_tables import DAY_NS, KIND_OF, NAMES, Name, Tables
from outlast.text_formatting import plural

SHOWN = 8  # names of clusters in a message


@lru_cache(maxsize=4)  # a lake does not change once it is opened
def cluster_names(lake: Lake) -> dict[str, set[str]]:
    """Return the cluster names of each kind of record in the whole lake; "" is one without."""
    tables = lake.tables()
    return {
        kind: set(getattr(tables, kind).select(pl.col("cluster").unique()).collect()["cluster"])
        for kind in KIND_OF
    }


def resolve_cluster(lake: Lake, cluster: str | None) -> str:
    """Return the cluster to analyse: the given one, else the only one of the lake.

    "" stands for records whose source names no cluster. Raises UsageError if the lake holds several
    clusters and none is given, and for a cluster that the lake does not hold.
    """
    of = cluster_names(lake)
    named = sorted(set[str]().union(*of.values()) - {""})
    several = len(named) > 1 or ("" in of["jobs"] and len(of["jobs"]) > 1)
    known = [*named, ""] if any("" in each for each in of.values()) else named
    if cluster is not None:
        if cluster not in known:
            raise UsageError(f"--cluster {cluster}: {lake.path} has {_format_names(known)}")
        return cluster
    if several:
        raise UsageError(
            f"{lake.path} holds several clusters, which cannot be analysed together: pass --cluster"
            f" with one of {_format_names(known)}"
        )
    return named[0] if named else ""


def select_cluster(tables: Tables, lake: Lake, cluster: str, notes: list[str]) -> Tables:
    """Return the records of one cluster of a lake.

    Records without a cluster belong to it if it is the only one that the lake names, except jobs if
    some jobs have the name: the same jobs may have been ingested twice. Others are dropped, and
    `notes` gets their number.
    """
    of = cluster_names(lake)
    named = set[str]().union(*of.values()) - {""}
    only = named <= {cluster}
    name = pl.lit(cluster)
    chosen: dict[str, pl.LazyFrame] = {}
    ignored: dict[str, int] = {}
    for kind in NAMES.values():
        frame: pl.LazyFrame = getattr(tables, kind)
        filled = only and "" in of[kind] and (kind != "jobs" or of[kind] == {""})
        if filled:
            own = pl.col("cluster").is_in(["", cluster])
            chosen[kind] = frame.filter(own).with_columns(cluster=name)
            continue
        chosen[kind] = frame if of[kind] <= {cluster} else frame.filter(pl.col("cluster") == name)
        if cluster and "" in of[kind]:
            ignored[kind] = int(frame.select((pl.col("cluster") == "").sum()).collect().item())
    counts = [plural(count, kind[:-1]) for kind, count in ignored.items() if count]
    if counts:
        notes.append(
            f"{' and '.join(counts)} of no named cluster left out: read their logs again with"
            f" --cluster, into a new lake, or look at them with --cluster ''"
        )
    return tables._replace(**chosen)


def select_partition(tables: Tables, partition: str | None, notes: list[str]) -> Tables:
    """Return tables with the jobs of one partition alone, as if the scheduler had no other.

    Records of nodes stay. None: all jobs. Raises UsageError for a partition without a job in the
    window.
    """
    if partition is None:
        return tables
    known = set(tables.jobs.select(pl.col("partition").unique()).collect()["partition"])
    if partition not in known:
        names = _format_names(sorted(known - {""}) + [""] * ("" in known), "partition")
        raise UsageError(
            f"--partition {partition}: no job of it is in the window, which has {names or 'no job'}"
        )
    jobs = tables.jobs.filter(pl.col("partition") == partition)
    notes.append(
        f"only jobs of partition {partition or chr(39) * 2}: those of others count neither as"
        " failures nor as running time"
    )
    ours = {
        kind: getattr(tables, kind).join(jobs, on=["cluster", "job", "attempt"], how="semi")
        for kind in ("interruptions", "costs")
    }
    return tables._replace(jobs=jobs, **ours)


def _format_names(known: list[str], kind: str = "cluster") -> str:
    shown = [name or f"'' (no {kind} named)" for name in known]
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more


BY_NODE: tuple[Name, ...] = ("nodes", "outages", "findings", "repairs", "interruptions")
"""Kinds of records that name one node."""


def unify_node_names(tables: Tables, notes: list[str]) -> Tables:
    """Return tables of one cluster in which a node has the name that its jobs have.

    `n1.example.org` becomes `n1` if jobs (else the list of nodes, else outages) name `n1` and only
    one longer name begins so; `n1` becomes `n1.example.org` if only one of their names begins so.
    Upper and lower case are alike. An ambiguous name is unchanged. `notes` gets both.
    """
    names_of = {kind: _names(getattr(tables, kind)) for kind in BY_NODE}
    lists = tables.jobs.select("hosts").filter(pl.col("hosts") != "").unique()
    variant = pl.col("hosts").str.contains(r"[.\p{Lu}]").any()
    if not lists.select(variant).collect().item() and not any(
        "." in name or name != name.lower() for names in names_of.values() for name in names
    ):
        return tables
    ours = set(nodes_of(lists).select(pl.col("node").unique()).collect()["node"])
    ours = ours or names_of["nodes"] or names_of["outages"]
    table, unclear = _translate_names(ours, set[str]().union(*names_of.values()) - ours)
    if unclear:
        notes.append(
            f"{plural(len(unclear), 'name')} of nodes could be several ({min(unclear)}): their"
            " records are attributed to no job; write names alike, or read each site into its own"
            " lake"
        )
    if not table:
        return tables
    theirs = min(table)
    notes.append(
        f"{plural(len(table), 'node')} written in two ways taken for one each:"
        f" {theirs} is {table[theirs]}"
    )
    node = pl.col("node")
    alike = node.replace_strict(list(table), list(table.values()), default=node)
    return tables._replace(
        **{
            kind: getattr(tables, kind).with_columns(node=alike)
            for kind in BY_NODE
            if names_of[kind] & table.keys()
        }
    )


def _translate_names(ours: set[str], other_names: set[str]) -> tuple[dict[str, str], list[str]]:
    """Return our name for each of the others that is clear, and those that could be several."""
    by_host: dict[str, list[str]] = {}
    for name in ours:
        by_host.setdefault(_host_part(name).lower(), []).append(name)
    begins = Counter(
        _host_part(name)
        for name in {name.lower() for name in other_names}
        if _host_part(name) != name
    )
    table: dict[str, str] = {}
    unclear: list[str] = []
    for name in sorted(other_names):
        host = _host_part(name).lower()
        candidates = by_host.get(host, [])
        alike = [each for each in candidates if each.lower() == name.lower()]
        if alike:
            candidates = alike
        elif host != name.lower():
            short = [each for each in candidates if _host_part(each) == each]
            candidates = short * begins[host]
        if len(candidates) == 1:
            table[name] = candidates[0]
        elif candidates:
            unclear.append(name)
    return table, unclear


def _host_part(name: str) -> str:
    """Return a name up to its first dot; an address of digits stays whole."""
    first = name.partition(".")[0]
    return name if first.isdecimal() else first


def _names(frame: pl.LazyFrame) -> set[str]:
    return set(frame.select(pl.col("node").unique()).collect()["node"]) - {""}


LONGEST_DAYS = 30  # after all other records: a job that ends later has a wrong date
GAP_DAYS = 60  # without a job, beyond which a few jobs are assumed to have a wrong date
FEW_SHARE = 0.001
YEARS = (1700, 2250)  # of a window: nanoseconds in 64 bits
NEAR_NS = 3600 * 10**9  # margin for findings of failures at the ends of a window


def load_window(
    lake: Lake,
    since: str | None = None,
    until: str | None = None,
    *,
    cluster: str | None = None,
    partition: str | None = None,
    notes: list[str] | None = None,
) -> Tables:
    """Return the records from `since` up to, not including, `until`.

    Dates or times, UTC without a zone; by default the period with jobs, or without any, with other
    events. Raises UsageError and LakeError. Otherwise as `load_period` and `select_partition`.
    """
    first, last = known_period(lake, cluster, notes)
    since_ns = first if since is None else parse_flag_time("--since", since)
    until_ns = last if until is None else parse_flag_time("--until", until)
    if since_ns >= until_ns:
        begin = since or format_time(since_ns)
        end = until or format_time(until_ns)
        raise UsageError(f"--since {begin} is not before --until {end}: no time is between them")
    found = load_period(lake, since_ns, until_ns, cluster=cluster, notes=notes)
    if notes is not None:
        _outside_bandwidths(lake, since_ns, until_ns, notes)
    return select_partition(found, partition, [] if notes is None else notes)


def load_period(
    lake: Lake,
    since_ns: int,
    until_ns: int,
    *,
    cluster: str | None = None,
    notes: list[str] | None = None,
) -> Tables:
    """Return the events of a period, and the findings related to them.

    Jobs that began in the period and ended later are included, since time without a failure counts
    (`exposure.attempts`), unless they end over LONGEST_DAYS after all other records. So are
    findings within an hour around the period, which relate to failures at its ends. They are of one
    `cluster` (`resolve_cluster`); `notes` gets the records that were dropped or merged. Raises
    LakeError, UsageError.
    """
    all_notes = [] if notes is None else notes
    cluster_name = resolve_cluster(lake, cluster)
    lake.tables(since_ns, until_ns)  # one that lies outside of the lake is refused
    near = lake.tables(since_ns - NEAR_NS, until_ns + NEAR_NS)
    _, last_ns = known_period(lake, cluster_name)
    longer = lake.tables(since_ns, max(until_ns, last_ns) + LONGEST_DAYS * DAY_NS).jobs
    began = (pl.col("t_ns") < until_ns) | (pl.col("start_ns") < until_ns)
    chosen = near._replace(jobs=longer.filter(began), since_ns=since_ns, until_ns=until_ns)
    alone = select_cluster(chosen, lake, cluster_name, all_notes)
    return exposure.without_contradicted(unify_node_names(alone, all_notes), all_notes)


def parse_flag_time(flag: str, text: str) -> int:
    """Return nanoseconds since 1970. Raises UsageError, which names the flag."""
    try:
        when = dt.datetime.fromisoformat(text)
        at = when if when.tzinfo else when.replace(tzinfo=dt.UTC)
        since_1970 = at - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{flag} {text}: not a date or time, as in 2024-05-01 or 2024-05-01T12:00+02:00"
        ) from error
    if not YEARS[0] <= at.year < YEARS[1]:
        raise UsageError(f"{flag} {text}: give a year from {YEARS[0]} to {YEARS[1] - 1}")
    return since_1970 // dt.timedelta(microseconds=1) * 1000


def known_period(
    lake: Lake, cluster: str | None = None, notes: list[str] | None = None
) -> tuple[int, int]:
    """Return the period of a cluster's records in the lake (`resolve_cluster`).

    Of jobs, from the first end on, since an earlier NodeSeen does not show that jobs were recorded;
    with runs of `outlast run` alone, from the first start on. Without jobs, the period of the logs
    with other events. At most until the last ingestion. A few jobs far from all others (a wrong
    year) do not move an end: `notes` gets them.
    """
    cluster_name = resolve_cluster(lake, cluster)
    first, last = _mentioned_days(lake, cluster_name, [] if notes is None else notes)
    read_ns = max((source.read_ns for source in lake.manifest.sources), default=last)
    return first, min(last, read_ns) if read_ns > first else last


def _mentioned_days(lake: Lake, cluster: str, notes: list[str]) -> tuple[int, int]:
    jobs = [part for part in lake.manifest.parts if part.kind == "jobs"]
    has_others = any(name not in ("", cluster) for name in cluster_names(lake)["jobs"])
    if jobs and not has_others:
        main = _main_stretch(jobs, notes)
        first = min(part.first_ns for part in main)
        return min(first, *_run_starts(lake, first)), max(part.last_ns for part in main) + 1
    for kinds in (("jobs",), ("outages", "findings", "repairs")) if has_others else ():
        spans = [
            getattr(lake.tables(), kind)
            .filter(pl.col("cluster") == cluster)
            .select(first=pl.col("t_ns").min(), last=pl.col("t_ns").max())
            .collect()
            for kind in kinds
        ]
        span = pl.concat(spans).drop_nulls()
        if len(span):
            return int(span["first"].to_numpy().min()), int(span["last"].to_numpy().max()) + 1
    begun = [
        source.since_ns
        for source in lake.manifest.sources
        if source.since_ns is not None
        and not source.records.get("bandwidths")  # a benchmark covers its own time only
        and any(source.records.get(kind) for kind in ("outages", "findings", "repairs"))
    ]
    if not begun:
        return lake.since_ns, lake.until_ns
    parts = [part for part in lake.manifest.parts if part.kind != "bandwidths"]
    return min(begun), max(part.last_ns for part in parts) + 1


def _outside_bandwidths(lake: Lake, since_ns: int, until_ns: int, notes: list[str]) -> None:
    """Note the benchmarks outside of a window, which is that of the jobs if none is given."""
    parts = [part for part in lake.manifest.parts if part.kind == "bandwidths"]
    outside = [part for part in parts if part.first_ns < since_ns or part.last_ns >= until_ns]
    if outside:
        first = format_time(min(part.first_ns for part in outside))
        last = format_time(max(part.last_ns for part in outside))
        notes.append(
            f"benchmarks of collectives from {first} to {last} are not all in the window: --since"
            " and --until reach them"
        )


def _run_starts(lake: Lake, until_ns: int) -> list[int]:
    """Return the begins of `outlast run` runs, if there are no other jobs.

    A run is known from its start, which dates its costs.
    """
    sources = [source for source in lake.manifest.sources if source.records.get("jobs")]
    if any(source.format != "run" for source in sources):
        return [until_ns]
    begun = [part.first_ns for part in lake.manifest.parts if part.kind == "costs"]
    return [until_ns, *begun]


def _main_stretch(jobs: list[LakePart], notes: list[str]) -> list[LakePart]:
    """Return the days of jobs without outliers.

    Outliers are days at either end with at most FEW_SHARE of the jobs, more than GAP_DAYS from all
    others.
    """
    days = sorted(jobs, key=lambda part: part.day)
    most = FEW_SHARE * sum(part.rows for part in days)
    first = 0
    last = len(days)
    rows = 0
    for at in range(1, len(days)):
        rows += days[at - 1].rows
        if rows > most:
            break
        if day_number(days[at].day) - day_number(days[at - 1].day) > GAP_DAYS:
            first = at
    rows = 0
    for at in range(len(days) - 1, first, -1):
        rows += days[at].rows
        if rows > most:
            break
        if day_number(days[at].day) - day_number(days[at - 1].day) > GAP_DAYS:
            last = at
    for stretch, flag in ((days[:first], "--since"), (days[last:], "--until")):
        if stretch:
            total = plural(sum(part.rows for part in stretch), "job")
            notes.append(
                f"{total} from {stretch[0].day} to {stretch[-1].day} lie over {GAP_DAYS} days from"
                f" all others and are outside of the window: {flag} reaches them"
            )
    return days[first:last]
