"""The part of a lake that a question is about, as `--since` and `--until` say it."""

from __future__ import annotations

import datetime as dt

import polars as pl

from outlast.errors import UsageError
from outlast.fleet.lake import Lake, said
from outlast.fleet.tables import DAY_NS, NAMES, Tables

LONGEST_DAYS = 30  # of a job: one that ends so long after the window may have run in it
NEAR_NS = 3600 * 10**9  # so long around a window is what tells of a failure at either end of it


def window(lake: Lake, since: str | None = None, until: str | None = None) -> Tables:
    """Records from `since` up to, not including, `until` (dates or times, UTC where they say no
    zone); by default the time that jobs are known of, or where there are none, other events.

    Raises UsageError, LakeError, and is `between` otherwise.
    """
    first, last = known(lake)
    since_ns = first if since is None else moment("--since", since)
    until_ns = last if until is None else moment("--until", until)
    if since_ns >= until_ns:
        begin, end = since or said(since_ns), until or said(until_ns)
        raise UsageError(f"--since {begin} is not before --until {end}: no time is between them")
    return between(lake, since_ns, until_ns)


def between(lake: Lake, since_ns: int, until_ns: int) -> Tables:
    """What happened in that time and what tells of it.

    Jobs that began in the window and ended up to LONGEST_DAYS after it are there as well: time in
    which nothing failed counts (`exposure.attempts`); and what was found within an hour around it,
    which tells of failures at its ends. Where only one cluster has a name, it is that of records
    whose source names none. Raises LakeError.
    """
    lake.tables(since_ns, until_ns)  # one that lies outside of the lake is refused
    near = lake.tables(since_ns - NEAR_NS, until_ns + NEAR_NS)
    longer = lake.tables(since_ns, until_ns + LONGEST_DAYS * DAY_NS).jobs
    began = (pl.col("t_ns") < until_ns) | (pl.col("start_ns") < until_ns)
    chosen = near._replace(jobs=longer.filter(began), since_ns=since_ns, until_ns=until_ns)
    return _of_one_cluster(chosen)


def moment(flag: str, text: str) -> int:
    """Nanoseconds since 1970. Raises UsageError, which names the flag."""
    try:
        when = dt.datetime.fromisoformat(text)
        at = when if when.tzinfo else when.replace(tzinfo=dt.UTC)
        since_1970 = at - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{flag} {text}: say a date or a time, as in 2024-05-01 or 2024-05-01T12:00+02:00"
        ) from error
    return since_1970 // dt.timedelta(microseconds=1) * 1000


def _of_one_cluster(tables: Tables) -> Tables:
    """With the name of the only cluster that has one in place of "", so that what several sources
    say of a node is said of one node. Not in jobs of which some have the name: the same ones may
    have been read with it and without."""
    clusters = {
        name: set(getattr(tables, name).select(pl.col("cluster").unique()).collect()["cluster"])
        for name in NAMES.values()
    }
    known = set[str]().union(*clusters.values()) - {""}
    if len(known) != 1:
        return tables
    (one,) = known
    named = pl.when(pl.col("cluster") != "").then(pl.col("cluster")).otherwise(pl.lit(one))
    return tables._replace(
        **{
            name: getattr(tables, name).with_columns(cluster=named)
            for name, said in clusters.items()
            if "" in said and (name != "jobs" or said == {""})
        }
    )


def known(lake: Lake) -> tuple[int, int]:
    """From when until when things are known: of jobs, from the first end of one on, as that a node
    was bought earlier says nothing of when jobs are known. Where there are none, of other events,
    all the time that the logs speak of which have them. Not longer than until the last reading: of
    what is still to come nothing is known, and one wrong year would move the last days there."""
    first, last = _spoken_of(lake)
    read_ns = max((one.read_ns for one in lake.manifest.sources), default=last)
    return first, min(last, read_ns) if read_ns > first else last


def _spoken_of(lake: Lake) -> tuple[int, int]:
    jobs = [part for part in lake.manifest.parts if part.kind == "jobs"]
    if jobs:
        return min(one.first_ns for one in jobs), max(one.last_ns for one in jobs) + 1
    begun = [
        source.since_ns
        for source in lake.manifest.sources
        if source.since_ns is not None
        and any(source.records.get(kind) for kind in ("outages", "findings", "repairs"))
    ]
    return min(begun, default=lake.since_ns), lake.until_ns
