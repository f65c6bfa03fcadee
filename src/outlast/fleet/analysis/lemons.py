"""Lemons: nodes that fail more often than chance explains, and their seven signals.

Kokolis et al. 2025, IV.A, set thresholds on the signals by hand. Here each node's failures are
compared with those expected from the fleet's rate and its exposure; the signals are evidence.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import polars as pl

from outlast.errors import UsageError
from outlast.fleet.analysis.exposure import SECOND_NS
from outlast.fleet.analysis.failure_attribution import (
    NODE,
    SIMULTANEOUS_S,
    attribute_to_nodes,
    merge_simultaneous,
)
from outlast.fleet.analysis.outages import node_days_up, outages_as_failures
from outlast.fleet.host_lists import explode_hosts, nodes_of
from outlast.fleet.record_tables import DAY_NS, Tables
from outlast.theory import numerics
from outlast.theory.numerics import check_not_negative, check_positive

SIGNALS = (
    "excl_jobid_count",
    "xid_cnt",
    "tickets",
    "out_count",
    "multi_node_nodefails",
    "single_node_nodefails",
    "single_node_nodefailure_rate",
)


def node_signals(
    tables: Tables, infra: pl.LazyFrame, nodes: pl.LazyFrame | None = None
) -> pl.LazyFrame:
    """Return one row for each node that any record of the window names.

    - `excl_jobid_count`: different jobs that excluded it;

    - `xid_cnt`: different XIDs found on it;

    - `tickets`: repair tickets; `out_count`: outages that began or lasted in the window;

    - `multi_node_nodefails`, `single_node_nodefails`: attempts of several nodes, or of one, that
    infrastructure ended (`infra`), attributed to it (`attribute_to_nodes`: by weight if no node was
    named);

    - `single_node_nodefailure_rate`: of the attempts that had this node alone, the share that
    infrastructure ended; null without any;

    and `kind`, and `node_days` of running (`node_exposure`, which takes `nodes`).
    """
    window = clip_tables(tables, tables.since_ns, tables.until_ns)
    blame = attribute_to_nodes(window, infra)
    alone = pl.col("nodes") == 1
    fails = blame.group_by(NODE).agg(
        multi_node_nodefails=pl.col("weight").filter(~alone).sum(),
        single_node_nodefails=pl.col("weight").filter(alone).sum(),
    )
    parts = [
        node_exposure(window, nodes),
        fails,
        _excluded(window),
        window.findings.filter(pl.col("code").str.starts_with("XID"))
        .group_by(NODE)
        .agg(xid_cnt=pl.col("code").n_unique().cast(pl.Int64)),
        window.repairs.filter(pl.col("kind") == "ticket").group_by(NODE).agg(tickets=_row_count()),
        window.outages.group_by(NODE).agg(out_count=_row_count()),
    ]
    found = window.nodes.select(NODE).unique()
    for part in parts:
        found = found.join(part, on=NODE, how="full", coalesce=True)
    kinds = window.nodes.sort("t_ns").group_by(NODE).agg(pl.col("kind").last())
    counts = pl.col(
        "excl_jobid_count",
        "xid_cnt",
        "tickets",
        "out_count",
        "multi_node_nodefails",
        "single_node_nodefails",
        "node_days",
    )
    rate = pl.when(pl.col("alone") > 0).then(pl.col("single_node_nodefails") / pl.col("alone"))
    return (
        found.join(kinds, on=NODE, how="left")
        .filter(pl.col("node") != "")
        .with_columns(counts.fill_null(0), pl.col("kind").fill_null(""))
        .with_columns(single_node_nodefailure_rate=rate)
        .select(*NODE, "kind", "node_days", *SIGNALS)
        .sort(NODE)
    )


def node_exposure(tables: Tables, nodes: pl.LazyFrame | None = None) -> pl.LazyFrame:
    """Return by node the `node_days` of jobs in the window, and `alone`: single-node attempts.

    A job counts for its share of a node's GPUs; no node runs for longer than the window. Of jobs
    without GPUs the time alone counts. `nodes`: `host_lists.nodes_of`, if known already.
    """
    begun = pl.max_horizontal("start_ns", pl.lit(tables.since_ns))
    ended = pl.min_horizontal("t_ns", pl.lit(tables.until_ns))
    ran_ns = (ended - begun).clip(lower_bound=0)
    each = pl.col("gpus") / pl.col("nodes").clip(lower_bound=1)
    lists = (
        tables.jobs.filter(pl.col("start_ns").is_not_null() & (pl.col("hosts") != ""))
        .group_by("cluster", "hosts")
        .agg(
            ran_ns=ran_ns.sum(),
            gpu_ns=(ran_ns * each).sum(),
            gpus=each.max(),
            alone=(pl.col("nodes") == 1).sum().cast(pl.Int64),
        )
    )
    has = tables.nodes.sort("t_ns").group_by(NODE).agg(has=pl.col("gpus").last())
    gpus = pl.when(pl.col("has") > 0).then(pl.col("has")).otherwise(pl.col("gpus"))
    time_ns = pl.when(gpus > 0).then(pl.col("gpu_ns") / gpus).otherwise(pl.col("ran_ns"))
    return (
        lists.join(nodes_of(lists) if nodes is None else nodes, on="hosts")
        .group_by(NODE)
        .agg(pl.col("ran_ns", "gpu_ns", "alone").sum(), pl.col("gpus").max())
        .join(has, on=NODE, how="left")
        .select(
            *NODE,
            "alone",
            node_days=(time_ns.clip(upper_bound=tables.until_ns - tables.since_ns)) / DAY_NS,
        )
    )


def clip_tables(tables: Tables, since_ns: int, until_ns: int) -> Tables:
    """Return the records of a window.

    Jobs that ran in it, events in it, outages that overlap it, nodes and checks known before its
    end.
    """
    at = pl.col("t_ns")
    inside = at.is_between(since_ns, until_ns, closed="left")
    lasts = pl.col("until_ns").is_null() | (pl.col("until_ns") > since_ns)
    begun = pl.col("start_ns").is_null() | (pl.col("start_ns") < until_ns)
    return Tables(
        jobs=tables.jobs.filter((at >= since_ns) & begun),
        findings=tables.findings.filter(inside),
        outages=tables.outages.filter((at < until_ns) & lasts),
        repairs=tables.repairs.filter(inside),
        nodes=tables.nodes.filter(at < until_ns),
        checks=tables.checks.filter(at < until_ns),
        interruptions=tables.interruptions.filter(inside),
        costs=tables.costs.filter(inside),
        bandwidths=tables.bandwidths.filter(inside),
        since_ns=since_ns,
        until_ns=until_ns,
    )


def span_days(tables: Tables) -> float:
    """Return the length of the window in days."""
    return (tables.until_ns - tables.since_ns) / SECOND_NS / 86_400


def _excluded(tables: Tables) -> pl.LazyFrame:
    excluding = tables.jobs.filter(pl.col("excluded") != "").select("cluster", "job", "excluded")
    return (
        explode_hosts(excluding.unique(), "excluded")
        .group_by(NODE)
        .agg(excl_jobid_count=pl.col("job").n_unique().cast(pl.Int64))
    )


def _row_count() -> pl.Expr:
    return pl.len().cast(pl.Int64)


DAYS = 28.0
HISTORY_DAYS = 112.0
FDR = 0.05
TIMES_MIN = 4.0
NAMED_MIN = 2
ROUNDS_MAX = 8
HALF = 0.5  # failures assumed of the other nodes if only lemons failed
PRIOR_FAILURES = 2.0  # weight of the fleet's rate in that of a kind of node


FailureBasis = Literal["jobs", "outages"]
PAST = "|past"  # of columns, until they have their names


class RankingScore(NamedTuple):
    """Score of a ranking against the true lemons.

    `precision` and `recall` of the nodes that it calls lemons; `precision_at_80`: of the ranking
    down to 80 % of the true ones. None for a zero denominator.
    """

    called: int
    right: int
    true: int
    precision: float | None
    recall: float | None
    precision_at_80: float | None


def rank_lemons(
    tables: Tables,
    infra: pl.LazyFrame,
    *,
    days: float = DAYS,
    history_days: float = HISTORY_DAYS,
    fdr: float = FDR,
    times_min: float = TIMES_MIN,
    same_s: float = SIMULTANEOUS_S,
    by: FailureBasis = "jobs",
) -> pl.DataFrame:
    """Return all nodes that ran jobs in the last `days`, the likeliest lemon first.

    `failures` x of a node: the weights of its events of `infra` (`merge_simultaneous`); `expected`
    m: its node-days of running times the rate of nodes of its `kind` without lemons, which tends
    to the fleet's for a kind with few failures (Gamma with the weight of 2 failures), and is that
    of half a failure if only lemons failed. `p`: Poisson's tail P(N >= x; m), for shares of
    failures continued as the regularised gamma function P(x, m). With a longer `history_days` the
    same over these (`past_`): p is then twice the smaller. `q`: p as adjusted by Benjamini and
    Hochberg (1995): the share of false calls among the nodes up to that q.

    A `lemon` has q of at most `fdr`, at least `times_min` as many failures as expected, and at
    least two events that are certainly its own, one of them in the last `days`; without such an
    event in the last `days` it was a lemon `earlier`. Rates are recomputed without the lemons
    until no new one is found. Other columns: the signals of the last `days`.

    `by` outages: for a cluster without job records, failures are the outages that began, and
    node-days are the nodes' up time.
    """
    check_positive("days", days)
    check_not_negative("times_min", times_min)
    if not 0 < fdr < 1:
        raise UsageError(f"fdr must lie between 0 and 1, not {fdr!r}")
    if not history_days >= days:
        raise UsageError(f"history_days ({history_days!r}) must be at least days ({days!r})")
    now, past = (
        clip_tables(
            tables, max(tables.since_ns, tables.until_ns - round(d * DAY_NS)), tables.until_ns
        )
        for d in (days, history_days)
    )
    blame = attribute_to_nodes(past, infra) if by == "jobs" else outages_as_failures(past)
    nodes = nodes_of(past.jobs).collect().lazy()
    evidence = node_signals(now, infra, nodes)
    exposure = node_exposure(past, nodes).drop("alone")
    if by == "outages":
        there = evidence.drop("node_days").join(
            node_days_up(now), on=NODE, how="full", coalesce=True
        )
        counts = [name for name in SIGNALS if name != "single_node_nodefailure_rate"]
        evidence = there.with_columns(pl.col(counts).fill_null(0))
        exposure = node_days_up(past)
        evidence = evidence.with_columns(pl.col("kind").fill_null(""))
    before = exposure.join(_failure_counts(past, blame, same_s), on=NODE, how="full", coalesce=True)
    found = (
        evidence.join(_failure_counts(now, blame, same_s), on=NODE, how="left")
        .join(before, on=NODE, how="left", suffix=PAST)
        .collect()
        .rename(lambda name: "past_" + name.removesuffix(PAST) if name.endswith(PAST) else name)
        .with_columns(pl.col("^(past_)?(failures|named|node_days)$").fill_null(0))
        .filter(pl.col("node_days") > 0)
    )
    longer = past.since_ns < now.since_ns
    return _lemons(found, fdr, times_min, longer=longer)


def failure_basis(tables: Tables) -> FailureBasis:
    """Return "jobs" if any job ran; else a cluster shows its failures by outages alone."""
    ran = tables.jobs.select(pl.col("start_ns").is_not_null().any())
    return "jobs" if ran.collect().item() else "outages"


def score_ranking(found: pl.DataFrame, true: Collection[str]) -> RankingScore:
    """Score a ranking of `rank_lemons` against the names of the true lemons."""
    right = found["node"].is_in(list(true)).to_list()
    called = found["lemon"].to_list()
    both = sum(a and b for a, b in zip(right, called, strict=True))
    wanted = math.ceil(0.8 * len(true) - 1e-9)
    at_80 = None
    hits = 0
    for rank, hit in enumerate(right, 1):
        hits += hit
        if true and hits >= wanted:
            at_80 = hits / rank
            break
    lemons = sum(called)
    return RankingScore(
        called=lemons,
        right=both,
        true=len(true),
        precision=both / lemons if lemons else None,
        recall=both / len(true) if true else None,
        precision_at_80=at_80,
    )


def benjamini_hochberg(p: Sequence[float]) -> list[float]:
    """Return Benjamini and Hochberg's q of each p: min of p_(j) n/j over all j from its rank on."""
    order = sorted(range(len(p)), key=p.__getitem__, reverse=True)
    q = [1.0] * len(p)
    least = 1.0
    for after, at in enumerate(order):
        least = min(least, p[at] * len(p) / (len(p) - after))
        q[at] = least
    return q


