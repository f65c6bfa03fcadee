"""Sections of a cluster of which no job is known: a trace of faults, a log of repairs. What failed
there are nodes, and time is what they were up."""

from __future__ import annotations

from functools import partial

import polars as pl

from outlast.fleet import outages, rates
from outlast.fleet.daily import whole_days
from outlast.fleet.report import pictures
from outlast.fleet.report.sections import Column, Facts, Told, section


def of_what(facts: Facts) -> Told:
    """Why nodes went away."""
    found = outages.by_symptom(facts.tables)
    columns = [
        Column("symptom", "symptom"), Column("outages", "outages", "count"),
        Column("nodes", "on nodes", "count"),
        Column("per_1000_node_days", "in 1000 node-days", "rate"),
        Column("per_1000_node_days_low", "90 % from", "rate"),
        Column("per_1000_node_days_high", "to", "rate"),
        Column("median_h", "half are back after, h", "hours"),
    ]  # fmt: skip
    said = (
        "Of what nodes went away, as no job is known: outages that began, in 1000 days of a node"
        " being up. Intervals are those of independent outages (Gamma)."
    )
    return Told(section("causes", "What failures are of", said, columns, found))


def over_time(facts: Facts, days: int) -> Told:
    """The rate of outages over the `days` up to each day."""
    calendar = whole_days(outages.by_day(facts.tables), facts.tables)
    found = outages.rolling(calendar, days).select(
        "day", "node_days", "per_1000_node_days", failures="outages", cause=pl.lit(rates.ALL)
    )
    swing = rates.swing(found)
    said = (
        f"Outages in 1000 days of a node being up, over the {days} days up to each day, as no job"
        " is known."
    )
    notes = [f"the highest rate is {swing:.1f} times the lowest"] if swing else []
    new = pl.DataFrame(schema={"check": pl.String, "day": pl.Date})
    told = section("rolling", "How rates change", said, [], new.clear(), notes, series=found)
    drawn = found.drop_nulls("per_1000_node_days")
    return Told(told, partial(pictures.rolling, found, new) if len(drawn) > 1 else None)
