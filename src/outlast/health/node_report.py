"""Report of a node's checks, and its exit code for Slurm and for Nagios."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from outlast.health.check_contract import AnyCheck, JudgeContext, Sample
from outlast.health.check_memory import (
    CheckMemory,
    FlapRule,
    HeldFinding,
    StuckProcess,
    still_holding,
    updated_memory,
)
from outlast.health.probe_runner import NOTHING, TakenSample
from outlast.log_records import Finding, Severity, Symptom

WORST_FIRST: tuple[Severity, ...] = ("now", "drain", "unknown", "warn", "healthy")
"""Order for a whole node: an unknown outweighs a warning. (log_records.SEVERITIES orders single
findings by their effect on a job.)"""

FOREIGN = "recorded sample of an unknown check: name its module in `own`"


class NotApplicable(msgspec.Struct, frozen=True):
    """Check of a device that this node does not have, and the evidence."""

    check: str
    device: str
    why: str


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a node. `severity`: the worst of the findings; unknown without any."""

    version: int = 1
    cluster: str
    node: str
    profile: str
    t_ns: int
    took_s: float
    severity: Severity
    findings: tuple[Finding, ...]
    not_applicable: tuple[NotApplicable, ...]
    notes: tuple[str, ...] = ()


class JudgedSamples(NamedTuple):
    """Result of judging samples.

    `events`: the findings that are new events, without those held from earlier checks.
    """

    findings: list[Finding]
    events: list[Finding]
    absent: list[NotApplicable]
    counts: dict[str, tuple[int, bool]]
    boot: str


def judge_samples(
    taken: Iterable[TakenSample], checks: Mapping[str, AnyCheck], about: JudgeContext
) -> JudgedSamples:
    """Judge samples. Pure: the same samples, settings and memory give the same result."""
    found = JudgedSamples([], [], [], {}, "")
    for one in taken:
        check = checks.get(one.check)
        if check is None:
            found.findings.append(unknown_finding(about, one.check, "other", FOREIGN, one.device))
        elif one.absent:
            found.absent.append(NotApplicable(one.check, one.device, one.absent))
        else:
            found = found._replace(boot=_judge_sample(one, check, about, found) or found.boot)
    if found.boot in {"", about.memory.boot}:  # a reboot ends held findings
        earlier = still_holding(
            about.memory, found.findings, about.t_ns, about.settings.flaps.recovery_s
        )
        found.findings.extend(_held_finding(each, about) for each in earlier)
    return found


def _judge_sample(
    taken: TakenSample, check: AnyCheck, about: JudgeContext, found: JudgedSamples
) -> str:
    """Add the result of one sample; return its boot id, or "" if it has none."""
    sample = _decode_sample(taken, check)
    if isinstance(sample, str):
        found.findings.append(_unknown_finding(taken, check, about, sample))
        return ""
    try:
        findings = list(check.findings(sample, about))
        counts = {each.key: (each.value, each.flaps) for each in check.counts(sample)}
    except Exception as error:  # noqa: BLE001 - a check of one's own must not end all others
        why = f"the check failed: {type(error).__name__}: {error}"
        found.findings.append(_unknown_finding(taken, check, about, why))
        return ""
    if not findings:
        findings = [_unknown_finding(taken, check, about, "the check returned no finding")]
    found.findings.extend(findings)
    if check.lasting:
        found.events.extend(findings)
    found.counts.update(counts)
    return getattr(sample, "boot", "")


def _decode_sample(taken: TakenSample, check: AnyCheck) -> Sample | str:
    """Return the sample, or the reason that there is none."""
    if bytes(taken.sample) == bytes(NOTHING):
        return taken.late or taken.failed or "nothing was recorded"
    try:
        return msgspec.json.decode(taken.sample, type=check.sample)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"unreadable sample: {error}"


def _unknown_finding(taken: TakenSample, check: AnyCheck, about: JudgeContext, why: str) -> Finding:
    return unknown_finding(about, check.name, check.symptom, why, taken.device)


def unknown_finding(
    about: JudgeContext, check: str, symptom: Symptom, detail: str, device: str = ""
) -> Finding:
    """Return a finding of severity unknown."""
    return Finding(
        t_ns=about.t_ns,
        cluster=about.cluster,
        node=about.node,
        check=check,
        symptom=symptom,
        severity="unknown",
        code="",
        device=device,
        detail=detail,
    )