def _failure_counts(window: Tables, blame: pl.LazyFrame, same_s: float) -> pl.LazyFrame:
    inside = pl.col("t_ns").is_between(window.since_ns, window.until_ns, closed="left")
    return (
        merge_simultaneous(blame.filter(inside), same_s)
        .group_by(NODE)
        .agg(
            failures=pl.col("weight").sum(),
            named=pl.col("named").sum().cast(pl.Int64),
            last_ns=pl.col("t_ns").max(),
        )
    )


def _lemons(found: pl.DataFrame, fdr: float, times_min: float, *, longer: bool) -> pl.DataFrame:
    found = found.with_columns(lemon=pl.lit(value=False))
    for _ in range(ROUNDS_MAX):
        before = found["lemon"]
        found = _add_expected(_add_expected(found, ""), "past_")
        now, past = (_tail_probabilities(found, prefix) for prefix in ("", "past_"))
        p = [min(1.0, 2 * min(pair)) for pair in zip(now, past, strict=True)] if longer else now
        q = benjamini_hochberg(p)
        often = pl.max_horizontal("times", "past_times") >= times_min
        certain = (pl.col("named") >= 1) & (pl.col("past_named") >= NAMED_MIN)
        found = found.with_columns(
            p=pl.Series(p, dtype=pl.Float64), q=pl.Series(q, dtype=pl.Float64)
        )
        found = found.with_columns(lemon=(pl.col("q") <= fdr) & often & certain)
        before_now = (pl.col("named") == 0) & (pl.col("past_named") >= NAMED_MIN)
        found = found.with_columns(earlier=(pl.col("q") <= fdr) & often & before_now)
        if found["lemon"].equals(before):
            break
    return found.sort(
        ["lemon", "p", "times", *NODE], descending=[True, False, True, False, False]
    ).select(
        *NODE,
        "kind",
        "lemon",
        "earlier",
        "p",
        "q",
        "failures",
        "expected",
        "times",
        "node_days",
        "past_failures",
        "past_expected",
        "past_times",
        "past_node_days",
        "last_ns",
        *SIGNALS,
    )


