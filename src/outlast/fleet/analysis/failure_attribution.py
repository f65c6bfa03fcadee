"""Attribution of failed attempts to infrastructure, to causes and to nodes.

Kokolis et al. 2025, III: a failure is attributed to a cause that was detected within the last ten
minutes of the job or five minutes after it. All such causes are kept; the root cause is not decided
automatically.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import polars as pl

from outlast.fleet.analysis.exposure import KEY, SECOND_NS
from outlast.fleet.host_lists import explode_hosts
from outlast.fleet.record_tables import Tables
from outlast.log_records import DOMAINS, TAXONOMY, possible_domains

BEFORE_S = 600
AFTER_S = 300
BY_NODE = ("NODE_FAIL", "BOOT_FAIL")  # reported by the scheduler
PERHAPS = ("FAILED", "REQUEUED")  # may also be a user's error or request
LOST = "now"  # the severity that attributes an attempt of PERHAPS to infrastructure
CAUSES = ("now", "drain")  # severities that can have ended a job; the others are only signs
USERS = [symptom for symptom, row in TAXONOMY.items() if row.domains == {"user"}]
UNATTRIBUTED = "unattributed"
CauseGrouping = Literal["symptom", "check", "code"]


class AttributedFailures(NamedTuple):
    """Failed attempts and their causes.

    `failures`: one row for each attempt that infrastructure ended; `causes`: one row for each
    finding on the nodes of an attempt in BY_NODE or PERHAPS around its end, attributed or not.
    """

    failures: pl.DataFrame
    causes: pl.DataFrame


def attribute_failures(
    tables: Tables, *, before_s: float = BEFORE_S, after_s: float = AFTER_S
) -> AttributedFailures:
    """Attribute failed attempts to the findings on their nodes.

    Findings count from end - before_s to end + after_s, both included. Infrastructure ended an
    attempt that is in NODE_FAIL or BOOT_FAIL, or in FAILED with a finding of severity `now` (the
    paper's rule) whose symptom is not always a user's, as OOM is. REQUEUED counts as FAILED does,
    or if the scheduler named a failed node: a health check that requeues a job leaves that state,
    and so does a user. If there are findings on a known failed node, those on other nodes do not
    count. A finding while a later job held the node, and failed on it, is that job's alone (the
    paper counts it for both).

    `causes`: KEY, node, check, symptom, code, severity; first_s, the first of `many` like it, in
    seconds after the end; rank from 1 on, by severity, then time. `failures`: KEY, state, t_ns,
    nodes, gpus; worst (a severity, null without a finding), symptoms of CAUSES, and the domains
    that can have caused all of these (differential diagnosis, Table I; empty if none can: there was
    more than one cause).
    """
    before_ns = round(before_s * SECOND_NS)
    after_ns = round(after_s * SECOND_NS)
    slot_ns = before_ns + after_ns
    signs = _unhealthy_findings(tables, slot_ns)
    begin = (pl.col("t_ns") - before_ns) // slot_ns
    end = (pl.col("t_ns") + after_ns) // slot_ns
    failed = _failed_rows(tables, signs["slot"], begin, end)
    causes = _causes(failed, signs, before_ns, after_ns)
    can_end = pl.col("severity").is_in(CAUSES)
    users = pl.col("symptom").is_in(USERS)
    by_attempt = causes.group_by(KEY).agg(
        worst=pl.col("severity").sort_by("rank").first(),
        lost=((pl.col("severity") == LOST) & ~users).any(),
        symptoms=pl.col("symptom").cast(pl.String).filter(can_end).unique().sort(),
    )
    table = failed.join(by_attempt, on=KEY, how="left").with_columns(
        pl.col("lost").fill_null(value=False), pl.col("symptoms").fill_null([])
    )
    named = (pl.col("state") == "REQUEUED") & (pl.col("failed_node") != "")
    failures = (
        table.filter(pl.col("state").is_in(BY_NODE) | pl.col("lost") | named)
        .select(*KEY, "state", "t_ns", "nodes", "gpus", "worst", "symptoms")
        .sort("t_ns", *KEY)
    )
    return AttributedFailures(failures.with_columns(domains=_domains(failures["symptoms"])), causes)


def label_failures(found: AttributedFailures, by: CauseGrouping = "symptom") -> pl.DataFrame:
    """Return KEY, t_ns and `cause` of each failure: one row per different cause of CAUSES.

    A failure without any is UNATTRIBUTED. `share` is one over the number of its causes, so that a
    failure counts once in a sum.
    """
    label = pl.col(by).cast(pl.String)
    if by == "code":  # a check without codes is its own
        label = pl.when(label != "").then(label).otherwise(pl.col("check"))
    causes = (
        found.causes.filter(pl.col("severity").is_in(CAUSES))
        .select(*KEY, cause=label)
        .unique(maintain_order=True)
    )
    return (
        found.failures.select(*KEY, "t_ns", "gpus", "nodes")
        .join(causes, on=KEY, how="left", maintain_order="left_right")
        .with_columns(
            pl.col("cause").fill_null(UNATTRIBUTED), share=1 / pl.len().over(KEY).cast(pl.Float64)
        )
    )


def cooccurring_causes(found: AttributedFailures, by: CauseGrouping = "symptom") -> pl.DataFrame:
    """Return the pairs of causes that failures have in common, in both orders.

    `cause` and `other`, the failures that have both (`together`), those that have `cause`
    (`failures`), and their ratio `share`.
    """
    causes = label_failures(found, by).filter(pl.col("cause") != UNATTRIBUTED).select(*KEY, "cause")
    alone = causes.group_by("cause").agg(failures=pl.len().cast(pl.Int64))
    return (
        causes.join(causes.rename({"cause": "other"}), on=KEY)
        .filter(pl.col("cause") != pl.col("other"))
        .group_by("cause", "other")
        .agg(together=pl.len().cast(pl.Int64))
        .join(alone, on="cause")
        .with_columns(share=pl.col("together") / pl.col("failures"))
        .sort(["together", "cause", "other"], descending=[True, False, False])
    )


def _unhealthy_findings(tables: Tables, slot_ns: int) -> pl.DataFrame:
    """Return the findings that are not healthy. `slot`: intervals as long as the window."""
    return (
        tables.findings.filter(pl.col("severity") != "healthy")
        .select("cluster", "node", "check", "symptom", "code", "severity", at_ns="t_ns")
        .with_columns(slot=pl.col("at_ns") // slot_ns)
        .collect()
    )


def _failed_rows(tables: Tables, slots: pl.Series, begin: pl.Expr, end: pl.Expr) -> pl.DataFrame:
    """Return the attempts in BY_NODE, and those in PERHAPS with any finding around their end.

    This drops most user errors early. A window overlaps at most two slots.
    """
    known = slots.unique().implode()
    near = begin.is_in(known) | end.is_in(known) | (pl.col("failed_node") != "")
    return (
        tables.jobs.filter(
            pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left"),
            pl.col("state").is_in(BY_NODE) | (pl.col("state").is_in(PERHAPS) & near),
        )
        .select(*KEY, "state", "start_ns", "t_ns", "nodes", "gpus", "hosts", "failed_node")
        .collect()
    )


def _causes(
    failed: pl.DataFrame, signs: pl.DataFrame, before_ns: int, after_ns: int
) -> pl.DataFrame:
    """Return the findings of each attempt's window.

    An equal join on node and slot, then a filter by the window: no row meets more than two slots.
    Hosts are expanded last, since there are many and few have a finding in the slot.
    """
    slot_ns = before_ns + after_ns
    signs = signs.with_row_index("sign")
    windows = (
        failed.lazy()
        .select(*KEY, "start_ns", "t_ns", "failed_node", "hosts")
        .with_columns(
            slot=pl.concat_list(
                (pl.col("t_ns") - before_ns) // slot_ns, (pl.col("t_ns") + after_ns) // slot_ns
            ).list.unique()
        )
        .explode("slot")
        .join(signs.lazy().select("slot").unique(), on="slot", how="semi")
        .collect()
    )
    offset = pl.col("at_ns") - pl.col("t_ns")
    ours = pl.col("cluster")
    theirs = pl.col("cluster_right")
    same_cluster = (ours == theirs) | (ours == "") | (theirs == "")  # "": unknown in its log
    on_failed = pl.col("node") == pl.col("failed_node")
    worst = pl.col("severity").to_physical()
    while_held = pl.col("at_ns").is_between(pl.col("start_ns"), pl.col("t_ns"))
    same = ("node", "at_ns", "check", "symptom", "code", "severity", "cluster_right")
    next_began = pl.when(while_held).then("start_ns").max().over(same)
    own = (next_began < pl.col("t_ns")) | (next_began <= pl.col("start_ns"))  # or one of no length
    return (
        explode_hosts(windows.lazy())
        .join(signs.lazy(), on=["node", "slot"])
        .unique([*KEY, "sign"])  # a list may name a node twice
        .filter(offset.is_between(-before_ns, after_ns), same_cluster)
        .filter(own.fill_null(value=True))
        .filter(on_failed | ~on_failed.any().over(KEY))
        .group_by(*KEY, "node", "check", "symptom", "code", "severity")
        .agg(first_s=offset.min() / SECOND_NS, many=pl.len().cast(pl.Int64))
        .sort(*KEY, worst, "first_s", "symptom", "check", "code", "node")
        .with_columns(rank=pl.int_range(1, pl.len() + 1, dtype=pl.Int64).over(KEY))
        .collect()
    )


def _domains(symptoms: pl.Series) -> pl.Series:
    """Return the domains that can have caused all symptoms of each list, as text."""
    known = {
        tuple(row): "+".join(each for each in DOMAINS if each in possible_domains(set(row)).domains)
        for row in symptoms.unique()
    }
    return pl.Series([known[tuple(row)] for row in symptoms], dtype=pl.String)


SIMULTANEOUS_S = 600.0
NODE = ["cluster", "node"]


def attribute_to_nodes(tables: Tables, infra: pl.LazyFrame) -> pl.LazyFrame:
    """Return one row per failed attempt and responsible node.

    Columns: KEY, t_ns, nodes (of the attempt), node, `weight`, which sums to 1 per attempt, and
    `named`: only this node can be responsible.

    `infra`: cluster, job, attempt and optionally `node` ("" or null if unknown; several rows share
    the weight). Otherwise the responsible node is the scheduler's `failed_node`, else the attempt's
    only node, else all of its nodes with equal weight. A component of a heterogeneous job shares
    the failed node of the others. Attempts without any known node are dropped.
    """
    has_node = "node" in infra.collect_schema().names()
    reported_node = pl.col("node") if has_node else pl.lit("")
    named = infra.select(*KEY, reported=reported_node.fill_null("").cast(pl.String)).unique()
    reported_nodes = named.group_by(KEY).agg(pl.col("reported").filter(pl.col("reported") != ""))
    failures = (
        tables.jobs.select(*KEY, "t_ns", "nodes", "hosts", "failed_node")
        .join(reported_nodes, on=KEY, how="inner")
        .with_columns(failed_node=_failed_node())
        .with_columns(
            reported=pl.when(pl.col("reported").list.len() > 0)
            .then("reported")
            .when(pl.col("failed_node") != "")
            .then(pl.concat_list("failed_node"))
        )
    )
    columns = [*KEY, "t_ns", "nodes", "node"]
    reported = (
        failures.filter(pl.col("reported").is_not_null())
        .explode("reported", empty_as_null=False)
        .rename({"reported": "node"})
        .select(columns)
    )
    unreported = explode_hosts(failures.filter(pl.col("reported").is_null())).select(columns)
    weight = 1 / pl.len().over(KEY).cast(pl.Float64)
    return (
        pl.concat([reported, unreported])
        .with_columns(weight=weight)
        .with_columns(named=pl.col("weight") == 1)
    )


def _failed_node() -> pl.Expr:
    """Return the scheduler's failed node.

    A component of a heterogeneous job (12+1) without one takes that of the other components: they
    end with it, and their own nodes are healthy.
    """
    leader = pl.col("job").str.extract(r"^(\d+)\+\d+$")
    named = pl.col("failed_node").filter(pl.col("failed_node") != "").first()
    together = named.over("cluster", leader, "attempt")
    alone = (pl.col("failed_node") == "") & leader.is_not_null()
    return pl.when(alone & together.is_not_null()).then(together).otherwise("failed_node")


def worst_nodes(found: AttributedFailures) -> pl.LazyFrame:
    """Return the attempts that infrastructure ended, in the form of `attribute_to_nodes`.

    Each with the nodes of its worst findings that can have ended it, or with none.
    """
    rank = pl.col("severity").replace_strict(
        dict(zip(CAUSES, range(len(CAUSES)), strict=True)), default=None, return_dtype=pl.Int64
    )
    worst = (
        found.causes.lazy()
        .with_columns(how=rank)
        .filter(pl.col("how").is_not_null())
        .filter(pl.col("how") == pl.col("how").min().over(KEY))
        .select(*KEY, "node")
        .unique()
    )
    return found.failures.lazy().select(KEY).join(worst, on=KEY, how="left")


def merge_simultaneous(blame: pl.LazyFrame, same_s: float = SIMULTANEOUS_S) -> pl.LazyFrame:
    """Merge failures of a node within `same_s` of the previous one into one event.

    Eight jobs that share a node end by one failure. Keeps `t_ns` of the first and the highest
    `weight`.
    """
    is_later = pl.col("t_ns") - pl.col("t_ns").shift(1) > round(same_s * SECOND_NS)
    new = is_later | pl.any_horizontal(pl.col(name) != pl.col(name).shift(1) for name in NODE)
    return (
        blame.sort(*NODE, "t_ns")
        .with_columns(event=new.fill_null(value=True).cum_sum())
        .group_by("event")
        .agg(
            pl.col("cluster", "node", "t_ns").first(), pl.col("weight").max(), pl.col("named").any()
        )
        .drop("event")
    )
