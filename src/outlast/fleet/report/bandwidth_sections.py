"""Report sections about the bandwidth of collectives (figure 12), if the lake has benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import polars as pl

from outlast.fleet.analysis import collective_bandwidth
from outlast.fleet.analysis.collective_bandwidth import GROUPS_MIN, SETTING
from outlast.fleet.analysis.lemons import FDR
from outlast.fleet.record_tables import Tables
from outlast.fleet.report import report_figures
from outlast.fleet.report.report_sections import (
    DrawnSection,
    ReportColumn,
    make_section,
)
from outlast.text_formatting import plural

BANDWIDTH_KEYS = ("bandwidth", "bandwidth-labels", "slow-groups", "slow-hosts")
_SETTING_COLUMNS = [
    ReportColumn("collective", "collective"),
    ReportColumn("datatype", "type"),
    ReportColumn("redop", "operation"),
    ReportColumn("ranks", "ranks", "count"),
    ReportColumn("nodes", "nodes", "count"),
    ReportColumn("size_bytes", "bytes", "count"),
]


def bandwidth_sections(tables: Tables) -> Iterator[DrawnSection]:
    """Yield the sections of benchmarks; none if the window has no benchmark."""
    table = collective_bandwidth.measured_bandwidths(tables)
    if not len(table):
        return
    groups = collective_bandwidth.slow_groups(table)
    yield _spread_section(table, groups)
    compared = collective_bandwidth.compared_labels(table)
    if len(compared):
        yield _labels_section(compared)
    yield _groups_section(groups)
    yield _hosts_section(collective_bandwidth.slow_hosts(table, groups), groups)


def _spread_section(table: pl.DataFrame, groups: pl.DataFrame) -> DrawnSection:
    spread = collective_bandwidth.bandwidth_spread(table)
    columns = [
        *_SETTING_COLUMNS,
        ReportColumn("label", "label"),
        ReportColumn("groups", "groups", "count"),
        ReportColumn("measured", "measured", "count"),
        ReportColumn("least", "least, GB/s", "rate"),
        ReportColumn("median", "median", "rate"),
        ReportColumn("most", "most", "rate"),
        ReportColumn("cv_groups", "spread of groups", "share"),
        ReportColumn("cv_iterations", "of iterations", "share"),
        ReportColumn("wrong_runs", "runs with wrong values", "count"),
    ]
    description = (
        "Bus bandwidth by nccl-tests or rccl-tests. A group is the nodes of a run; the spread is"
        " the standard deviation over the mean, of groups by their medians, and of repeated"
        " measurements within groups. The figure is figure 12 of the paper: iterations of the group"
        " that repeated the most, and the medians of groups of equal size."
    )
    notes = []
    bad = table.filter(pl.col("wrong") > 0)["run"].n_unique()
    if bad:
        notes.append(f"{plural(bad, 'run')} with wrong values: collectives that corrupt data")
    drawn = _drawn_points(table, groups)
    section = make_section(
        "bandwidth", "Bandwidth of collectives", description, columns, spread, notes, series=drawn
    )
    draw = partial(report_figures.draw_bandwidth, drawn) if len(drawn) else None
    return DrawnSection(section, draw)


def _drawn_points(table: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Return the points of figure 12.

    `panel` iterations: of the group with the most iterations under the most labels, at its largest
    size. `panel` groups: the medians of the setting with the most groups, in ascending order.
    """
    labels = pl.col("label").n_unique()
    several = table.group_by([*SETTING, "group"]).agg(labels=labels, many=pl.col("iteration").max())
    order = ["labels", "many", "ranks", "size_bytes", "collective", "datatype", "redop"]
    first = several.filter(pl.col("many") > 1).sort(*order, descending=True).head(1)
    columns = ["panel", *SETTING, "label", "group", "at", "gb_per_s", "slow"]
    slow = groups.filter("is_slow").select("label", "group", slow=pl.lit(value=True))
    iterations = table.join(first, on=[*SETTING, "group"], how="semi").with_columns(
        panel=pl.lit("iterations"), at="iteration"
    )
    medians = table.group_by([*SETTING, "label", "group"]).agg(pl.col("gb_per_s").median())
    most = medians.group_by(SETTING).agg(labels=labels, many=pl.col("group").n_unique())
    widest = most.filter(pl.col("many") > 1).sort("many", *order[:1], *order[2:], descending=True)
    place = pl.col("gb_per_s").rank("ordinal").over(*SETTING, "label").cast(pl.Int64)
    shown = medians.join(widest.head(1), on=SETTING, how="semi").with_columns(
        panel=pl.lit("groups"), at=place
    )
    return (
        pl.concat([rows.select(columns[:-1]) for rows in (iterations, shown)])
        .join(slow, on=["label", "group"], how="left")
        .with_columns(pl.col("slow").fill_null(value=False))
        .select(columns)
        .sort("panel", "label", "at")
    )


