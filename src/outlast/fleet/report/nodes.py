"""The section about nodes that fail more often than chance explains."""

from __future__ import annotations

from functools import partial

import polars as pl

from outlast.fleet import lemons
from outlast.fleet.report import pictures
from outlast.fleet.report.sections import Column, Facts, Told, section

SUSPECTS = 50


def bad_nodes(facts: Facts) -> Told:
    """Section IV.A of the paper, and its figure 11."""
    ranking = lemons.lemons(facts.tables, facts.infra)
    found = ranking.filter(pl.col("lemon") | (pl.col("failures") > 0)).head(SUSPECTS)
    found = found.with_columns(called=pl.when("lemon").then(pl.lit("lemon")).otherwise(pl.lit("")))
    columns = [
        Column("node", "node"), Column("called", ""), Column("failures", "failures", "times"),
        Column("expected", "expected", "times"), Column("times", "times", "times"),
        Column("p", "by chance", "p"), Column("node_days", "node-days", "times"),
        Column("xid_cnt", "XIDs", "count"), Column("tickets", "tickets", "count"),
        Column("out_count", "times out", "count"),
        Column("excl_jobid_count", "excluded by jobs", "count"),
    ]  # fmt: skip
    said = (
        f"Nodes that ran jobs in the last {lemons.DAYS:g} days, by how unlikely their failures are"
        " by chance, given how long they ran and the rate of their kind. A lemon is one that this"
        f" does not explain, with {100 * lemons.FDR:g} % false alarms taken."
    )
    many = int(ranking["lemon"].sum())
    notes = [f"{many:,} lemons among {len(ranking):,} nodes that ran jobs"]
    told = section("lemons", "Bad nodes", said, columns, found, notes)
    return Told(told, partial(pictures.lemons, ranking) if len(found) else None)
