"""Report sections about lemons: ranking, evidence, parts, signals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import polars as pl

from outlast.fleet.analysis import lemons
from outlast.fleet.analysis.lemon_evidence import lemon_evidence, suspected_parts
from outlast.fleet.analysis.lemons import SIGNALS
from outlast.fleet.record_tables import DAY_NS
from outlast.fleet.report import report_figures
from outlast.fleet.report.report_sections import (
    DrawnSection,
    ReportColumn,
    ReportFacts,
    make_section,
)
from outlast.text_formatting import plural

SUSPECTS = 50


def lemon_sections(facts: ReportFacts, ranking: pl.DataFrame) -> Iterator[DrawnSection]:
    """Yield the sections of lemons (IV.A of the paper, Table II and figure 11).

    `ranking`: of `rank_lemons`.
    """
    bad = pl.col("lemon") | pl.col("earlier")
    suspects = ranking.filter(bad | (pl.col("failures") > 0)).head(SUSPECTS)
    why = lemon_evidence(facts.tables, facts.found, suspects)
    found = suspects.join(why, on=["cluster", "node"], how="left", maintain_order="left")
    yield _rank_section(facts, ranking, found)
    yield _parts_section(found.filter(bad))
    yield _signals_section(ranking)


def _rank_section(facts: ReportFacts, ranking: pl.DataFrame, found: pl.DataFrame) -> DrawnSection:
    called = pl.when("lemon").then(pl.lit("lemon")).when("earlier").then(pl.lit("earlier"))
    found = found.with_columns(called=called.otherwise(pl.lit("")))
    columns = [
        ReportColumn("node", "node"),
        ReportColumn("called", ""),
        ReportColumn("failures", "failures", "times"),
        ReportColumn("expected", "expected", "times"),
        ReportColumn("times", "times", "times"),
        ReportColumn("p", "by chance", "p"),
        ReportColumn("node_days", "node-days", "times"),
        ReportColumn("past_failures", "in all of the window", "times"),
        ReportColumn("part", "part"),
        ReportColumn("why", "why"),
        ReportColumn("xid_cnt", "XIDs", "count"),
        ReportColumn("tickets", "tickets", "count"),
        ReportColumn("out_count", "outages", "count"),
        ReportColumn("excl_jobid_count", "excluded by jobs", "count"),
    ]
    ran = "that ran jobs"
    how = "their failures are"
    up = "they ran"
    if facts.by == "outages":
        ran = "of the cluster"
        how = "their outages are"
        up = "they were up"
    days = (facts.tables.until_ns - facts.tables.since_ns) / DAY_NS
    description = (
        f"Nodes {ran} in the last {min(days, lemons.DAYS):.3g} days, by how unlikely {how} by"
        f" chance, given how long {up} and the rate of their kind, in these days or in all"
        f" {days:.3g} of the window. A lemon is one that this does not explain, with"
        f" {100 * lemons.FDR:g} % of false alarms; `earlier` are lemons that did not fail in these"
        " days."
    )
    many = int(ranking["lemon"].sum())
    earlier = int(ranking["earlier"].sum())
    notes = [f"{plural(many, 'lemon')} among {plural(len(ranking), 'node')} {ran}"]
    if earlier:
        notes.append(f"{plural(earlier, 'node')} failed as often before these days only")
    section = make_section("lemons", "Bad nodes", description, columns, found, notes)
    return DrawnSection(
        section, partial(report_figures.draw_lemons, ranking) if len(found) else None
    )


def _parts_section(bad: pl.DataFrame) -> DrawnSection:
    """Return the section of suspected parts (Table II)."""
    found = suspected_parts(bad)
    columns = [
        ReportColumn("part", "part"),
        ReportColumn("lemons", "bad nodes", "count"),
        ReportColumn("share", "share", "share"),
        ReportColumn("exchanged", "exchanged in", "count"),
        ReportColumn("paper", "RSC-1 and RSC-2", "share"),
    ]
    description = (
        "The likely faulty part of each bad node: the replaced part, else that of a ticket, else"
        " that suggested by its most frequent symptom. The last column is Table II of the paper."
    )
    section = make_section("parts", "Faulty parts of bad nodes", description, columns, found)
    return DrawnSection(section, partial(report_figures.draw_parts, found) if len(found) else None)


def _signals_section(ranking: pl.DataFrame) -> DrawnSection:
    """Return the section of the lemon signals (figure 11)."""
    rows = []
    steps = []
    for name in SIGNALS:
        values = ranking.select(pl.col(name).cast(pl.Float64).fill_null(0.0), "lemon")
        most = float(values[name].max() or 0.0)  # type: ignore[arg-type]
        bad = values.filter("lemon")[name]
        rows.append(
            (
                name,
                int((values[name] > 0).sum()),
                values[name].quantile(0.9, "linear"),
                most,
                int((bad > 0).sum()),
                bad.median(),
            )
        )
        if most > 0:
            steps.append(
                values.group_by(value=name)
                .agg(nodes=pl.len(), lemons=pl.col("lemon").sum().cast(pl.Int64))
                .sort("value")
                .select(
                    pl.lit(name).alias("signal"),
                    "value",
                    "lemons",
                    of_largest=pl.col("value") / most,
                    nodes_share=pl.col("nodes").cum_sum() / len(values),
                )
            )
    columns = [
        ReportColumn("signal", "signal"),
        ReportColumn("nodes", "nodes that have it", "count"),
        ReportColumn("upper", "9 of 10 nodes up to", "times"),
        ReportColumn("most", "largest", "times"),
        ReportColumn("lemons", "lemons that have it", "count"),
        ReportColumn("lemons_median", "median of lemons", "times"),
    ]
    schema = dict(
        zip(
            (one.key for one in columns),
            (pl.String, pl.Int64, pl.Float64, pl.Float64, pl.Int64, pl.Float64),
            strict=True,
        )
    )
    description = (
        "The paper's seven signals of a lemon, over all nodes, in the same days as the ranking: a"
        " useful signal is one of most lemons and few other nodes."
    )
    drawn = pl.concat(steps) if steps else None
    found = pl.DataFrame(rows, schema=schema, orient="row")
    section = make_section(
        "signals", "Signals of lemons", description, columns, found, series=drawn
    )
    return DrawnSection(
        section, None if drawn is None else partial(report_figures.draw_signals, drawn)
    )
