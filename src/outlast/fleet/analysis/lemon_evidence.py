"""Evidence for each lemon (symptom, code, device, part), and the commands that would drain them.

Kokolis et al. 2025, IV.A and Table II: most lemons have one part that is the cause.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import polars as pl

from outlast.fleet.analysis.collective_bandwidth import (
    measured_bandwidths,
    slow_groups,
    slow_hosts,
)
from outlast.fleet.analysis.exposure import KEY, SECOND_NS
from outlast.fleet.analysis.failure_attribution import CAUSES, AttributedFailures
from outlast.fleet.record_tables import Tables
from outlast.log_records import LEMON_PARTS, Symptom
from outlast.text_formatting import plural
from outlast.theory.numerics import check_share

NODE = ["cluster", "node"]
Rows: TypeAlias = list[dict[str, Any]]
UNKNOWN = "not known"
# The part that a symptom suggests, in the terms of Table II.
PARTS: dict[Symptom, str] = {
    "gpu-memory": "gpu",
    "gpu-unavailable": "gpu",
    "nvlink": "gpu",
    "pcie": "pcie",
    "ib-link": "nic or optics",
    "ethlink": "nic",
    "main-memory": "dimm",
    "cpu": "cpu",
    "thermal": "cooling",
    "disk": "disk",
    "clock": "bios",
}
SCHEMA = {
    "cluster": pl.String,
    "node": pl.String,
    "symptom": pl.String,
    "code": pl.String,
    "device": pl.String,
    "part": pl.String,
    "exchanged": pl.Boolean,
    "why": pl.String,
}


def lemon_evidence(tables: Tables, found: AttributedFailures, nodes: pl.DataFrame) -> pl.DataFrame:
    """Return one row of evidence for each of `nodes` (cluster, node), in their order.

    `symptom` and `code`: those of the most failures attributed to it; without attributed causes,
    those of the most findings that can end a job (`failure_attribution.CAUSES`), else "". `device`:
    the one with the most findings of that code or symptom. `part`: the most often replaced one
    (`exchanged`), else the one that a ticket names, else the one that the symptom suggests (PARTS),
    else UNKNOWN. `why`: all of it in a sentence, with counts and the last day, and the benchmarks
    in which the node's groups were slow or had wrong values.
    """
    wanted = nodes.select(NODE).unique().lazy()
    ours = pl.col("severity").is_in(CAUSES)
    ended = found.failures.select(KEY).lazy()
    causes = found.causes.lazy().filter(ours).join(ended, on=KEY, how="semi")
    causes = causes.join(wanted, on=NODE, how="semi").collect()
    inside = pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
    findings = tables.findings.filter(ours, inside).join(wanted, on=NODE, how="semi").collect()
    repairs = tables.repairs.filter(inside).join(wanted, on=NODE, how="semi").collect()
    benchmarks = _benchmark_facts(tables)
    # A node has few rows: Python is faster than a query for each node.
    causes_of = _by_node(causes, [*KEY, "symptom", "code"])
    findings_of = _by_node(findings, ["symptom", "code", "device", "t_ns"])
    repairs_of = _by_node(repairs, ["kind", "part"])
    rows = [
        _row(
            name, benchmarks.get(name[1], []), causes_of[name], findings_of[name], repairs_of[name]
        )
        for name in nodes.select(NODE).iter_rows()
    ]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def suspected_parts(rows: pl.DataFrame) -> pl.DataFrame:
    """Return Table II of the lemons in `lemon_evidence`.

    `part`, the number of `lemons`, in how many of them it was `exchanged`, their `share`, and the
    `paper`'s.
    """
    counts = (
        rows.group_by("part")
        .agg(lemons=pl.len().cast(pl.Int64), exchanged=pl.col("exchanged").sum().cast(pl.Int64))
        .with_columns(share=pl.col("lemons") / max(1, len(rows)))
        .sort(["lemons", "part"], descending=[True, False])
    )
    paper = pl.DataFrame(
        {"part": list(LEMON_PARTS), "paper": list(LEMON_PARTS.values())},
        schema={"part": pl.String, "paper": pl.Float64},
    )
    return counts.join(paper, on="part", how="left", maintain_order="left")


def _benchmark_facts(tables: Tables) -> dict[str, list[str]]:
    """Return what benchmarks of collectives show about nodes."""
    found = measured_bandwidths(tables)
    facts: dict[str, list[str]] = {}
    for host in slow_hosts(found, slow_groups(found)).iter_rows(named=True):
        if host["slow"]:
            facts.setdefault(host["node"], []).append(
                f"{host['slow']} of {plural(host['groups'], 'group')} with slow collectives"
            )
        if host["wrong_runs"]:
            facts.setdefault(host["node"], []).append(
                f"{plural(host['wrong_runs'], 'benchmark')} with wrong values"
            )
    return facts


def _by_node(frame: pl.DataFrame, columns: Sequence[str]) -> defaultdict[tuple[str, str], Rows]:
    """Return rows with these columns by node."""
    found: defaultdict[tuple[str, str], Rows] = defaultdict(list)
    for row in frame.select(*NODE, *(name for name in columns if name not in NODE)).to_dicts():
        found[row["cluster"], row["node"]].append(row)
    return found


def _row(
    name: tuple[str, str], benchmarks: list[str], causes: Rows, findings: Rows, repairs: Rows
) -> tuple[str, str, str, str, str, str, bool, str]:
    failures = len({_attempt(row) for row in causes})
    symptom, count = _most_frequent(text for _, text in {_cause(row, "symptom") for row in causes})
    if not symptom:
        symptom, _ = _most_frequent(row["symptom"] for row in findings)
    codes = {_cause(row, "code") for row in causes if row["symptom"] == symptom}
    code, _ = _most_frequent(text for _, text in codes)
    same = [row for row in findings if row["symptom"] == symptom]
    if not code:
        code, _ = _most_frequent(row["code"] for row in same)
    alike = [row for row in same if not code or row["code"] == code]
    device, on_device = _most_frequent(row["device"] for row in alike)
    part, exchanged = _part(repairs, symptom)
    facts = [
        f"{symptom}{f' ({code})' if code else ''} at {count} of {plural(failures, 'failure')} with"
        " a cause"
        if count
        else "nothing was found at its failures"
    ]
    if not count and symptom:
        facts.append(f"{symptom}{f' ({code})' if code else ''} found at other times")
    if device:
        facts.append(f"{on_device} of {plural(len(alike), 'finding')} on {device}")
    if alike:
        last_s = max(row["t_ns"] for row in alike) // SECOND_NS
        facts.append(f"last on {dt.datetime.fromtimestamp(last_s, tz=dt.UTC):%Y-%m-%d}")
    swaps = [row["part"].lower() for row in repairs if row["kind"] == "swap"]
    if swaps:
        facts.append(f"exchanged: {', '.join(sorted(set(swaps)))}")
    tickets = len(repairs) - len(swaps)
    if tickets:
        facts.append(plural(tickets, "ticket"))
    facts += benchmarks
    return (*name, symptom, code, device, part, exchanged, "; ".join(facts))


def _attempt(row: dict[str, Any]) -> tuple[object, ...]:
    return tuple(row[key] for key in KEY)


def _cause(row: dict[str, Any], column: str) -> tuple[tuple[object, ...], str | None]:
    return _attempt(row), row[column]


def _most_frequent(texts: Iterable[str | None]) -> tuple[str, int]:
    """Return the most frequent text and its count; "" without any."""
    counts = Counter(text for text in texts if text)
    return min(counts.items(), key=lambda item: (-item[1], item[0]), default=("", 0))


def _part(repairs: Rows, symptom: str) -> tuple[str, bool]:
    for kind in ("swap", "ticket"):
        parts = (row["part"] for row in repairs if row["kind"] == kind)
        named, count = _most_frequent(
            part for part in parts if part and part.lower() not in ("?", "unknown")
        )
        if count:
            return named.lower(), kind == "swap"
    suggested = {str(key): part for key, part in PARTS.items()}
    return suggested.get(symptom, UNKNOWN), False


SHARE_MAX = 0.02
PLAIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,253}[A-Za-z0-9])?")


class DrainCommands(NamedTuple):
    """Commands that drain lemons.

    `lines` to run; nodes `beyond` the drain budget; names `unsafe` in a command, of nodes or of
    their cluster.
    """

    lines: list[str]
    beyond: list[str]
    unsafe: list[str]


def drain_commands(found: pl.DataFrame, *, share_max: float = SHARE_MAX) -> DrainCommands:
    """Return drain commands for the lemons in the ranking of `rank_lemons`, the worst first.

    At most `share_max` of each cluster's nodes in the ranking, rounded down, but at least one
    unless it is 0. A command names the node's cluster (`-M`), so that it cannot drain another
    cluster's node of the same name.
    """
    check_share("share_max", share_max)
    named = found.filter("lemon").select("cluster", "node", "failures", "expected", "times")
    nodes = dict(found.group_by("cluster").len().iter_rows())
    most = {
        cluster: max(1, math.floor(share_max * node_count)) if share_max else 0
        for cluster, node_count in nodes.items()
    }
    lines: list[str] = []
    beyond: list[str] = []
    unsafe: list[str] = []
    for cluster, node, failures, expected, times in named.iter_rows():
        if not PLAIN.fullmatch(node) or not (cluster == "" or PLAIN.fullmatch(cluster)):
            unsafe.append(node)
        elif not most[cluster]:
            beyond.append(node)
        else:
            most[cluster] -= 1
            of = f"-M {cluster} " if cluster else ""
            reason = f"lemon: {failures:.3g} failures, {expected:.2g} expected, {times:.3g} times"
            lines.append(f"scontrol {of}update NodeName={node} State=DRAIN Reason='{reason}'")
    return DrainCommands(lines, beyond, unsafe)
