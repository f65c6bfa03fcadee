"""A report: every analysis of a lake's window, in the order of the paper that defines them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
import polars as pl

from outlast import __version__
from outlast.fleet import attribution, blame, goodput, instigators, loops, mttf
from outlast.fleet.exposure import KEY
from outlast.fleet.intervals import garwood
from outlast.fleet.report import costs, failures, nodes
from outlast.fleet.report.sections import Facts, Section, Told
from outlast.fleet.signals import within
from outlast.fleet.tables import DAY_NS, Tables

SHORT_DAYS = 7


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """What to read first: a figure as a text, what it is, and what it rests on."""

    figure: str
    said: str
    rests_on: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Times in Unix nanoseconds; `records`: how many of each kind lie in the window. `notes`: how
    little it is built on, and what the logs hide."""

    version: str
    source: str
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
    notes: list[str] | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
    on_told: Callable[[Told], object] = lambda _: None,
) -> Whole:
    """`source`: what to call where `tables` are from; `notes`: what is known of it besides.
    `on_told` is given each section as soon as it is there. All records are read into memory once.
    """
    tables = _in_memory(tables)
    facts = _facts(tables)
    asked: list[Callable[[], tuple[Told, ...]]] = [
        lambda: (costs.lost(facts),),
        lambda: costs.training(facts),
        lambda: (failures.how_long(facts),),
        *(
            partial(_one, each, facts)
            for each in (
                failures.of_what, failures.together, failures.over_time, failures.how_jobs_end,
                failures.how_large, costs.again_and_again, failures.away,
            )
        ),
        lambda: (nodes.bad_nodes(facts),),
    ]  # fmt: skip
    told: list[Told] = []
    for done, each in enumerate(asked):
        on_progress(done, len(asked))
        for one in each():
            told.append(one)
            on_told(one)
    on_progress(len(asked), len(asked))
    told.insert(0, told.pop())  # computed last, as it takes longest: the others are drawn meanwhile
    in_window = within(tables, tables.since_ns, tables.until_ns)
    records = {
        name: int(frame.select(pl.len()).collect().item())
        for name, frame in in_window._asdict().items() if isinstance(frame, pl.LazyFrame)
    }  # fmt: skip
    whole = Report(
        version=__version__, source=source, since_ns=tables.since_ns, until_ns=tables.until_ns,
        records=records, headlines=_headlines(facts, told), sections=[one.section for one in told],
        notes=[*_little(facts, records), *(notes or [])],
    )  # fmt: skip
    return Whole(whole, told)


def _one(each: Callable[[Facts], Told], facts: Facts) -> tuple[Told]:
    return (each(facts),)


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


def _headlines(facts: Facts, told: list[Told]) -> list[Headline]:
    rows = {one.section.key: one.section.rows for one in told}
    rate, found = facts.rate, []
    if rate.per_1000_node_days is not None:
        figure = f"{rate.per_1000_node_days:.2f}"
        rests_on = f"{rate.low:.2f} to {rate.high:.2f} with 90 %; "
        if not rate.failures:  # its interval begins above 0
            figure = f"below {1000 * garwood(0)[1] / rate.node_days:.2f}"
            rests_on = f"with 95 %, after {rate.node_days:,.0f} node-days; "
        rests_on += f"{rate.failures:,} failures of jobs above {rate.above_gpus:,} GPUs"
        said = "failures in 1000 node-days (r_f)"
        found.append(Headline(figure=figure, said=said, rests_on=rests_on))
    ended = [one for one in rows["states"] if one["of"] == "infrastructure"]
    if rows["states"]:
        share = sum(one["gpu_hours_share"] or 0.0 for one in ended)
        jobs = sum(one["jobs_share"] or 0.0 for one in ended)
        found.append(
            Headline(
                figure=f"{100 * share:.3g} %",
                said="of GPU time was in attempts that infrastructure ended",
                rests_on=f"{100 * jobs:.3g} % of attempts",
            )
        )
    if rows["ettr"]:
        largest = rows["ettr"][-1]
        low, high = largest["low"], largest["high"]
        band = "" if low is None else f"{100 * low:.3g} % to {100 * high:.3g} % with 90 %; "
        found.append(
            Headline(
                figure=f"{100 * largest['ettr']:.3g} %",
                said=f"ETTR of the largest job runs (up to {largest['bucket']:,} GPUs)",
                rests_on=f"{band}{largest['runs']:,} runs, checkpoints every hour assumed",
            )
        )
    if rows["goodput"]:
        first = sum(one["first_gpu_s"] for one in rows["goodput"])
        second = sum(one["second_gpu_s"] for one in rows["goodput"])
        found.append(
            Headline(
                figure=f"{first + second:,.0f}",
                said="GPU hours of work lost to failures",
                rests_on=f"{100 * second / (first + second):.3g} % of it by preemptions that"
                " they caused"
                if first + second
                else "the attempts that they ended held no GPUs",
            )
        )
    lemons = [one for one in rows["lemons"] if one["called"]]
    found.append(
        Headline(
            figure=f"{len(lemons):,}",
            said="nodes that fail more often than chance explains",
            rests_on=", ".join(one["node"] for one in lemons[:3]) or "of those that ran jobs",
        )
    )
    return found


def _little(facts: Facts, records: dict[str, int]) -> list[str]:
    tables, said = facts.tables, []
    days = (tables.until_ns - tables.since_ns) / DAY_NS
    if not records["jobs"]:
        said.append("no job is in this window: what is said of jobs is empty, not well")
    if days < SHORT_DAYS:
        said.append(f"{days:.1f} days: too short for rates that change from week to week")
    if records["jobs"] and facts.rate.failures < failures.FEW:
        said.append(
            f"r_f rests on {facts.rate.failures} failures: its interval says how little that is"
        )
    if records["jobs"] and not records["findings"]:
        said.append(
            "no health findings were read: only NODE_FAIL is known to be infrastructure's, and"
            " causes are not known at all"
        )
    return said