def _add_expected(found: pl.DataFrame, prefix: str) -> pl.DataFrame:
    """Add the failures expected by the rate of each node's kind, which excludes lemons."""
    failures, days = (
        pl.when(~pl.col("lemon")).then(pl.col(prefix + name)).otherwise(0.0)
        for name in ("failures", "node_days")
    )
    sound_failures = (
        pl.when(pl.col("lemon").any())
        .then(failures.sum().clip(lower_bound=HALF))
        .otherwise(failures.sum())
    )
    fleet = sound_failures / pl.when(days.sum() > 0).then(days.sum())
    kind = ["cluster", "kind"]
    weight = PRIOR_FAILURES + failures.sum().over(kind)
    rate = weight / (PRIOR_FAILURES / fleet + days.sum().over(kind))
    expected = (pl.col(prefix + "node_days") * rate).fill_null(0.0).fill_nan(0.0)
    name = prefix + "expected"
    times = pl.when(pl.col(name) > 0).then(pl.col(prefix + "failures") / pl.col(name))
    return found.with_columns(expected.alias(name)).with_columns(
        times.otherwise(
            pl.when(pl.col(prefix + "failures") > 0).then(math.inf).otherwise(0.0)
        ).alias(prefix + "times")
    )


def _tail_probabilities(found: pl.DataFrame, prefix: str) -> list[float]:
    pairs = found.select(prefix + "failures", prefix + "expected").iter_rows()
    return [
        1.0 if count <= 0 else (numerics.gamma_lower(count, mean) if mean > 0 else 0.0)
        for count, mean in pairs
    ]
