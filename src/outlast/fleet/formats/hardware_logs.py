"""Findings from hardware logs and diagnostics, and from reports of `outlast check`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import tzinfo
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from outlast.fleet.formats.log_reading import (
    LINE_CHARS_MAX,
    TWICE,
    ZONE_ASSUMED,
    LogReading,
    ReadTotals,
    RecordBatch,
    Reject,
    bounded_lines,
    make_reject,
    open_text,
    open_unpacked,
    read_bounded,
    unreadable_error,
)
from outlast.fleet.formats.timestamps import EARLIEST_S, LATEST_S
from outlast.fleet.record_tables import table
from outlast.log_records import Finding
from outlast.node_logs import dcgm, ipmi_events, kernel_log, log_envelopes, nvidia_smi
from outlast.node_logs.log_readings import Reading as Said
from outlast.node_logs.log_timestamps import NO_BOOT
from outlast.node_logs.xid_policy import XidPolicy

BYTES_MAX = 256 << 20  # of an answer that is read whole
_HINTS = {NO_BOOT: f"{NO_BOOT}: say it with --boot"}
NO_SHAPE = (
    "none of its first lines has the shape of a kernel's log, a journal or syslog, and no line says"
    " anything of trouble: is it such a log?"
)
NO_CLOCK = "a time before 2000: the machine's clock was not set"
UNKNOWN_NODE = "it does not say which node it is of: say it with --node"
_PART = 50_000
_HEAD_LINES = 50


class HardwareLogContext(NamedTuple):
    """What such a log does not say of itself. `taken_ns`: when it was taken."""

    cluster: str
    node: str
    zone: tzinfo
    taken_ns: int
    boot_ns: int | None = None
    policy: XidPolicy | None = None  # of XIDs; None: the shipped one
    zone_said: bool = True  # else it is only assumed, which is then noted


def read_kernel_log(path: Path, told: HardwareLogContext) -> LogReading:
    """dmesg, a journal or a syslog, or the fabric manager's log, line by line."""
    twice: Counter[str] = Counter()
    return _log_lines(
        path,
        "kernel",
        lambda lines: kernel_log.findings(
            lines,
            cluster=told.cluster,
            node=told.node,
            boot_ns=told.boot_ns,
            read_ns=told.taken_ns,
            zone=told.zone,
            policy=told.policy,
            on_twice=lambda: twice.update([TWICE]),
        ),
        naive=None if told.zone_said else log_envelopes.lacks_zone,
        known=log_envelopes.has_known_time,
        odd=twice,
    )


def read_event_log(path: Path, told: HardwareLogContext) -> LogReading:
    """`ipmitool sel list`, line by line."""
    return _log_lines(path, "ipmi", lambda lines: ipmi_events.findings(
        lines, cluster=told.cluster, node=told.node, zone=told.zone
    ), naive=None if told.zone_said else ipmi_events.lacks_zone)  # fmt: skip


def read_dcgm(path: Path, told: HardwareLogContext) -> LogReading:
    """`dcgmi diag -j`, one answer."""
    return _whole_text(path, "dcgm", lambda text: dcgm.findings(
        text, cluster=told.cluster, node=told.node, t_ns=told.taken_ns
    ))  # fmt: skip


def read_nvidia_smi(path: Path, told: HardwareLogContext) -> LogReading:
    """`nvidia-smi`, as CSV or XML, one answer."""
    return _whole_text(path, "nvidia-smi", lambda text: nvidia_smi.findings(
        text, cluster=told.cluster, node=told.node, t_ns=told.taken_ns, zone=told.zone
    ))  # fmt: skip


def _log_lines(
    path: Path, format_: str, read: Callable[[Iterable[str]], Iterator[Said]], *,
    naive: Callable[[str], bool] | None = None, known: Callable[[str], bool] | None = None,
    odd: Counter[str] | None = None,
) -> LogReading:  # fmt: skip
    """Every line is a row; one that says nothing of trouble is left out. `naive`: whether a line
    has a time without a zone, where nobody said one; noted if one of the first has. `known`:
    whether a line has the shape of such a log; noted if none of the first has and none tells of
    trouble. `odd`: findings that are kept in spite of something, counted while lines are read."""

    def parts(totals: ReadTotals) -> Iterator[RecordBatch]:
        def counted() -> Iterator[str]:
            try:
                with open_text(path) as file:
                    for line in bounded_lines(file):
                        totals.rows += 1
                        if naive and totals.rows <= _HEAD_LINES and naive(line.rstrip("\r\n")):
                            unsaid.append(totals.rows)
                        if known and totals.rows <= _HEAD_LINES and known(line.rstrip("\r\n")):
                            shaped.append(totals.rows)
                        yield line
            except (OSError, EOFError) as error:
                raise unreadable_error(path, error) from error

        unsaid: list[int] = []
        shaped: list[int] = []
        said = read(counted())
        told_of, done = 0, False
        while not done:
            some = list(islice(said, _PART))
            done = len(some) < _PART
            told_of += len(some)
            if done:
                totals.skipped["ordinary lines"] += totals.rows - told_of
                totals.notes += [ZONE_ASSUMED] if unsaid and told_of else []
                totals.notes += [NO_SHAPE] if known and not shaped and not told_of else []
                totals.odd += odd or Counter()
            yield _log_part(path, some)

    return LogReading(str(path), format_, parts)


