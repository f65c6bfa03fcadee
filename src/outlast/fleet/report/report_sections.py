"""Sections of a report (columns, rows, notes, a figure), and its headline figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import polars as pl

from outlast.fleet.analysis import failure_rates, goodput_loss, lemons, outages
from outlast.fleet.analysis.confidence_intervals import garwood
from outlast.fleet.analysis.exposure import KEY, LARGE_GPUS
from outlast.fleet.analysis.failure_attribution import (
    AttributedFailures,
    attribute_failures,
    worst_nodes,
)
from outlast.fleet.analysis.failure_rates import FailureRate
from outlast.fleet.host_lists import nodes_of
from outlast.fleet.record_tables import DAY_NS, Tables
from outlast.text_formatting import plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Unit = Literal["", "count", "share", "hours", "days", "GPU hours", "times", "day", "p", "rate"]
SERIES_MAX = 20_000
ROWS_MAX = 1000  # of a table in a report; more are noted


class ReportColumn(msgspec.Struct, frozen=True):
    """Column of a table. `key`: in the rows."""

    key: str
    heading: str = msgspec.field(name="said")
    unit: Unit = ""


class ReportSection(msgspec.Struct, frozen=True, kw_only=True):
    """One table of a report.

    `description`: its meaning and how it is counted; rows have the keys of `columns`. `notes`:
    caveats of these data.
    """

    key: str
    title: str
    description: str = msgspec.field(name="said")
    columns: list[ReportColumn]
    rows: list[dict[str, Any]]
    notes: list[str]
    series: list[dict[str, Any]] = []  # data of the figure beyond the rows


@dataclass(frozen=True)
class ReportFacts:
    """Results that several sections need, each computed once, when it is needed.

    `tables`: in memory; `above_gpus`: size of jobs above which r_f is measured.
    """

    tables: Tables
    above_gpus: int = LARGE_GPUS

    @cached_property
    def found(self) -> AttributedFailures:
        """Failed attempts and their causes."""
        return attribute_failures(self.tables)

    @cached_property
    def infra(self) -> pl.LazyFrame:
        """KEY and node of attempts that infrastructure ended."""
        return worst_nodes(self.found).collect().lazy()

    @cached_property
    def rate(self) -> FailureRate:
        """The rate r_f of large jobs."""
        return failure_rates.failure_rate(self.tables, self.found, above_gpus=self.above_gpus)

    @cached_property
    def preempted(self) -> pl.DataFrame:
        """Attempts preempted for jobs that restarted after a failure, or in a crash loop."""
        again = [
            goodput_loss.restarted_attempts(self.tables, self.infra).select(KEY),
            goodput_loss.attempts_in_loops(self.tables, self.infra).select(KEY),
        ]
        return goodput_loss.preemption_cascades(self.tables, pl.concat(again).unique())

    @cached_property
    def host_lists(self) -> pl.DataFrame:
        """Each distinct host list of jobs with each node of it."""
        return nodes_of(self.tables.jobs).collect()

    @cached_property
    def ranking(self) -> pl.DataFrame:
        """All nodes, the likeliest lemon first, with the whole window as history."""
        days = (self.tables.until_ns - self.tables.since_ns) / DAY_NS
        history_days = max(lemons.DAYS, days)  # all of the window, also where it is longer
        return lemons.rank_lemons(self.tables, self.infra, by=self.by, history_days=history_days)

    @property
    def by(self) -> lemons.FailureBasis:
        """The basis of failures: jobs, or outages if no job ran."""
        return lemons.failure_basis(self.tables)

    @property
    def node_rate_per_s(self) -> float:
        """Failures per node-second of large jobs (r_f); 0 if unknown."""
        return (self.rate.per_1000_node_days or 0.0) / 1000 / 86_400


class DrawnSection(NamedTuple):
    """Section and its drawing function; None without anything to draw."""

    section: ReportSection
    draw: Callable[[Figure], None] | None = None


def make_section(
    key: str,
    title: str,
    description: str,
    columns: list[ReportColumn],
    frame: pl.DataFrame,
    notes: list[str] | None = None,
    series: pl.DataFrame | None = None,
) -> ReportSection:
    """Return a section of the `columns` of a frame, with its first ROWS_MAX rows."""
    all_notes = list(notes or [])
    if len(frame) > ROWS_MAX:
        all_notes.append(f"{len(frame):,} rows: the first {ROWS_MAX:,} are here")
    rows = frame.select([column.key for column in columns]).head(ROWS_MAX).to_dicts()
    drawn = [] if series is None else series.head(SERIES_MAX).to_dicts()
    return ReportSection(
        key=key,
        title=title,
        description=description,
        columns=columns,
        rows=rows,
        notes=all_notes,
        series=drawn,
    )


Rows = list[dict[str, Any]]
LEMON = "lemon"  # value of the column `called`
NAMES = 3  # of lemons


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """Headline figure as text, its description and its basis.

    `value`: the same as a number, with its interval if it has one; shares as a part of 1. `key`:
    identity of the figure.
    """

    key: str
    figure: str
    description: str = msgspec.field(name="said")
    rests_on: str
    value: float | None
    low: float | None = None
    high: float | None = None


def headlines(facts: ReportFacts, sections: list[DrawnSection]) -> list[Headline]:
    """Return the headline figures of a report's sections."""
    rows = {drawn.section.key: drawn.section.rows for drawn in sections}
    return [
        *rate_headlines(facts),
        *_ended_headline(rows["states"]),
        *_ettr_headline(rows["ettr"]),
        *_loss_headline(rows["goodput"]),
        *_lemons_headline(rows["lemons"], facts),
    ]


