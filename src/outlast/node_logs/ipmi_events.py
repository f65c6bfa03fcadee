"""Findings from `ipmitool sel list` and `sel elist`.

1 | 04/12/2023 | 10:15:32 | Memory #0x87 | Correctable ECC | Asserted
2 | 04/12/23 | 10:16:01 UTC | Critical Interrupt PCIE | Bus Fatal Error | Asserted
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, tzinfo
from functools import cache
from typing import NamedTuple

from outlast.log_records import Finding, Severity, Symptom
from outlast.node_logs.log_readings import (
    LogClock,
    Reading,
    UnplacedError,
    UnreadText,
    cut_text,
    iso_ns,
)

LINE_MAX = 1000
QUIET = ("SEL has no entries", "SEL Record ID", "Get SEL ")


class SelRule(NamedTuple):
    """Rule for an event: patterns of sensor and event, case-insensitive."""

    sensor: str
    event: str
    symptom: Symptom
    severity: Severity


RULES: tuple[SelRule, ...] = (
    SelRule("memory|dimm", "uncorrectable", "main-memory", "now"),
    SelRule("memory|dimm", "logging limit|device disabled|critical over", "main-memory", "drain"),
    SelRule("memory|dimm", "correctable|parity|spare", "main-memory", "warn"),
    SelRule("critical interrupt|pci", "bus correctable|bus degraded", "pcie", "warn"),
    SelRule("critical interrupt|pci", "bus fatal|uncorrectable|serr|perr|fatal", "pcie", "now"),
    SelRule("critical interrupt", "nmi|diag", "other", "warn"),
    SelRule("processor|cpu|proc", "thermal trip", "thermal", "now"),
    SelRule("processor|cpu|proc", "ierr|machine check|frb|uncorrectable", "cpu", "now"),
    SelRule("processor|cpu|proc", "throttled|correctable", "cpu", "warn"),
    SelRule("temp|thermal", "non-recoverable", "thermal", "now"),
    SelRule("temp|thermal", "upper critical|lower critical|to critical", "thermal", "drain"),
    SelRule("temp|thermal", "non-critical", "thermal", "warn"),
    SelRule("fan|cooling", "non-critical", "thermal", "warn"),
    SelRule("fan|cooling", "critical|non-recoverable|failure|redundancy lost", "thermal", "drain"),
    SelRule(
        "power supply|power unit|psu|ps\\d",
        "failure|ac lost|predictive|redundancy lost",
        "other",
        "warn",
    ),
    SelRule("voltage|volt", "critical|non-recoverable|limit", "other", "drain"),
    SelRule(
        "drive|disk|hdd|nvme", "fault|failure|in critical array|in failed array", "disk", "drain"
    ),
    SelRule("drive|disk|hdd|nvme", "predictive", "disk", "warn"),
    SelRule("cable|interconnect", "configuration error", "other", "warn"),
    SelRule("watchdog", "hard reset|power down|power cycle|timer interrupt", "services", "drain"),
    SelRule("event log", "full|disabled", "services", "unknown"),
    SelRule("os (?:critical )?stop|system event|os boot", "panic|critical stop", "services", "now"),
)
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
    lines: str | Iterable[str],
    *,
    cluster: str,
    node: str,
    zone: tzinfo = UTC,
    on_day_first: Callable[[str], None] = lambda _day: None,
) -> Iterator[Reading]:
    """Yield a finding per entry that reports a problem; a deasserted entry is healthy.

    Ordinary events (a boot, a button) yield nothing; an asserted event of unknown kind has severity
    unknown. `zone`: the time zone of the management controller. `on_day_first`: called with a date
    that can only be day/month, so that the months of the other entries are in doubt.
    """
    split = lines.split("\n") if isinstance(lines, str) else lines
    for number, raw in enumerate(split, 1):
        line = raw.strip()[:LINE_MAX]
        if not line or line.startswith(QUIET):
            continue
        fields = [field.strip() for field in line.split("|")]
        if len(fields) < 5 or not _compiled("[0-9a-f]{1,8}").fullmatch(fields[0]):
            yield UnreadText(number, "no entry of an event log", cut_text(line))
            continue
        if _compiled(r"(?:1[3-9]|[23]\d)/(?:0\d|1[0-2])/\d+").fullmatch(fields[1]):
            on_day_first(fields[1])
        sensor, event, over = _event(fields[3:])
        judged = _judge_event(sensor, event)
        if judged is None:
            continue
        symptom, severity = judged
        try:
            t_ns = _time(fields[1], fields[2], zone)
        except UnplacedError as error:
            yield UnreadText(number, str(error), cut_text(line))
            continue
        yield Finding(
            t_ns=t_ns,
            cluster=cluster,
            node=node,
            check="ipmi.sel",
            symptom=symptom,
            severity="healthy" if over else severity,
            code="",
            device=sensor,
            detail=cut_text(" | ".join(fields[3:])),
        )


def _event(fields: list[str]) -> tuple[str, str, bool]:
    """Return the sensor, the event, and whether it was deasserted."""
    words = [field.lower() for field in fields]
    return fields[0], " | ".join(fields[1:]), "deasserted" in words


def _judge_event(sensor: str, event: str) -> tuple[Symptom, Severity] | None:
    if _compiled(FINE).search(event):
        return None
    for rule in RULES:
        if _compiled(rule.sensor).search(sensor) and _compiled(rule.event).search(event):
            return rule.symptom, rule.severity
    return None if _compiled(ORDINARY).search(sensor) else ("other", "unknown")


def lacks_zone(line: str) -> bool:
    """Return whether an entry has a time without a zone."""
    return (
        _compiled(r"[^|]*\|[^|]*\d/[^|]*\| *\d\d:\d\d:\d\d(?: [AP]M)? *\|.*").match(line)
        is not None
    )


def _time(day: str, time: str, zone: tzinfo) -> int:
    """Parse 04/12/2023 as 12 April.

    Raises UnplacedError for entries written before the management controller's clock was set.
    """
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
    return iso_ns(here, f"{hour:02d}{clock[1][2:]}", name, LogClock(zone=zone))