def _whole_text(path: Path, format_: str, read: Callable[[str], Iterator[Said]]) -> LogReading:
    """Every finding is a row; an answer without any is one that is left out."""

    def parts(totals: ReadTotals) -> Iterator[RecordBatch]:
        said = read_bounded(path, BYTES_MAX, f"that is too much for {format_}")
        some = list(read(said.decode(errors="replace")))
        totals.rows += max(1, len(some))
        if not some:
            totals.skipped["answer in which nothing is wrong"] += 1
        yield _log_part(path, some)

    return LogReading(str(path), format_, parts)


def _log_part(path: Path, said: Iterable[Said]) -> RecordBatch:
    findings: list[Finding] = []
    rejects: list[Reject] = []
    for one in said:
        if not isinstance(one, Finding):
            why = _HINTS.get(one.reason, one.reason)
            rejects.append(make_reject(str(path), one.line, why, one.text))
        elif one.t_ns < EARLIEST_S * 10**9:
            rejects.append(make_reject(str(path), 0, NO_CLOCK, one.detail))
        elif not one.node:
            rejects.append(make_reject(str(path), 0, UNKNOWN_NODE, one.detail))
        else:
            findings.append(one)
    return RecordBatch({"findings": table(Finding, findings)}, rejects)


VERSION = 1
AT_ONCE = 50_000
NO_REPORT = "no report of `outlast check --json`"
NEWER = "a report of a version that is not known"
NO_FINDING = "a finding that is none"
NO_TIME = "no time between 2000 and 2100"
NO_NODE = "a finding that names no node"
# What a finding that is held says after its first time, so that it would seem another each time.
_KNOWN = re.compile(r" \(-?\d+ s ago; said until quiet for \d+ s\)$")


class CheckReport(msgspec.Struct, frozen=True):
    version: int
    findings: list[msgspec.Raw]
    not_applicable: list[msgspec.Raw] = []


def is_check_report(head: str) -> bool:
    """Whether a text begins as such a report does."""
    return head.startswith("{") and all(
        f'"{key}"' in head[:10_000] for key in ("version", "profile", "took_s", "findings")
    )


def read_check_reports(path: Path, cluster: str = "") -> LogReading:
    """A report a line, or a single one over several lines, also packed. Each finding is a row, and
    so is what a node has not. Those of `healthy` are no records: they would be nearly all."""
    return LogReading(str(path), "check", lambda totals: _parts(path, cluster, totals))


def _parts(path: Path, cluster: str, totals: ReadTotals) -> Iterator[RecordBatch]:
    found: list[Finding] = []
    rejects: list[Reject] = []
    for line, text in _texts(path):
        _report(str(path), line, text, cluster, totals, found, rejects)
        if len(found) + len(rejects) >= AT_ONCE:
            yield RecordBatch({"findings": table(Finding, found)}, rejects)
            found, rejects = [], []
    yield RecordBatch({"findings": table(Finding, found)}, rejects)


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Each report and its line."""
    try:
        with open_unpacked(path) as packed:
            head = packed.read(LINE_CHARS_MAX)
        if b"\n" in head.strip() and not _whole_report(head.strip().partition(b"\n")[0]):
            yield 1, head.decode(errors="replace")  # as jq prints one
            return
        with open_text(path) as file:
            yield from (
                (line, said) for line, said in enumerate(bounded_lines(file), 1) if said.strip()
            )
    except (OSError, EOFError) as error:
        raise unreadable_error(path, error) from error


def _whole_report(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return False
    return True


def _report(
    source: str, line: int, text: str, cluster: str, totals: ReadTotals,
    found: list[Finding], rejects: list[Reject],
) -> None:  # fmt: skip
    try:
        report = msgspec.json.decode(text.encode("utf-8", "replace"), type=CheckReport)
    except (ValueError, RecursionError):
        report = None
    if report is None or report.version != VERSION:
        totals.rows += 1
        rejects.append(make_reject(source, line, NO_REPORT if report is None else NEWER, text))
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
            rejects.append(make_reject(source, line, NO_FINDING, f"{error}: {text}"))
            continue
        if one.severity == "healthy":
            totals.skipped["healthy findings"] += 1
        elif not one.node or not EARLIEST_S <= one.t_ns // 10**9 < LATEST_S:
            why = NO_TIME if one.node else NO_NODE
            rejects.append(make_reject(source, line, why, bytes(raw).decode(errors="replace")))
        else:
            detail = _KNOWN.sub("", one.detail)
            found.append(replace(one, cluster=one.cluster or cluster, detail=detail))
