"""What to read first in a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from outlast.fleet import mttf, outages
from outlast.fleet.intervals import garwood
from outlast.fleet.report.sections import Facts, Told
from outlast.observe.words import counted

Rows = list[dict[str, Any]]
NAMES = 3  # of lemons


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """A figure as a text, what it is, and what it rests on."""

    figure: str
    said: str
    rests_on: str


def headlines(facts: Facts, told: list[Told]) -> list[Headline]:
    rows = {one.section.key: one.section.rows for one in told}
    return [
        *_rate(facts.rate), *_outages(facts), *_ended(rows["states"]), *_ettr(rows["ettr"]),
        *_lost(rows["goodput"]), *_lemons(rows["lemons"], facts),
    ]  # fmt: skip


def _rate(rate: mttf.FailureRate) -> Iterator[Headline]:
    if rate.per_1000_node_days is None:
        return
    figure = f"{rate.per_1000_node_days:.2f}"
    rests_on = f"{rate.low:.2f} to {rate.high:.2f} with 90 %; "
    if not rate.failures:  # its interval begins above 0
        figure = f"below {1000 * garwood(0)[1] / rate.node_days:.2f}"
        rests_on = f"with 95 %, after {rate.node_days:,.0f} node-days; "
    rests_on += f"{counted(rate.failures, 'failure')} of jobs above {rate.above_gpus:,} GPUs"
    said = "failures in 1000 node-days (r_f)"
    yield Headline(figure=figure, said=said, rests_on=rests_on)


def _outages(facts: Facts) -> Iterator[Headline]:
    """Where no job shows failures."""
    if facts.by == "jobs":
        return
    rate = outages.outage_rate(facts.tables)
    if rate.per_1000_node_days is not None:
        yield Headline(
            figure=f"{rate.per_1000_node_days:.2f}",
            said="outages in 1000 node-days",
            rests_on=f"{rate.low:.2f} to {rate.high:.2f} with 90 %; "
            f"{counted(rate.outages, 'outage')} of {counted(rate.nodes, 'node')}",
        )


def _ended(states: Rows) -> Iterator[Headline]:
    if not states:
        return
    ended = [one for one in states if one["of"] == "infrastructure"]
    share = sum(one["gpu_hours_share"] or 0.0 for one in ended)
    jobs = sum(one["jobs_share"] or 0.0 for one in ended)
    yield Headline(
        figure=f"{100 * share:.3g} %",
        said="of GPU time was in attempts that infrastructure ended",
        rests_on=f"{100 * jobs:.3g} % of attempts",
    )


def _ettr(sizes: Rows) -> Iterator[Headline]:
    if not sizes:
        return
    largest = sizes[-1]
    low, high = largest["low"], largest["high"]
    band = "" if low is None else f"{100 * low:.3g} % to {100 * high:.3g} % with 90 %; "
    yield Headline(
        figure=f"{100 * largest['ettr']:.3g} %",
        said=f"ETTR of the largest job runs (up to {largest['bucket']:,} GPUs)",
        rests_on=f"{band}{counted(largest['runs'], 'run')}, checkpoints every hour assumed",
    )


def _lost(sizes: Rows) -> Iterator[Headline]:
    if not sizes:
        return
    first, second = (sum(one[name] for one in sizes) for name in ("first_gpu_s", "second_gpu_s"))
    rests_on = "the attempts that they ended held no GPUs"
    if first + second:
        rests_on = f"{100 * second / (first + second):.3g} % of it by preemptions that they caused"
    said = "GPU hours of work lost to failures"
    yield Headline(figure=f"{first + second:,.0f}", said=said, rests_on=rests_on)


def _lemons(nodes: Rows, facts: Facts) -> Iterator[Headline]:
    found = [one["node"] for one in nodes if one["called"]]
    rests_on = "of those that ran jobs" if facts.by == "jobs" else "of those that were there"
    if found:
        rests_on = ", ".join(found[:NAMES]) + (" and others" if len(found) > NAMES else "")
    said = "nodes that fail more often than chance explains"
    yield Headline(figure=f"{len(found):,}", said=said, rests_on=rests_on)
