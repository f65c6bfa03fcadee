"""`ipmitool sel list` and `sel elist`: the event log of a board's controller, read into findings.

1 | 04/12/2023 | 10:15:32 | Memory #0x87 | Correctable ECC | Asserted
2 | 04/12/23 | 10:16:01 UTC | Critical Interrupt PCIE | Bus Fatal Error | Asserted
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, tzinfo
from functools import cache
from typing import NamedTuple

from outlast.log_records import Finding, Severity, Symptom
from outlast.symptoms.stamps import Clock, UnplacedError, iso
from outlast.symptoms.unread import Reading, Unread, cut

LINE_MAX = 1000
QUIET = ("SEL has no entries", "SEL Record ID", "Get SEL ")


class Rule(NamedTuple):
    """Patterns, letter case aside, of the sensor and of what it said."""

    sensor: str
    event: str
    symptom: Symptom
    severity: Severity


RULES: tuple[Rule, ...] = (
    Rule("memory|dimm", "uncorrectable", "main-memory", "now"),
    Rule("memory|dimm", "logging limit|device disabled|critical over", "main-memory", "drain"),
    Rule("memory|dimm", "correctable|parity|spare", "main-memory", "warn"),
    Rule("critical interrupt|pci", "bus correctable|bus degraded", "pcie", "warn"),
    Rule("critical interrupt|pci", "bus fatal|uncorrectable|serr|perr|fatal", "pcie", "now"),
    Rule("critical interrupt", "nmi|diag", "other", "warn"),
    Rule("processor|cpu|proc", "thermal trip", "thermal", "now"),
    Rule("processor|cpu|proc", "ierr|machine check|frb|uncorrectable", "cpu", "now"),
    Rule("processor|cpu|proc", "throttled|correctable", "cpu", "warn"),
    Rule("temp|thermal", "non-recoverable", "thermal", "now"),
    Rule("temp|thermal", "upper critical|lower critical|to critical", "thermal", "drain"),
    Rule("temp|thermal", "non-critical", "thermal", "warn"),
    Rule("fan|cooling", "non-critical", "thermal", "warn"),
    Rule("fan|cooling", "critical|non-recoverable|failure|redundancy lost", "thermal", "drain"),
    Rule("power supply|psu|ps\\d", "failure|ac lost|predictive|redundancy lost", "other", "warn"),
    Rule("voltage|volt", "critical|non-recoverable|limit", "other", "drain"),
    Rule("drive|disk|hdd|nvme", "fault|failure|in critical array|in failed array", "disk", "drain"),
    Rule("drive|disk|hdd|nvme", "predictive", "disk", "warn"),
    Rule("watchdog", "hard reset|power down|power cycle|timer interrupt", "services", "drain"),
    Rule("event log", "full|disabled", "services", "unknown"),
    Rule("os (?:critical )?stop|system event|os boot", "panic|critical stop", "services", "now"),
)  # fmt: skip
ORDINARY = (
    "event log|system event|os boot|os stop|button|power unit|session audit|version change|system"
    " acpi|slot|physical security|chassis|drive present|add-in|entity presence|boot error|cable|"
    "system firmware|system boot|management subsys|microcontroller|battery|watchdog"
)
FINE = (
    "presence detected|device present|device enabled|drive present|fully redundant|log area reset"
)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.ASCII)


def findings(
    lines: str | Iterable[str], *, cluster: str, node: str, zone: tzinfo = UTC
) -> Iterator[Reading]:
    """One finding for each entry that tells of trouble, and a healthy one where the controller
    says that a trouble is over (Deasserted). Ordinary events (a boot, a button) yield nothing; one
    that is asserted and of no known kind is of severity unknown. `zone`: the controller's."""
    split = lines.split("\n") if isinstance(lines, str) else lines
    for number, raw in enumerate(split, 1):
        line = raw.strip()[:LINE_MAX]
        if not line or line.startswith(QUIET):
            continue
        fields = [field.strip() for field in line.split("|")]
        if len(fields) < 5 or not _compiled("[0-9a-f]{1,8}").fullmatch(fields[0]):
            yield Unread(number, "no entry of an event log", cut(line))
            continue
        sensor, event, over = _event(fields[3:])
        judged = _judged(sensor, event)
        if judged is None:
            continue
        symptom, severity = judged
        try:
            t_ns = _time(fields[1], fields[2], zone)
        except UnplacedError as error:
            yield Unread(number, str(error), cut(line))
            continue
        yield Finding(
            t_ns=t_ns, cluster=cluster, node=node, check="ipmi.sel", symptom=symptom,
            severity="healthy" if over else severity, code="", device=sensor,
            detail=cut(" | ".join(fields[3:])),
        )  # fmt: skip


def _event(fields: list[str]) -> tuple[str, str, bool]:
    """The sensor, what it said, and whether that is over."""
    words = [field.lower() for field in fields]
    return fields[0], " | ".join(fields[1:]), "deasserted" in words


def _judged(sensor: str, event: str) -> tuple[Symptom, Severity] | None:
    if _compiled(FINE).search(event):
        return None
    for rule in RULES:
        if _compiled(rule.sensor).search(sensor) and _compiled(rule.event).search(event):
            return rule.symptom, rule.severity
    return None if _compiled(ORDINARY).search(sensor) else ("other", "unknown")


def naive(line: str) -> bool:
    """Return whether an entry says a time and no zone."""
    return (
        _compiled(r"[^|]*\|[^|]*\d/[^|]*\| *\d\d:\d\d:\d\d(?: [AP]M)? *\|.*").match(line)
        is not None
    )


def _time(day: str, time: str, zone: tzinfo) -> int:
    """04/12/2023 is 12 April. Entries from before the controller knew the time have none."""
    found = _compiled(r"(\d\d)/(\d\d)/(\d{4}|\d\d)").fullmatch(day)
    clock = _compiled(r"(\d\d:\d\d:\d\d)(?: (AM|PM))?(?: ([A-Z]{1,5}))?").fullmatch(time)
    if not found or not clock:
        raise UnplacedError("the controller did not know the time")
    month, date, year = (int(part) for part in found.groups())
    hour = int(clock[1][:2])
    if clock[2]:
        hour = hour % 12 + (12 if clock[2].upper() == "PM" else 0)
    whole_year = year if year > 99 else 2000 + year
    name = clock[3].upper() if clock[3] else None
    here = f"{whole_year}-{month:02d}-{date:02d}"
    return iso(here, f"{hour:02d}{clock[1][2:]}", name, Clock(zone=zone))
