"""Spread of the bandwidth of collectives over groups of nodes and over iterations.

Kokolis et al. 2025, IV.B and figure 12: repeated all-reduces of one group of nodes, and all-reduces
of many groups at once. The spread between groups shows links that some groups have to share.
"""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from outlast.fleet.analysis.confidence_intervals import DRAWS, TAIL
from outlast.fleet.analysis.lemons import FDR, benjamini_hochberg
from outlast.fleet.host_lists import count_hosts, expand_distinct
from outlast.fleet.record_tables import Tables

GROUPS_MIN = 5  # of a setting, from which on a group can be an outlier
OUTLIER_SCORE = 3.5  # Iglewicz and Hoaglin 1993
SLOWER_MIN = 0.05  # a slow group has this share less than the median, or more
PEAK_SHARE = 0.5  # Hockney 1994: smaller sizes measure latency
SLOW_MIN = 2  # slow groups of a host that is suspected
SETTING = ["collective", "redop", "datatype", "ranks", "nodes", "size_bytes"]
_ORDER = ["ranks", "collective", "datatype", "redop", "nodes", "size_bytes", "label"]
_DESCENDING = [column in ("ranks", "size_bytes") for column in _ORDER]
_ROW = ["run", "collective", "datatype", "redop", "root", "size_bytes", "cycle"]


def measured_bandwidths(tables: Tables) -> pl.DataFrame:
    """Return one row for each measured bandwidth of the window.

    `gb_per_s`: with separate buffers, else with one. `group`: the hosts, else the run. `iteration`:
    from 1 on, within its setting, label and group. A run that was read twice counts once.
    """
    inside = pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
    table = tables.bandwidths.filter(inside).sort("t_ns", "label").collect()
    table = table.unique(_ROW, keep="last", maintain_order=True)
    bus = pl.coalesce("bus_bytes_per_s", "in_place_bytes_per_s") / 1e9
    known = pl.col("hosts") != ""
    table = table.with_columns(
        nodes=count_hosts(table["hosts"]).fill_null(0).cast(pl.Int64),
        gb_per_s=bus,
        group=pl.when(known).then("hosts").otherwise(pl.format("unknown hosts, run {}", "run")),
    )
    order = pl.struct("t_ns", "run", "cycle").rank("ordinal").over(*SETTING, "label", "group")
    return table.with_columns(iteration=order.cast(pl.Int64))


def bandwidth_spread(table: pl.DataFrame) -> pl.DataFrame:
    """Return the distribution of `measured_bandwidths` by setting and label, large sizes first.

    `cv_groups`: standard deviation over mean of the groups' medians; `cv_iterations`: the same
    within groups, pooled. None without two of them.
    """
    bus = pl.col("gb_per_s")
    within = _group_medians(table)
    free = pl.col("iterations") - 1
    pooled = ((pl.col("variance").fill_null(0.0) * free).sum() / free.sum()).sqrt()
    median = pl.col("median")
    spread = within.group_by([*SETTING, "label"]).agg(
        groups=pl.len().cast(pl.Int64),
        cv_groups=median.std() / median.mean(),
        cv_iterations=pl.when(free.sum() > 0).then(pooled / median.mean()),
    )
    return (
        table.group_by([*SETTING, "label"])
        .agg(
            runs=pl.col("run").n_unique().cast(pl.Int64),
            measured=pl.len().cast(pl.Int64),
            least=bus.min(),
            median=bus.median(),
            most=bus.max(),
            wrong_runs=pl.col("run").filter(pl.col("wrong") > 0).n_unique().cast(pl.Int64),
        )
        .join(spread, on=[*SETTING, "label"])
        .with_columns(pl.col("cv_groups", "cv_iterations").fill_nan(None))
        .sort(*_ORDER, descending=_DESCENDING)
    )


def slow_groups(table: pl.DataFrame) -> pl.DataFrame:
    """Return each group by label: in how many settings it was `judged`, and in how many `slow`.

    A setting is judged with GROUPS_MIN groups and at sizes that reach PEAK_SHARE of the largest
    median. A group is slow in it with a median below the groups' median by an outlier score of
    OUTLIER_SCORE (0.6745 of the distance over the median absolute deviation) and by SLOWER_MIN. It
    `is_slow` if it is in half of its settings or more. `share`: its least part of the median, at
    `collective` and `size_bytes`.
    """
    case = [*SETTING, "label"]
    groups = _group_medians(table)
    middle = pl.col("median").median().over(case)
    peak = pl.col("middle").max().over([*SETTING[:-1], "label"])
    cases = groups.with_columns(middle=middle, many=pl.len().over(case)).filter(
        pl.col("many") >= GROUPS_MIN, pl.col("middle") >= PEAK_SHARE * peak, pl.col("middle") > 0
    )
    spread = (pl.col("median") - pl.col("middle")).abs().median().over(case)
    limit = pl.min_horizontal(
        pl.col("middle") - OUTLIER_SCORE * spread / 0.6745, (1 - SLOWER_MIN) * pl.col("middle")
    )
    share = pl.col("median") / pl.col("middle")
    return (
        cases.with_columns(slow=pl.col("median") < limit, share=share)
        .sort("share", *case)
        .group_by("label", "group", maintain_order=True)
        .agg(
            pl.col("hosts", "collective", "size_bytes", "median", "middle", "share").first(),
            judged=pl.len().cast(pl.Int64),
            slow=pl.col("slow").sum().cast(pl.Int64),
        )
        .with_columns(is_slow=(pl.col("slow") > 0) & (2 * pl.col("slow") >= pl.col("judged")))
    )