def rate_headlines(facts: ReportFacts) -> list[Headline]:
    """Return the first headline figures: failure rates, which need no section."""
    return [*_rate_headline(facts.rate), *_outages_headline(facts)]


def _rate_headline(rate: failure_rates.FailureRate) -> Iterator[Headline]:
    if rate.per_1000_node_days is None:
        return
    figure = f"{rate.per_1000_node_days:.2f}"
    rests_on = f"{rate.low:.2f} to {rate.high:.2f} with 90 %; "
    if not rate.failures:  # its interval begins above 0
        figure = f"below {1000 * garwood(0)[1] / rate.node_days:.2f}"
        rests_on = f"with 95 %, after {rate.node_days:,.0f} node-days; "
    rests_on += f"{plural(rate.failures, 'failure')} of jobs above {rate.above_gpus:,} GPUs"
    description = "failures in 1000 node-days (r_f)"
    yield Headline(
        key="r_f",
        figure=figure,
        description=description,
        rests_on=rests_on,
        value=rate.per_1000_node_days,
        low=rate.low,
        high=rate.high,
    )


def _outages_headline(facts: ReportFacts) -> Iterator[Headline]:
    """Yield the rate of outages if no job shows failures."""
    if facts.by == "jobs":
        return
    rate = outages.outage_rate(facts.tables)
    if rate.per_1000_node_days is not None:
        yield Headline(
            key="outages",
            value=rate.per_1000_node_days,
            low=rate.low,
            high=rate.high,
            figure=f"{rate.per_1000_node_days:.2f}",
            description="outages in 1000 node-days",
            rests_on=f"{rate.low:.2f} to {rate.high:.2f} with 90 %; "
            f"{plural(rate.outages, 'outage')} of {plural(rate.nodes, 'node')}",
        )


def _ended_headline(states: Rows) -> Iterator[Headline]:
    if not states:
        return
    ended = [state for state in states if state["of"] == "infrastructure"]
    share = sum(state["gpu_hours_share"] or 0.0 for state in ended)
    jobs = sum(state["jobs_share"] or 0.0 for state in ended)
    if not sum(state["gpu_hours"] for state in states):
        yield Headline(
            key="ended",
            figure=f"{100 * jobs:.3g} %",
            description="of attempts were ended by infrastructure",
            rests_on="no attempt held GPUs for any time",
            value=jobs,
        )
        return
    yield Headline(
        key="ended",
        value=share,
        figure=f"{100 * share:.3g} %",
        description="of GPU time was in attempts that infrastructure ended",
        rests_on=f"{100 * jobs:.3g} % of attempts",
    )


def _ettr_headline(sizes: Rows) -> Iterator[Headline]:
    if not sizes:
        return
    largest = sizes[-1]
    low = largest["low"]
    high = largest["high"]
    band = "" if low is None else f"{100 * low:.3g} % to {100 * high:.3g} % with 90 %; "
    yield Headline(
        key="ettr",
        value=largest["ettr"],
        low=low,
        high=high,
        figure=f"{100 * largest['ettr']:.3g} %",
        description=f"ETTR of the largest job runs (up to {largest['bucket']:,} GPUs)",
        rests_on=f"{band}{plural(largest['runs'], 'run')}, checkpoints every hour assumed",
    )


def _loss_headline(sizes: Rows) -> Iterator[Headline]:
    if not sizes:
        return
    first, second = (sum(size[name] for size in sizes) for name in ("first_gpu_s", "second_gpu_s"))
    rests_on = "the attempts that they ended held no GPUs"
    if first + second:
        rests_on = f"{100 * second / (first + second):.3g} % of it by preemptions that they caused"
    lost = first + second
    figure = f"{lost:,.0f}" if lost >= 10 or not lost else f"{lost:.2g}"
    text = "GPU hours of work lost to failures"
    yield Headline(key="lost", figure=figure, description=text, rests_on=rests_on, value=lost)


def _lemons_headline(nodes: Rows, facts: ReportFacts) -> Iterator[Headline]:
    lemons = [node["node"] for node in nodes if node["called"] == LEMON]
    rests_on = "of those that ran jobs" if facts.by == "jobs" else "of the cluster"
    if lemons:
        rests_on = ", ".join(lemons[:NAMES]) + (" and others" if len(lemons) > NAMES else "")
    text = "nodes that fail more often than chance explains"
    value = float(len(lemons))
    figure = f"{len(lemons):,}"
    yield Headline(key="lemons", figure=figure, description=text, rests_on=rests_on, value=value)
