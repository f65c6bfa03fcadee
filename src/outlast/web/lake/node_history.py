"""History of one node in a lake's window, and the evidence against it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import polars as pl

from outlast.errors import LakeError
from outlast.fleet.analysis.exposure import KEY
from outlast.fleet.analysis.failure_attribution import attribute_to_nodes
from outlast.fleet.analysis.lemon_evidence import lemon_evidence
from outlast.fleet.record_tables import Tables
from outlast.fleet.report.report_sections import ReportFacts
from outlast.text_formatting import duration, plural

EVENTS_MAX = 500  # newest ones of a page
TEXT_MAX = 2_000  # characters of one text
Kind = Literal["failure", "finding", "outage", "repair", "survived"]
KINDS: tuple[Kind, ...] = ("failure", "survived", "finding", "outage", "repair")


class NodeEvent(NamedTuple):
    """An event of a node. `until_ns`: its end, of an outage; `level`: severity of a finding, or
    whether a failure is attributed to the node."""

    t_ns: int
    kind: Kind
    level: str
    text: str
    until_ns: int | None = None


class NodeHistory(NamedTuple):
    """Everything that the page of a node shows.

    `ranking`: the node's row of `rank_lemons`, if it ran jobs in the ranked days; `states`: number
    of attempts on the node by their state; `events`: newest first, all of them.
    """

    node: str
    cluster: str
    kind: str
    ranking: dict[str, Any] | None
    part: str
    why: str
    states: list[tuple[str, int]]
    events: list[NodeEvent]


def node_history(facts: ReportFacts, node: str, cluster: str) -> NodeHistory:
    """Return the history of a node. Raises LakeError for one that no record of the window names."""
    tables = facts.tables
    lists = facts.host_lists.lazy().filter(pl.col("node") == node).select("hosts")
    jobs = tables.jobs.join(lists, on="hosts", how="semi")
    own = {
        kind: _of_node(tables, kind, node)
        for kind in ("findings", "outages", "repairs", "interruptions")
    }
    known = tables.nodes.filter(pl.col("node") == node).sort("t_ns").collect()
    states = jobs.group_by(pl.col("state").cast(pl.String)).agg(pl.len()).sort("state").collect()
    if not len(states) and not len(known) and not any(map(len, own.values())):
        raise LakeError(f"no record of this window names node {node[:TEXT_MAX]}")
    names = pl.DataFrame({"cluster": [cluster], "node": [node]})
    (evidence,) = lemon_evidence(tables, facts.found, names).iter_rows(named=True)
    row = facts.ranking.filter(pl.col("node") == node).to_dicts()
    events = [
        *_failures(facts, jobs, node),
        *map(_finding, own["findings"].iter_rows(named=True)),
        *map(_outage, own["outages"].iter_rows(named=True)),
        *map(_repair, own["repairs"].iter_rows(named=True)),
        *map(_interruption, own["interruptions"].iter_rows(named=True)),
    ]
    return NodeHistory(
        node=node,
        cluster=cluster,
        kind=known["kind"][-1] if len(known) else "",
        ranking=row[0] if row else None,
        part=evidence["part"],
        why=evidence["why"],
        states=[(state, count) for state, count in states.iter_rows()],
        events=sorted(events, key=lambda event: event.t_ns, reverse=True),
    )


def _of_node(tables: Tables, kind: str, node: str) -> pl.DataFrame:
    """Return the records of a node in the window; findings near its ends are of failures there."""
    frame: pl.LazyFrame = getattr(tables, kind)
    return frame.filter(pl.col("node") == node).collect()


def _failures(facts: ReportFacts, jobs: pl.LazyFrame, node: str) -> Iterator[NodeEvent]:
    """Yield the attempts on the node that infrastructure ended, with the node's share in each."""
    blame = attribute_to_nodes(facts.tables, facts.infra).filter(pl.col("node") == node)
    table = (
        facts.found.failures.lazy()
        .join(jobs.select(KEY), on=KEY, how="semi")
        .join(blame.select(*KEY, "weight"), on=KEY, how="left")
        .collect()
    )
    for row in table.iter_rows(named=True):
        share = row["weight"]
        whose = "not attributed to this node" if share is None else "attributed to this node"
        if share is not None and share < 1:
            whose += f" by a share of {share:.3g}"
        signs = ", ".join(row["symptoms"]) or "no finding"
        yield NodeEvent(
            row["t_ns"],
            "failure",
            "" if share is None else "attributed",
            f"job {row['job']}, attempt {row['attempt']}, ended as {row['state']}:"
            f" {plural(row['gpus'], 'GPU')} on {plural(row['nodes'], 'node')}; {whose}; {signs}",
        )


def _finding(row: dict[str, Any]) -> NodeEvent:
    words = [row["check"], row["symptom"], row["code"], row["device"], row["detail"]]
    text = " · ".join(word for word in words if word)
    return NodeEvent(row["t_ns"], "finding", row["severity"], text)


def _outage(row: dict[str, Any]) -> NodeEvent:
    until_ns = row["until_ns"]
    length = "lasts" if until_ns is None else duration(max(0, until_ns - row["t_ns"]) / 1e9)
    text = " · ".join(word for word in (length, row["symptom"], row["detail"]) if word)
    return NodeEvent(row["t_ns"], "outage", "", text, until_ns)


def _repair(row: dict[str, Any]) -> NodeEvent:
    text = " · ".join(word for word in (row["kind"], row["part"], row["detail"]) if word)
    return NodeEvent(row["t_ns"], "repair", "", text)


def _interruption(row: dict[str, Any]) -> NodeEvent:
    return NodeEvent(
        row["t_ns"],
        "survived",
        "",
        f"job {row['job']} survived {row['cause']} by {row['rung']}, after"
        f" {duration(row['length_ns'] / 1e9)}",
    )