def _labels_section(compared: pl.DataFrame) -> DrawnSection:
    columns = [
        *_SETTING_COLUMNS,
        ReportColumn("basis", "label"),
        ReportColumn("label", "against"),
        ReportColumn("units", "by"),
        ReportColumn("basis_median", "median, GB/s", "rate"),
        ReportColumn("median", "against", "rate"),
        ReportColumn("ratio", "ratio", "rate"),
        ReportColumn("low", "from", "rate"),
        ReportColumn("high", "to", "rate"),
        ReportColumn("basis_cv", "spread", "share"),
        ReportColumn("cv", "against", "share"),
    ]
    description = (
        "Equal settings under two labels: medians and their ratio, with its 90 % interval (a"
        f" bootstrap, with {GROUPS_MIN} units or more of both), and the spreads. Groups count by"
        " their medians; with few groups all iterations count."
    )
    title = "Bandwidth by label"
    return DrawnSection(make_section("bandwidth-labels", title, description, columns, compared))


def _groups_section(groups: pl.DataFrame) -> DrawnSection:
    columns = [
        ReportColumn("group", "nodes"),
        ReportColumn("label", "label"),
        ReportColumn("slow", "slow in", "count"),
        ReportColumn("judged", "of settings", "count"),
        ReportColumn("collective", "worst in"),
        ReportColumn("size_bytes", "bytes", "count"),
        ReportColumn("median", "GB/s", "rate"),
        ReportColumn("middle", "median of groups", "rate"),
        ReportColumn("share", "share", "share"),
    ]
    description = (
        f"Groups that are slow beyond the spread of {GROUPS_MIN} groups or more: by"
        f" {collective_bandwidth.OUTLIER_SCORE} robust deviations (Iglewicz and Hoaglin 1993) and"
        f" {100 * collective_bandwidth.SLOWER_MIN:g} %, in half of their settings or more. Sizes"
        " below half of the largest bandwidth are not judged: they measure latency (Hockney 1994)."
    )
    notes = []
    if not len(groups):
        notes.append(f"no setting has {GROUPS_MIN} groups: no group was judged")
    table = groups.filter("is_slow")
    return DrawnSection(
        make_section("slow-groups", "Slow groups", description, columns, table, notes)
    )


def _hosts_section(table: pl.DataFrame, groups: pl.DataFrame) -> DrawnSection:
    called = pl.when("suspected").then(pl.lit("suspected")).otherwise(pl.lit(""))
    columns = [
        ReportColumn("node", "node"),
        ReportColumn("called", ""),
        ReportColumn("slow", "slow groups", "count"),
        ReportColumn("groups", "of groups", "count"),
        ReportColumn("expected", "expected", "times"),
        ReportColumn("p", "by chance", "p"),
        ReportColumn("wrong_runs", "runs with wrong values", "count"),
    ]
    description = (
        "Nodes in slow groups or in runs with wrong values. A suspected node is in more slow groups"
        f" than chance explains (Fisher's exact test, {100 * FDR:g} % of false alarms)."
    )
    notes = []
    alone = table.filter(pl.col("groups") == 1, pl.col("slow") > 0)
    if len(alone):
        notes.append(
            f"{plural(len(alone), 'node')} in one group only: indistinguishable from the others of"
            " it; run the benchmark again in other groups"
        )
    if len(groups) and not groups["is_slow"].any():
        notes.append("no group is slow")
    table = table.with_columns(called=called)
    title = "Nodes of slow groups"
    return DrawnSection(make_section("slow-hosts", title, description, columns, table, notes))
