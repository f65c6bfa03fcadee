"""What `outlast check --json` printed, of one node or of many: its findings are records already."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from outlast.fleet.moments import EARLIEST_S, LATEST_S
from outlast.fleet.readings import Part, Reading, Reject, Totals, reject
from outlast.fleet.sources import LINE_CHARS_MAX, as_text, lines, unpacked, unreadable
from outlast.fleet.tables import table
from outlast.log_records import Finding

VERSION = 1
AT_ONCE = 50_000
NO_REPORT = "no report of `outlast check --json`"
NEWER = "a report of a version that is not known"
NO_FINDING = "a finding that is none"
NO_TIME = "no time between 2000 and 2100"
NO_NODE = "a finding that names no node"
# What a finding that is held says after its first time, so that it would seem another each time.
_HELD = re.compile(r" \(-?\d+ s ago; said until quiet for \d+ s\)$")


class Report(msgspec.Struct, frozen=True):
    version: int
    findings: list[msgspec.Raw]
    not_applicable: list[msgspec.Raw] = []


def is_one(head: str) -> bool:
    """Whether a text begins as such a report does."""
    return head.startswith("{") and all(
        f'"{key}"' in head[:10_000] for key in ("version", "profile", "took_s", "findings")
    )


def read(path: Path, cluster: str = "") -> Reading:
    """A report a line, or a single one over several lines, also packed. Each finding is a row, and
    so is what a node has not. Those of `healthy` are no records: they would be nearly all."""
    return Reading(str(path), "check", lambda totals: _parts(path, cluster, totals))


def _parts(path: Path, cluster: str, totals: Totals) -> Iterator[Part]:
    found: list[Finding] = []
    rejects: list[Reject] = []
    for line, text in _texts(path):
        _report(str(path), line, text, cluster, totals, found, rejects)
        if len(found) + len(rejects) >= AT_ONCE:
            yield Part({"findings": table(Finding, found)}, rejects)
            found, rejects = [], []
    yield Part({"findings": table(Finding, found)}, rejects)


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Each report and its line."""
    try:
        with unpacked(path) as packed:
            head = packed.read(LINE_CHARS_MAX)
        if b"\n" in head.strip() and not _whole(head.strip().partition(b"\n")[0]):
            yield 1, head.decode(errors="replace")  # as jq prints one
            return
        with as_text(path) as file:
            yield from ((line, said) for line, said in enumerate(lines(file), 1) if said.strip())
    except (OSError, EOFError) as error:
        raise unreadable(path, error) from error


def _whole(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return False
    return True


def _report(
    source: str, line: int, text: str, cluster: str, totals: Totals,
    found: list[Finding], rejects: list[Reject],
) -> None:  # fmt: skip
    try:
        report = msgspec.json.decode(text.encode("utf-8", "replace"), type=Report)
    except (ValueError, RecursionError):
        report = None
    if report is None or report.version != VERSION:
        totals.rows += 1
        rejects.append(reject(source, line, NO_REPORT if report is None else NEWER, text))
        return
    absent = len(report.not_applicable)
    totals.rows += len(report.findings) + absent
    if absent:
        totals.skipped["what a node has not"] += absent
    for raw in report.findings:
        try:
            one = msgspec.json.decode(raw, type=Finding)
        except (ValueError, RecursionError) as error:
            text = bytes(raw).decode(errors="replace")
            rejects.append(reject(source, line, NO_FINDING, f"{error}: {text}"))
            continue
        if one.severity == "healthy":
            totals.skipped["healthy findings"] += 1
        elif not one.node or not EARLIEST_S <= one.t_ns // 10**9 < LATEST_S:
            why = NO_TIME if one.node else NO_NODE
            rejects.append(reject(source, line, why, bytes(raw).decode(errors="replace")))
        else:
            detail = _HELD.sub("", one.detail)
            found.append(replace(one, cluster=one.cluster or cluster, detail=detail))
