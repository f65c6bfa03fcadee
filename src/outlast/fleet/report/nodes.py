"""The sections about nodes that fail more often than chance explains, and why."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import polars as pl

from outlast.fleet import lemons
from outlast.fleet.lemon_evidence import evidence, parts
from outlast.fleet.report import pictures
from outlast.fleet.report.sections import Column, Facts, Told, section
from outlast.fleet.signals import SIGNALS
from outlast.fleet.tables import DAY_NS
from outlast.text_formatting import plural

SUSPECTS = 50


def bad_nodes(facts: Facts, ranking: pl.DataFrame) -> Iterator[Told]:
    """Section IV.A of the paper, its Table II and its figure 11. `ranking`: of `lemons.lemons`."""
    bad = pl.col("lemon") | pl.col("earlier")
    suspects = ranking.filter(bad | (pl.col("failures") > 0)).head(SUSPECTS)
    why = evidence(facts.tables, facts.found, suspects)
    found = suspects.join(why, on=["cluster", "node"], how="left", maintain_order="left")
    yield _ranked(facts, ranking, found)
    yield _parts(found.filter(bad))
    yield _signals(ranking)


def _ranked(facts: Facts, ranking: pl.DataFrame, found: pl.DataFrame) -> Told:
    called = pl.when("lemon").then(pl.lit("lemon")).when("earlier").then(pl.lit("earlier"))
    found = found.with_columns(called=called.otherwise(pl.lit("")))
    columns = [
        Column("node", "node"), Column("called", ""), Column("failures", "failures", "times"),
        Column("expected", "expected", "times"), Column("times", "times", "times"),
        Column("p", "by chance", "p"), Column("node_days", "node-days", "times"),
        Column("past_failures", "in all of the window", "times"), Column("part", "part"),
        Column("why", "why"), Column("xid_cnt", "XIDs", "count"),
        Column("tickets", "tickets", "count"), Column("out_count", "times away", "count"),
        Column("excl_jobid_count", "excluded by jobs", "count"),
    ]  # fmt: skip
    ran, how, up = "that ran jobs", "their failures are", "they ran"
    if facts.by == "outages":
        ran, how, up = "that were there", "it is that they went away so often", "they were up"
    days = (facts.tables.until_ns - facts.tables.since_ns) / DAY_NS
    said = (
        f"Nodes {ran} in the last {min(days, lemons.DAYS):.3g} days, by how unlikely {how} by"
        f" chance, given how long {up} and the rate of their kind, in these days or in all"
        f" {days:.3g} of the window. A lemon is one that this does not explain, with"
        f" {100 * lemons.FDR:g} % false alarms taken; one of which all was earlier than these days"
        " is called so."
    )
    many, earlier = int(ranking["lemon"].sum()), int(ranking["earlier"].sum())
    notes = [f"{plural(many, 'lemon')} among {plural(len(ranking), 'node')} {ran}"]
    if earlier:
        notes.append(f"{plural(earlier, 'node')} failed so before, and not in these days")
    told = section("lemons", "Bad nodes", said, columns, found, notes)
    return Told(told, partial(pictures.lemons, ranking) if len(found) else None)


def _parts(bad: pl.DataFrame) -> Told:
    """Table II."""
    found = parts(bad)
    columns = [
        Column("part", "part"), Column("lemons", "bad nodes", "count"),
        Column("share", "share", "share"), Column("exchanged", "exchanged in", "count"),
        Column("paper", "RSC-1 and RSC-2", "share"),
    ]  # fmt: skip
    said = (
        "The part that is the likely cause of each bad node: what was exchanged, else what a"
        " ticket names, else what the symptom of most of its failures suggests. Beside it Table II"
        " of the paper."
    )
    told = section("parts", "What is wrong with bad nodes", said, columns, found)
    return Told(told, partial(pictures.parts, found) if len(found) else None)


def _signals(ranking: pl.DataFrame) -> Told:
    """Figure 11."""
    rows, steps = [], []
    for name in SIGNALS:
        values = ranking.select(pl.col(name).cast(pl.Float64).fill_null(0.0), "lemon")
        most = float(values[name].max() or 0.0)  # type: ignore[arg-type]
        bad = values.filter("lemon")[name]
        rows.append((
            name, int((values[name] > 0).sum()), values[name].quantile(0.9, "linear"), most,
            int((bad > 0).sum()), bad.median(),
        ))  # fmt: skip
        if most > 0:
            steps.append(
                values.group_by(value=name)
                .agg(nodes=pl.len(), lemons=pl.col("lemon").sum().cast(pl.Int64))
                .sort("value")
                .select(
                    pl.lit(name).alias("signal"), "value", "lemons",
                    of_largest=pl.col("value") / most,
                    nodes_share=pl.col("nodes").cum_sum() / len(values),
                )
            )  # fmt: skip
    columns = [
        Column("signal", "signal"), Column("nodes", "nodes that have it", "count"),
        Column("upper", "9 of 10 nodes up to", "times"), Column("most", "largest", "times"),
        Column("lemons", "lemons that have it", "count"),
        Column("lemons_median", "median of lemons", "times"),
    ]  # fmt: skip
    schema = dict(zip(
        (one.key for one in columns),
        (pl.String, pl.Int64, pl.Float64, pl.Float64, pl.Int64, pl.Float64), strict=True,
    ))  # fmt: skip
    said = (
        "The paper's seven signals of a lemon, over all nodes, in the same days as the ranking: a"
        " signal that most lemons and few other nodes have tells them apart."
    )
    drawn = pl.concat(steps) if steps else None
    found = pl.DataFrame(rows, schema=schema, orient="row")
    told = section("signals", "What tells them apart", said, columns, found, series=drawn)
    return Told(told, None if drawn is None else partial(pictures.signals, drawn))
