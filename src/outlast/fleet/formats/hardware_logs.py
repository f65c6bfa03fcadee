"""Findings from hardware logs and diagnostics, and from reports of `outlast check`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import tzinfo
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from outlast.errors import SourceError
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
from outlast.node_logs.log_readings import NO_BOOT, LogClock, Reading, UnreadText
from outlast.node_logs.nvidia_errors import XidPolicy

BYTES_MAX = 256 << 20  # of an answer that is read at once
_HINTS = {NO_BOOT: f"{NO_BOOT}: pass it with --boot"}
NO_SHAPE = (
    "none of its first lines has the format of a kernel log, a journal or syslog, and no line has a"
    " finding: is it such a log?"
)
SEVERAL_HOSTS = (
    "{path} names several hosts ({hosts}), and --node {node} would attribute all of its findings to"
    " one; the lake is unchanged; leave --node out, or give the log of each node alone"
)
DAY_FIRST = (
    "{path} has the date {day}, which is day/month, and dates are read as month/day: days up to the"
    " 12th would be taken for others; the lake is unchanged; write it with LC_ALL=C ipmitool sel"
    " elist"
)
NO_CLOCK = "a time before 2000: the machine's clock was not set"
UNKNOWN_NODE = "it does not name its node: pass --node"
_PART = 50_000
_HEAD_LINES = 50


class HardwareLogContext(NamedTuple):
    """Context that such a log does not contain. `taken_ns`: when it was taken."""

    cluster: str
    node: str
    zone: tzinfo
    taken_ns: int
    boot_ns: int | None = None
    policy: XidPolicy | None = None  # of XIDs; None: the shipped one
    is_zone_given: bool = True  # False: it is assumed, and noted


_UNNAMED = ("localhost", "(none)")  # before a node has got its name


def read_kernel_log(path: Path, context: HardwareLogContext) -> LogReading:
    """Read dmesg, a journal, a syslog or the fabric manager's log, line by line."""
    twice: Counter[str] = Counter()
    clock = LogClock(
        boot_ns=context.boot_ns,
        read_ns=context.taken_ns,
        zone=context.zone,
        on_twice=lambda: twice.update([TWICE]),
    )
    hosts: dict[str, str] = {}  # by their names without a domain
    named: list[str] = []  # the first one

    def on_host(host: str) -> None:
        is_address = host.replace(".", "").isdigit()
        name = host.lower() if is_address else host.partition(".")[0].lower()
        if name not in _UNNAMED:
            named[:] = named or [host]
            hosts.setdefault(name, host)
        if context.node and len(hosts) > 1:
            names = ", ".join(hosts.values())
            raise SourceError(SEVERAL_HOSTS.format(path=path, hosts=names, node=context.node))

    return _read_log_lines(
        path,
        "kernel",
        lambda lines: kernel_log.findings(
            lines,
            cluster=context.cluster,
            node=context.node,
            clock=clock,
            policy=context.policy,
            on_host=on_host,
        ),
        naive=None if context.is_zone_given else log_envelopes.lacks_zone,
        known=log_envelopes.has_known_time,
        odd=twice,
        named=named,
    )


def read_event_log(path: Path, context: HardwareLogContext) -> LogReading:
    """Read `ipmitool sel list`, line by line."""

    def on_day_first(day: str) -> None:
        raise SourceError(DAY_FIRST.format(path=path, day=day))

    return _read_log_lines(
        path,
        "ipmi",
        lambda lines: ipmi_events.findings(
            lines,
            cluster=context.cluster,
            node=context.node,
            zone=context.zone,
            on_day_first=on_day_first,
        ),
        naive=None if context.is_zone_given else ipmi_events.lacks_zone,
    )


def read_dcgm(path: Path, context: HardwareLogContext) -> LogReading:
    """Read the answer of one `dcgmi diag -j`."""
    return _read_answer(
        path,
        "dcgm",
        lambda text: dcgm.findings(
            text, cluster=context.cluster, node=context.node, t_ns=context.taken_ns
        ),
    )


def read_nvidia_smi(path: Path, context: HardwareLogContext) -> LogReading:
    """Read the answer of one `nvidia-smi`, as CSV or XML."""
    return _read_answer(
        path,
        "nvidia-smi",
        lambda text: nvidia_smi.findings(
            text,
            cluster=context.cluster,
            node=context.node,
            t_ns=context.taken_ns,
            zone=context.zone,
        ),
    )


def _read_log_lines(
    path: Path,
    format_: str,
    read: Callable[[Iterable[str]], Iterator[Reading]],
    *,
    naive: Callable[[str], bool] | None = None,
    known: Callable[[str], bool] | None = None,
    odd: Counter[str] | None = None,
    named: Collection[str] = (),
) -> LogReading:
    """Read a log of which every line is a row; ordinary lines are skipped.

    `naive`: whether a line has a time without a zone; noted if one of the first lines has. `known`:
    whether a line has the format of such a log; noted if none of the first has and there is no
    finding. `odd`: findings that are kept despite an anomaly, counted while lines are read.
    `named`: a host that a line names, once it is read.
    """

    def parts(totals: ReadTotals) -> Iterator[RecordBatch]:
        def counted() -> Iterator[str]:
            try:
                with open_text(path) as file:
                    for line in bounded_lines(file):
                        totals.rows += 1
                        if naive and totals.rows <= _HEAD_LINES and naive(line.rstrip("\r\n")):
                            without_zone.append(totals.rows)
                        if known and totals.rows <= _HEAD_LINES and known(line.rstrip("\r\n")):
                            shaped.append(totals.rows)
                        latest[0] = line
                        yield line
            except (OSError, EOFError) as error:
                raise unreadable_error(path, error) from error

        without_zone: list[int] = []
        shaped: list[int] = []
        latest = [""]
        # A reading follows its line, before the next one is read.
        readings = (
            UnreadText(totals.rows, why, latest[0].rstrip("\r\n"))
            if isinstance(one, Finding) and (why := _reject_reason(one))
            else one
            for one in read(counted())
        )
        reported = 0
        done = False
        while not done:
            part = list(islice(readings, _PART))
            done = len(part) < _PART
            reported += len(part)
            if done:
                totals.skipped["ordinary lines"] += totals.rows - reported
                totals.notes += [ZONE_ASSUMED] if without_zone and reported else []
                totals.notes += [NO_SHAPE] if known and not shaped and not reported else []
                totals.odd += odd or Counter()
                totals.names_node = bool(named)
            yield _make_batch(path, part)

    return LogReading(str(path), format_, parts)