def slow_hosts(table: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Return the hosts in slow `groups` (`slow_groups`) or in runs with wrong values.

    `p`: the probability of so many slow groups or more, if the slow ones were drawn from all at
    random (Fisher's exact test, one-sided: a hypergeometric tail). `suspected`: SLOW_MIN slow
    groups and less than FDR of false alarms (Benjamini and Hochberg).
    """
    merged = groups.filter(pl.col("hosts") != "").group_by("hosts").agg(pl.col("is_slow").any())
    every = len(merged)
    slow = int(merged["is_slow"].sum())
    counts = (
        _with_nodes(merged)
        .group_by("node")
        .agg(groups=pl.len().cast(pl.Int64), slow=pl.col("is_slow").sum().cast(pl.Int64))
    )
    runs = table.group_by("run", "hosts").agg(bad=(pl.col("wrong") > 0).any().fill_null(False))
    bad = _with_nodes(runs.filter("bad", pl.col("hosts") != ""))
    wrong = bad.group_by("node").agg(wrong_runs=pl.len().cast(pl.Int64))
    both = counts.join(wrong, on="node", how="full", coalesce=True).with_columns(
        pl.col("groups", "slow", "wrong_runs").fill_null(0)
    )
    p = [_tail(k, n, slow, every) for n, k in both.select("groups", "slow").iter_rows()]
    q = pl.Series("q", benjamini_hochberg(p), dtype=pl.Float64)
    return (
        both.with_columns(
            expected=pl.col("groups") * (slow / max(1, every)),
            p=pl.Series(p, dtype=pl.Float64),
            suspected=(pl.col("slow") >= SLOW_MIN) & (q < FDR),
        )
        .filter((pl.col("slow") > 0) | (pl.col("wrong_runs") > 0))
        .sort("suspected", "wrong_runs", "p", "node", descending=[True, True, False, False])
    )


def compared_labels(table: pl.DataFrame) -> pl.DataFrame:
    """Return each setting of two labels: medians, spreads, and the ratio with its 90 % interval.

    The first label by name is the basis. `units`: groups, by their medians, if both labels have
    GROUPS_MIN, else iterations. The interval is a bootstrap of the units (Efron and Tibshirani
    1993, 8.6); None with fewer than GROUPS_MIN of either.
    """
    names = table["label"].unique().sort().to_list()
    rows = []
    for key, part in table.group_by(SETTING):
        of = {name: part.filter(pl.col("label") == name) for name in names}
        here = [name for name in names if len(of[name])]
        rows += [(*key, here[0], name, *_compare(of[here[0]], of[name])) for name in here[1:]]
    types = [*(table.schema[column] for column in SETTING), pl.String, pl.String, pl.String]
    columns = [*SETTING, "basis", "label", "units", "basis_median", "median", "basis_cv", "cv"]
    columns += ["ratio", "low", "high"]
    schema = dict(zip(columns, [*types, *[pl.Float64] * 7], strict=True))
    compared = pl.DataFrame(rows, schema=schema, orient="row")
    return compared.sort(*_ORDER, descending=_DESCENDING)


def _compare(basis: pl.DataFrame, other: pl.DataFrame) -> tuple[str | float | None, ...]:
    medians = [_group_medians(side)["median"].to_numpy() for side in (basis, other)]
    units = "groups" if min(map(len, medians)) >= GROUPS_MIN else "iterations"
    values = medians
    if units == "iterations":
        values = [side["gb_per_s"].to_numpy() for side in (basis, other)]
    first, second = (float(np.median(side)) for side in values)
    spreads = [
        float(side.std(ddof=1) / side.mean()) if len(side) > 1 and side.mean() else None
        for side in values
    ]
    low = high = None
    if min(map(len, values)) >= GROUPS_MIN and first:
        random = np.random.default_rng(0)
        drawn = [
            np.median(side[random.integers(len(side), size=(DRAWS, len(side)))], axis=1)
            for side in values
        ]
        ratios = drawn[1][drawn[0] > 0] / drawn[0][drawn[0] > 0]
        low, high = (float(end) for end in np.quantile(ratios, [TAIL, 1 - TAIL]))
    ratio = second / first if first else None
    return (units, first, second, *spreads, ratio, low, high)


def _group_medians(table: pl.DataFrame) -> pl.DataFrame:
    bus = pl.col("gb_per_s")
    return table.group_by([*SETTING, "label", "group", "hosts"]).agg(
        median=bus.median(), variance=bus.var(), iterations=pl.len().cast(pl.Int64)
    )


def _with_nodes(groups: pl.DataFrame) -> pl.DataFrame:
    return groups.join(expand_distinct(groups["hosts"].unique()), on="hosts")


def _tail(slow: int, groups: int, slow_all: int, groups_all: int) -> float:
    """Return P(X >= slow) of a hypergeometric X."""
    ways = math.comb(groups_all, groups)
    some = range(slow, min(groups, slow_all) + 1)
    hits = sum(math.comb(slow_all, k) * math.comb(groups_all - slow_all, groups - k) for k in some)
    return hits / ways if slow else 1.0
