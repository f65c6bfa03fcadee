"""A report: every analysis of a lake's window, what its owner asks first before the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import polars as pl

from outlast import __version__
from outlast.fleet import (
    attribution,
    blame,
    goodput,
    instigators,
    lemons,
    loops,
    mttf,
    outsized_jobs,
    present,
)
from outlast.fleet.exposure import KEY
from outlast.fleet.lake import said as said_at
from outlast.fleet.report import codes, costs, failures, nodes
from outlast.fleet.report.headlines import Headline, headlines
from outlast.fleet.report.sections import Facts, Section, Told
from outlast.fleet.signals import within
from outlast.fleet.tables import DAY_NS, Tables
from outlast.text_formatting import plural

SHORT_DAYS = 7
UNCOVERED_SHARE = 0.1  # of a window at either end without a finding, from which on it is noted
UNCOVERED_GAPS = 5  # and as many mean gaps between findings
ORDER = (
    "lemons", "parts", "goodput", "ettr", "whatif", "mttf", "survived", "causes", "codes",
    "together", "rolling", "states", "sizes", "loops", "signals", "repairs",
)  # fmt: skip


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Times in Unix nanoseconds; `records`: how many of each kind lie in the window. `notes`: how
    little it is built on, and what the logs hide."""

    version: str
    source: str
    cluster: str  # "": none is named
    since_ns: int
    until_ns: int
    records: dict[str, int]
    headlines: list[Headline]
    sections: list[Section]
    notes: list[str]


class Whole(NamedTuple):
    """A report with what draws its pictures, by section."""

    report: Report
    told: list[Told]


def report(
    tables: Tables,
    source: str,
    *,
    cluster: str = "",
    notes: list[str] | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
    on_told: Callable[[Told], object] = lambda _: None,
) -> Whole:
    """`source`: what to call where `tables` are from; `notes`: what is known of it besides.
    `on_told` is given each section as soon as it is there. All records are read into memory once.
    """
    tables = _in_memory(tables)
    facts = _facts(tables)
    told: list[Told] = []
    for one in _sections(facts):
        told.append(one)
        on_told(one)
        on_progress(len(told), len(ORDER))
    told.sort(key=lambda one: ORDER.index(one.section.key))
    in_window = within(tables, tables.since_ns, tables.until_ns)
    records = {
        name: int(frame.select(pl.len()).collect().item())
        for name, frame in in_window._asdict().items() if isinstance(frame, pl.LazyFrame)
    }  # fmt: skip
    whole = Report(
        version=__version__, source=source, cluster=cluster, since_ns=tables.since_ns,
        until_ns=tables.until_ns,
        records=records, headlines=headlines(facts, told), sections=[one.section for one in told],
        notes=[*_little(facts, records), *(notes or [])],
    )  # fmt: skip
    return Whole(whole, told)


def _sections(facts: Facts) -> Iterator[Told]:
    """What takes longest comes last, so that the others are drawn meanwhile."""
    yield costs.lost(facts)
    runs = costs.runs(facts)
    yield costs.training(runs)
    for each in (
        failures.how_long, failures.survived, failures.of_what, codes.meant, failures.together,
        failures.over_time, failures.how_jobs_end, failures.how_large, costs.again_and_again,
        failures.away,
    ):  # fmt: skip
        yield each(facts)
    window_days = (facts.tables.until_ns - facts.tables.since_ns) / DAY_NS
    history_days = max(lemons.DAYS, window_days)  # all of the window, also where it is longer
    ranking = lemons.lemons(facts.tables, facts.infra, by=facts.by, history_days=history_days)
    yield from nodes.bad_nodes(facts, ranking)
    yield costs.otherwise(facts, runs, ranking)


def _in_memory(tables: Tables) -> Tables:
    frames = {
        name: frame.collect().lazy()
        for name, frame in tables._asdict().items() if isinstance(frame, pl.LazyFrame)
    }  # fmt: skip
    return tables._replace(**frames)


def _facts(tables: Tables) -> Facts:
    found = attribution.attribute(tables)
    infra = blame.at_fault(found).collect().lazy()
    again = [one.begun_again(tables, infra).select(KEY) for one in (goodput, loops)]
    preempted = instigators.instigated(tables, pl.concat(again).unique())
    return Facts(tables, found, infra, mttf.failure_rate(tables, found), preempted)


def _little(facts: Facts, records: dict[str, int]) -> list[str]:
    tables, said = facts.tables, []
    days = (tables.until_ns - tables.since_ns) / DAY_NS
    if not records["jobs"]:
        said.append("no job is in this window: what is said of jobs is empty, not well")
    if days < SHORT_DAYS:
        said.append(f"{days:.1f} days: too short for rates that change from week to week")
    if records["jobs"] and facts.rate.failures < failures.FEW:
        said.append(
            f"r_f rests on {plural(facts.rate.failures, 'failure')}: its interval says how little"
            " that is"
        )
    said += failures.uncounted(facts)
    said += outsized_jobs.dominant(tables)
    if records["outages"] or records["repairs"]:
        said += present.notes(tables)
    if records["jobs"] and not records["findings"]:
        said.append(
            "no health findings are in this window: only NODE_FAIL is known to be"
            " infrastructure's, and causes are not known at all"
        )
    return said + _uncovered(tables)


def _uncovered(tables: Tables) -> list[str]:
    """Return a note where findings begin long after the window or end long before it: failures of
    that time that only a check tells of are not seen, and rates are too low."""
    inside = pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
    times = tables.findings.filter(inside).select("t_ns").collect()["t_ns"]
    ran = tables.jobs.select(pl.col("start_ns").is_not_null().any()).collect().item()
    if not len(times) or not ran:
        return []
    span = tables.until_ns - tables.since_ns
    long_ns = max(2 * DAY_NS, UNCOVERED_SHARE * span, UNCOVERED_GAPS * span / len(times))
    first, last = int(times.to_numpy().min()), int(times.to_numpy().max())
    if first - tables.since_ns <= long_ns and tables.until_ns - last <= long_ns:
        return []
    return [
        f"health findings are known from {said_at(first)} to {said_at(last)} only: failures"
        " outside of that time are fewer than there were, unless nothing was found then"
    ]
