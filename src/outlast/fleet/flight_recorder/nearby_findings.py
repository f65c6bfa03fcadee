"""Join of a hang with health findings on its nodes, from 10 min before to 5 min after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import polars as pl
from msgspec import Struct

from outlast.errors import CorruptionError, StorageError, UsageError
from outlast.fleet import lake_selection
from outlast.fleet.lake import Lake, format_time
from outlast.fleet.record_tables import table
from outlast.log_records import SEVERITIES, Finding

BEFORE_S = 600
AFTER_S = 300
SHOWN = 4  # of one node
_LINE_MAX = 1 << 20


class NearbyFindings(NamedTuple):
    """Findings around a time, and notes on their source."""

    findings: pl.DataFrame
    notes: tuple[str, ...] = ()


class RankFinding(Struct, frozen=True, kw_only=True):
    """Finding on the node of ranks.

    `before_s`: seconds before the first rank began to wait; negative: after it.
    """

    ranks: tuple[int, ...]
    node: str
    before_s: float
    check: str
    symptom: str
    severity: str
    code: str
    device: str
    detail: str


class _Report(Struct, frozen=True):
    """Part of a report of `outlast check --json`."""

    findings: tuple[Finding, ...]


def from_lake(lake: Path, t_ns: int, cluster: str | None = None) -> NearbyFindings:
    """Return the findings around `t_ns` of one cluster (`resolve_cluster`).

    Raises LakeError for an invalid lake, UsageError if the cluster is ambiguous.
    """
    opened = Lake.open(lake)
    cluster_name = lake_selection.resolve_cluster(opened, cluster)
    notes: list[str] = []
    since_ns = t_ns - BEFORE_S * 10**9
    until_ns = t_ns + AFTER_S * 10**9 + 1
    if until_ns <= opened.since_ns or since_ns >= opened.until_ns:
        return NearbyFindings(
            table(Finding, ()),
            (
                f"{lake} has no records of that time: they are from {format_time(opened.since_ns)}"
                f" until {format_time(opened.until_ns)}",
            ),
        )
    try:
        near_by = lake_selection.select_cluster(
            opened.tables(since_ns, until_ns), opened, cluster_name, notes
        )
        return NearbyFindings(findings_around(near_by.findings, t_ns).collect(), tuple(notes))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise StorageError(f"{lake}: its findings cannot be read: {error}") from error


def from_lines(path: Path, t_ns: int) -> NearbyFindings:
    """Return the findings around `t_ns` in a file of JSON lines or `outlast check --json` reports.

    Raises UsageError if it cannot be opened, CorruptionError if no line is valid.
    """
    try:
        with path.open("rb") as file:
            found, bad = _parse_lines(iter(lambda: file.readline(_LINE_MAX), b""))
    except OSError as error:
        raise UsageError(f"--findings {path}: {error.strerror}") from error
    if bad and not found:
        raise CorruptionError(
            f"--findings {path}: none of {len(bad)} line(s) is a finding; the first: {bad[0]}"
        )
    notes = (f"{path}: {len(bad)} line(s) are no findings; the first: {bad[0]}",) if bad else ()
    return NearbyFindings(findings_around(table(Finding, found).lazy(), t_ns).collect(), notes)


def _parse_lines(lines: Iterator[bytes]) -> tuple[list[Finding], list[str]]:
    found: list[Finding] = []
    bad: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = msgspec.json.decode(line)
            if isinstance(document, dict) and "findings" in document:
                found.extend(msgspec.convert(document, _Report).findings)
            else:
                found.append(msgspec.convert(document, Finding))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            bad.append(f"line {number}: {error}")
    return found, bad


def findings_around(findings: pl.LazyFrame, t_ns: int) -> pl.LazyFrame:
    """Return the findings of the window that are not healthy."""
    return findings.filter(
        pl.col("t_ns").is_between(t_ns - BEFORE_S * 10**9, t_ns + AFTER_S * 10**9),
        pl.col("severity") != "healthy",
    )


def findings_of_ranks(
    findings: pl.DataFrame, ranks: Sequence[int], hosts: Mapping[int, str], t_ns: int
) -> list[RankFinding]:
    """Return the findings on the ranks' nodes, worst first, then by distance from `t_ns`.

    A host matches a node by its full name or by its first part (node17 is node17.site.org).
    """
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        if host := hosts.get(rank):
            by_host.setdefault(host, []).append(rank)
    found = [
        (row, there)
        for host, there in by_host.items()
        for row in sorted(_findings_of(findings, host), key=lambda row: _order(row, t_ns))[:SHOWN]
    ]
    found.sort(key=lambda pair: _order(pair[0], t_ns))
    return [
        RankFinding(
            ranks=tuple(there),
            node=row.node,
            before_s=(t_ns - row.t_ns) / 1e9,
            check=row.check,
            symptom=row.symptom,
            severity=row.severity,
            code=row.code,
            device=row.device,
            detail=row.detail,
        )
        for row, there in found
    ]


def _findings_of(findings: pl.DataFrame, host: str) -> Iterator[Finding]:
    short = host.partition(".")[0]
    node = pl.col("node")
    same = (node == host) | (
        (node.str.split(".").list.first() == short) & ((node == short) | pl.lit(host == short))
    )
    return (Finding(**row) for row in findings.filter(same).iter_rows(named=True))


def _order(finding: Finding, t_ns: int) -> tuple[int, int]:
    return SEVERITIES.index(finding.severity), abs(finding.t_ns - t_ns)