def _read_answer(path: Path, format_: str, read: Callable[[str], Iterator[Reading]]) -> LogReading:
    """Read a text of which every finding is a row; one without any is skipped."""

    def parts(totals: ReadTotals) -> Iterator[RecordBatch]:
        text = read_bounded(path, BYTES_MAX, f"that is too much for {format_}")
        some = list(read(text.decode(errors="replace")))
        totals.rows += max(1, len(some))
        totals.names_node = False
        if not some:
            totals.skipped["answer in which nothing is wrong"] += 1
        yield _make_batch(path, some)

    return LogReading(str(path), format_, parts)


def _make_batch(path: Path, readings: Iterable[Reading]) -> RecordBatch:
    findings: list[Finding] = []
    rejects: list[Reject] = []
    for reading in readings:
        if not isinstance(reading, Finding):
            why = _HINTS.get(reading.reason, reading.reason)
            rejects.append(make_reject(str(path), reading.line, why, reading.text))
        elif why := _reject_reason(reading):
            rejects.append(make_reject(str(path), 0, why, reading.detail))
        else:
            findings.append(reading)
    return RecordBatch({"findings": table(Finding, findings)}, rejects)


def _reject_reason(one: Finding) -> str:
    """Return why a finding is no record; "" if it is one."""
    if one.t_ns < EARLIEST_S * 10**9:
        return NO_CLOCK
    return "" if one.node else UNKNOWN_NODE


VERSION = 1
AT_ONCE = 50_000
NO_REPORT = "no report of `outlast check --json`"
NEWER = "a report of a version that is not known"
NO_FINDING = "a finding that is none"
NO_TIME = "no time between 2000 and 2100"
NO_NODE = "a finding that names no node"
# Suffix of a held finding, which differs at each check; earlier versions wrote "said".
_KNOWN = re.compile(r" \(-?\d+ s ago; (?:said|held) until quiet for \d+ s\)$")


class CheckReport(msgspec.Struct, frozen=True):
    """Report of `outlast check --json`, with undecoded findings."""

    version: int
    findings: list[msgspec.Raw]
    not_applicable: list[msgspec.Raw] = []


def is_check_report(head: str) -> bool:
    """Return whether a text begins like such a report."""
    return head.startswith("{") and all(
        f'"{key}"' in head[:10_000] for key in ("version", "profile", "took_s", "findings")
    )


def read_check_reports(path: Path, cluster: str = "") -> LogReading:
    """Read reports, one a line or a single one over several lines, also gzipped.

    Each finding, and each check of an absent device, is a row. Healthy findings are skipped: they
    would be nearly all records.
    """
    return LogReading(str(path), "check", lambda totals: _parts(path, cluster, totals))


def _parts(path: Path, cluster: str, totals: ReadTotals) -> Iterator[RecordBatch]:
    findings: list[Finding] = []
    rejects: list[Reject] = []
    for line, text in _report_texts(path):
        _add_report(str(path), line, text, cluster, totals, findings, rejects)
        if len(findings) + len(rejects) >= AT_ONCE:
            yield RecordBatch({"findings": table(Finding, findings)}, rejects)
            findings = []
            rejects = []
    yield RecordBatch({"findings": table(Finding, findings)}, rejects)


def _report_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each report and its line."""
    try:
        with open_unpacked(path) as packed:
            head = packed.read(LINE_CHARS_MAX)
        if b"\n" in head.strip() and not _is_whole_report(head.strip().partition(b"\n")[0]):
            yield 1, head.decode(errors="replace")  # as jq prints one
            return
        with open_text(path) as file:
            yield from (
                (line, text) for line, text in enumerate(bounded_lines(file), 1) if text.strip()
            )
    except (OSError, EOFError) as error:
        raise unreadable_error(path, error) from error


def _is_whole_report(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return False
    return True


def _add_report(
    source: str,
    line: int,
    text: str,
    cluster: str,
    totals: ReadTotals,
    findings: list[Finding],
    rejects: list[Reject],
) -> None:
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
        totals.skipped["check that does not apply to its node"] += absent
    for raw in report.findings:
        try:
            finding = msgspec.json.decode(raw, type=Finding)
        except (ValueError, RecursionError) as error:
            text = bytes(raw).decode(errors="replace")
            rejects.append(make_reject(source, line, NO_FINDING, f"{error}: {text}"))
            continue
        if finding.severity == "healthy":
            totals.skipped["healthy findings"] += 1
        elif not finding.node or not EARLIEST_S <= finding.t_ns // 10**9 < LATEST_S:
            why = NO_TIME if finding.node else NO_NODE
            rejects.append(make_reject(source, line, why, bytes(raw).decode(errors="replace")))
        else:
            detail = _KNOWN.sub("", finding.detail)
            findings.append(replace(finding, cluster=finding.cluster or cluster, detail=detail))