def _held_finding(earlier: HeldFinding, about: JudgeContext) -> Finding:
    ago_s = max(0, about.t_ns - earlier.last_ns) / 1e9
    quiet_s = about.settings.flaps.recovery_s
    detail = f"{earlier.finding.detail} ({ago_s:.0f} s ago; held until quiet for {quiet_s:.0f} s)"
    return replace(earlier.finding, t_ns=earlier.last_ns, detail=detail)


def worst_severity(findings: Iterable[Finding]) -> Severity:
    """Return the worst severity; unknown without findings, since nothing was checked."""
    severities = {one.severity for one in findings}
    for severity in WORST_FIRST:
        if severity in severities:
            return severity
    return "unknown"


def sorted_by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings, the worst first."""
    order = {severity: k for k, severity in enumerate(WORST_FIRST)}
    return tuple(sorted(findings, key=lambda one: (order[one.severity], one.check, one.device)))


def memory_after(
    memory: CheckMemory,
    found: JudgedSamples,
    about: JudgeContext,
    stuck: Mapping[str, StuckProcess],
) -> CheckMemory:
    """Return the memory after a check. `stuck`: probe processes that could not be killed."""
    rule = about.settings.flaps
    after = updated_memory(
        memory,
        boot=found.boot or memory.boot,
        counts=found.counts,
        events=found.events,
        now_ns=about.t_ns,
        rule=FlapRule(rule.times, rule.window_s, rule.recovery_s),
    )
    return replace(after, stuck=dict(stuck))


def report_lines(report: NodeReport) -> Iterator[str]:
    """Yield the report as text, the worst first."""
    for one in report.findings:
        if one.severity != "healthy":
            where = " ".join(filter(None, (one.check, one.device, one.code)))
            yield f"{one.severity:8} {where}: {one.detail}"
    well: dict[str, int] = {}
    for one in report.findings:
        if one.severity == "healthy":
            well[one.check] = well.get(one.check, 0) + 1
    if well:
        counted = (f"{name} ({many})" if many > 1 else name for name, many in sorted(well.items()))
        yield "healthy  " + ", ".join(counted)
    for each in report.not_applicable:
        where = " ".join(filter(None, (each.check, each.device)))
        yield f"absent   {where}: {each.why}"
    yield from (f"note: {note}" for note in report.notes)


def summary_line(findings: Sequence[Finding], severity: Severity) -> str:
    """Return the node's state in one line."""
    worst_ones = [one for one in findings if one.severity == severity]
    if severity == "healthy" or not worst_ones:
        return f"{len(findings)} findings, all healthy" if worst_ones else "nothing was checked"
    one = worst_ones[0]
    where = " ".join(filter(None, (one.check, one.device, one.code)))
    more = f" (and {len(worst_ones) - 1} more)" if len(worst_ones) > 1 else ""
    return f"{where}: {one.detail}{more}"


EXIT_SEVERITY: dict[Severity, int] = {"now": 1, "drain": 1, "unknown": 3, "warn": 0, "healthy": 0}
NAGIOS: dict[Severity, int] = {"now": 2, "drain": 2, "unknown": 3, "warn": 1, "healthy": 0}
WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")


def exit_code(report: NodeReport, *, unknown_passes: bool) -> int:
    """Return the exit code for Slurm and for interactive use.

    A report that is unknown because nothing was checked fails in any case.
    """
    if report.severity == "unknown" and unknown_passes and report.findings:
        return 0
    return EXIT_SEVERITY[report.severity]


def nagios(report: NodeReport) -> tuple[int, str]:
    """Return the Nagios exit code, and the plugin's line: text, bar, performance data."""
    code = NAGIOS[report.severity]
    summary = summary_line(report.findings, report.severity).replace("|", "/").replace("\n", " ")
    figures = " ".join(
        f"{severity}={sum(one.severity == severity for one in report.findings)}"
        for severity in ("now", "drain", "unknown", "warn", "healthy")
    )
    return code, f"{WORDS[code]} - {report.node}: {summary} | {figures}"
