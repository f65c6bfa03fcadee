"""The part of a lake that a question is about, as `--since` and `--until` say it."""

from __future__ import annotations

import datetime as dt

import polars as pl

from outlast.errors import UsageError
from outlast.fleet import clusters, node_names, outsized_jobs
from outlast.fleet.lake import Lake, Part, day_number, said
from outlast.fleet.tables import DAY_NS, Tables
from outlast.text_formatting import plural

LONGEST_DAYS = 30  # after all that is known: a job that ends later has a wrong date
GAP_DAYS = 60  # without a job, beyond which a few jobs are taken for ones with a wrong date
FEW_SHARE = 0.001
NEAR_NS = 3600 * 10**9  # so long around a window is what tells of a failure at either end of it


def window(
    lake: Lake,
    since: str | None = None,
    until: str | None = None,
    *,
    cluster: str | None = None,
    notes: list[str] | None = None,
) -> Tables:
    """Records from `since` up to, not including, `until` (dates or times, UTC where they say no
    zone); by default the time that jobs are known of, or where there are none, other events.

    Raises UsageError, LakeError, and is `between` otherwise.
    """
    first, last = known(lake, cluster, notes)
    since_ns = first if since is None else moment("--since", since)
    until_ns = last if until is None else moment("--until", until)
    if since_ns >= until_ns:
        begin, end = since or said(since_ns), until or said(until_ns)
        raise UsageError(f"--since {begin} is not before --until {end}: no time is between them")
    return between(lake, since_ns, until_ns, cluster=cluster, notes=notes)


def between(
    lake: Lake,
    since_ns: int,
    until_ns: int,
    *,
    cluster: str | None = None,
    notes: list[str] | None = None,
) -> Tables:
    """What happened in that time and what tells of it.

    Jobs that began before the window's end and ended after it are there as well: time in which
    nothing failed counts (`exposure.attempts`), but for those that end over LONGEST_DAYS after all
    that is known. So is what was found within an hour around the window, which tells of failures at
    its ends. They are of one `cluster` (`clusters.resolve`); `notes` gets what was left out or
    joined. Raises LakeError, UsageError.
    """
    said = [] if notes is None else notes
    one = clusters.resolve(lake, cluster)
    lake.tables(since_ns, until_ns)  # one that lies outside of the lake is refused
    near = lake.tables(since_ns - NEAR_NS, until_ns + NEAR_NS)
    _, last_ns = known(lake, one)
    longer = lake.tables(since_ns, max(until_ns, last_ns) + LONGEST_DAYS * DAY_NS).jobs
    began = (pl.col("t_ns") < until_ns) | (pl.col("start_ns") < until_ns)
    chosen = near._replace(jobs=longer.filter(began), since_ns=since_ns, until_ns=until_ns)
    alone = clusters.select(chosen, lake, one, said)
    return outsized_jobs.without_contradicted(node_names.joined(alone, said), said)


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


def known(
    lake: Lake, cluster: str | None = None, notes: list[str] | None = None
) -> tuple[int, int]:
    """Return from when until when things are known of a cluster (`clusters.resolve`) of the lake.

    Of jobs, from the first end of one on, as that a node was bought earlier says nothing of when
    jobs are known; of runs of `outlast run` alone, from the first start on. Where there are none,
    of other events, all the time that the logs speak of which have them. Not longer than until the
    last reading: of what is still to come nothing is known.
    A few jobs far away from all others (a wrong year) do not move an end: `notes` gets them.
    """
    one = clusters.resolve(lake, cluster)
    first, last = _spoken_of(lake, one, [] if notes is None else notes)
    read_ns = max((one.read_ns for one in lake.manifest.sources), default=last)
    return first, min(last, read_ns) if read_ns > first else last


def _spoken_of(lake: Lake, cluster: str, notes: list[str]) -> tuple[int, int]:
    jobs = [part for part in lake.manifest.parts if part.kind == "jobs"]
    others = any(one not in ("", cluster) for one in clusters.names(lake)["jobs"])
    if jobs and not others:
        kept = _main_stretch(jobs, notes)
        first = min(one.first_ns for one in kept)
        return min(first, *_runs_begun(lake, first)), max(one.last_ns for one in kept) + 1
    for kinds in (("jobs",), ("outages", "findings", "repairs")) if others else ():
        spans = [
            getattr(lake.tables(), kind).filter(pl.col("cluster") == cluster)
            .select(first=pl.col("t_ns").min(), last=pl.col("t_ns").max()).collect()
            for kind in kinds
        ]  # fmt: skip
        span = pl.concat(spans).drop_nulls()
        if len(span):
            return int(span["first"].to_numpy().min()), int(span["last"].to_numpy().max()) + 1
    begun = [
        source.since_ns
        for source in lake.manifest.sources
        if source.since_ns is not None
        and any(source.records.get(kind) for kind in ("outages", "findings", "repairs"))
    ]
    return min(begun, default=lake.since_ns), lake.until_ns


def _runs_begun(lake: Lake, until_ns: int) -> list[int]:
    """Return from when the runs of `outlast run` are known, where there are no other jobs: a run
    is known from its start, which its costs are dated by."""
    sources = [source for source in lake.manifest.sources if source.records.get("jobs")]
    if any(source.format != "run" for source in sources):
        return [until_ns]
    begun = [part.first_ns for part in lake.manifest.parts if part.kind == "costs"]
    return [until_ns, *begun]


def _main_stretch(jobs: list[Part], notes: list[str]) -> list[Part]:
    """Return the days of jobs without those at either end that hold at most FEW_SHARE of the jobs
    and lie more than GAP_DAYS away from all others."""
    days = sorted(jobs, key=lambda part: part.day)
    most = FEW_SHARE * sum(part.rows for part in days)
    first, last, rows = 0, len(days), 0
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
            many = plural(sum(part.rows for part in stretch), "job")
            notes.append(
                f"{many} from {stretch[0].day} to {stretch[-1].day} lie over {GAP_DAYS} days from"
                f" all others and are outside of the window: {flag} reaches them"
            )
    return days[first:last]
