"""The section about nodes that fail more often than chance explains."""

from __future__ import annotations

from functools import partial

import polars as pl

from outlast.fleet import lemons
from outlast.fleet.report import pictures
from outlast.fleet.report.sections import Column, Facts, Told, section
from outlast.observe.words import counted

SUSPECTS = 50


def bad_nodes(facts: Facts, ranking: pl.DataFrame) -> Told:
    """Section IV.A of the paper, and its figure 11. `ranking`: of `lemons.lemons`."""
    found = ranking.filter(pl.col("lemon") | (pl.col("failures") > 0)).head(SUSPECTS)
    found = found.with_columns(called=pl.when("lemon").then(pl.lit("lemon")).otherwise(pl.lit("")))
    columns = [
        Column("node", "node"), Column("called", ""), Column("failures", "failures", "times"),
        Column("expected", "expected", "times"), Column("times", "times", "times"),
        Column("p", "by chance", "p"), Column("node_days", "node-days", "times"),
        Column("xid_cnt", "XIDs", "count"), Column("tickets", "tickets", "count"),
        Column("out_count", "times away", "count"),
        Column("excl_jobid_count", "excluded by jobs", "count"),
    ]  # fmt: skip
    ran, how, up = "that ran jobs", "their failures are", "they ran"
    if facts.by == "outages":
        ran, how, up = "that were there", "it is that they went away so often", "they were up"
    said = (
        f"Nodes {ran} in the last {lemons.DAYS:g} days, by how unlikely {how} by chance, given how"
        f" long {up} and the rate of their kind. A lemon is one that this does not explain, with"
        f" {100 * lemons.FDR:g} % false alarms taken."
    )
    many = int(ranking["lemon"].sum())
    notes = [f"{counted(many, 'lemon')} among {counted(len(ranking), 'node')} {ran}"]
    told = section("lemons", "Bad nodes", said, columns, found, notes)
    return Told(told, partial(pictures.lemons, ranking) if len(found) else None)
