"""The part of a lake that a question is about, as `--since` and `--until` say it."""

from __future__ import annotations

import datetime as dt

import polars as pl

from outlast.errors import UsageError
from outlast.fleet.lake import Lake, said
from outlast.fleet.tables import DAY_NS, Tables

LONGEST_DAYS = 30  # of a job: one that ends so long after the window may have run in it


def window(lake: Lake, since: str | None = None, until: str | None = None) -> Tables:
    """Records from `since` up to, not including, `until` (dates or times, UTC where they say no
    zone); by default the time that jobs are known of, or where there are none, other events.

    Jobs that began in the window and ended up to LONGEST_DAYS after it are there as well: time in
    which nothing failed counts (`exposure.attempts`); and what was found within an hour after it,
    which tells of failures at its end. Raises UsageError, LakeError.
    """
    first, last = _known(lake)
    since_ns = first if since is None else moment("--since", since)
    until_ns = last if until is None else moment("--until", until)
    if since_ns >= until_ns:
        begin, end = since or said(since_ns), until or said(until_ns)
        raise UsageError(f"--since {begin} is not before --until {end}: no time is between them")
    near = lake.tables(since_ns, until_ns + 3600 * 10**9)
    lake.tables(since_ns, until_ns)  # one that lies outside of the lake is refused
    longer = lake.tables(since_ns, until_ns + LONGEST_DAYS * DAY_NS).jobs
    began = (pl.col("t_ns") < until_ns) | (pl.col("start_ns") < until_ns)
    return near._replace(jobs=longer.filter(began), until_ns=until_ns)


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


def _known(lake: Lake) -> tuple[int, int]:
    """Of jobs, from the first end of one on: that a node was bought earlier says nothing of when
    jobs are known. Of other events, all the time that the logs speak of which have them."""
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
