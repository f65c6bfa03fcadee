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
from outlast.log_records import Finding, Severity

WORST_FIRST: tuple[Severity, ...] = ("now", "drain", "unknown", "warn", "healthy")
"""For a node as a whole: what could not be told outweighs a warning (records.SEVERITIES orders
what a single finding means for a job, which is another question)."""


class NotApplicable(msgspec.Struct, frozen=True):
    check: str
    device: str
    why: str


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """`severity`: the worst of the findings; unknown where there are none at all."""

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
    """`events`: of the findings those that are new events, not what is held from before."""

    findings: list[Finding]
    events: list[Finding]
    absent: list[NotApplicable]
    counts: dict[str, tuple[int, bool]]
    boot: str


def judge_samples(
    taken: Iterable[TakenSample], checks: Mapping[str, AnyCheck], about: JudgeContext
) -> JudgedSamples:
    """Pure: the same samples, settings and memory give the same."""
    found = JudgedSamples([], [], [], {}, "")
    for one in taken:
        check = checks.get(one.check)
        if check is None:
            found.findings.append(_foreign(one, about))
        elif one.absent:
            found.absent.append(NotApplicable(one.check, one.device, one.absent))
        else:
            found = found._replace(boot=_one(one, check, about, found) or found.boot)
    if found.boot in {"", about.memory.boot}:  # a reboot ends what was held
        held = still_holding(
            about.memory, found.findings, about.t_ns, about.settings.flaps.recovery_s
        )
        found.findings.extend(_held_findings(each, about) for each in held)
    return found


def _one(taken: TakenSample, check: AnyCheck, about: JudgeContext, found: JudgedSamples) -> str:
    """What one sample adds; returns the boot's name where the sample knows it."""
    sample = _sample(taken, check)
    if isinstance(sample, str):
        found.findings.append(_unknown(taken, check, about, sample))
        return ""
    try:
        mine = list(check.findings(sample, about))
        counts = {each.key: (each.value, each.flaps) for each in check.counts(sample)}
    except Exception as error:  # noqa: BLE001 - a check of one's own must not end all others
        why = f"the check failed: {type(error).__name__}: {error}"
        found.findings.append(_unknown(taken, check, about, why))
        return ""
    if not mine:
        mine = [_unknown(taken, check, about, "the check said nothing of its sample")]
    found.findings.extend(mine)
    if check.lasting:
        found.events.extend(mine)
    found.counts.update(counts)
    return getattr(sample, "boot", "")


def _sample(taken: TakenSample, check: AnyCheck) -> Sample | str:
    """The sample, or why there is none."""
    if bytes(taken.sample) == bytes(NOTHING):
        return taken.late or taken.failed or "nothing was recorded"
    try:
        return msgspec.json.decode(taken.sample, type=check.sample)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"a sample that cannot be read: {error}"


def _unknown(taken: TakenSample, check: AnyCheck, about: JudgeContext, why: str) -> Finding:
    return Finding(
        t_ns=about.t_ns, cluster=about.cluster, node=about.node, check=check.name,
        symptom=check.symptom, severity="unknown", code="", device=taken.device, detail=why,
    )  # fmt: skip


def _foreign(taken: TakenSample, about: JudgeContext) -> Finding:
    """A check of one's own that the settings in use do not name was taken, and nobody can judge
    it."""
    return Finding(
        t_ns=about.t_ns, cluster=about.cluster, node=about.node, check=taken.check, symptom="other",
        severity="unknown", code="", device=taken.device,
        detail="a recorded sample of a check that is not known here: name it in `own`",
    )  # fmt: skip


def _held_findings(held: HeldFinding, about: JudgeContext) -> Finding:
    ago_s = max(0, about.t_ns - held.last_ns) / 1e9
    quiet_s = about.settings.flaps.recovery_s
    detail = f"{held.finding.detail} ({ago_s:.0f} s ago; said until quiet for {quiet_s:.0f} s)"
    return replace(held.finding, t_ns=held.last_ns, detail=detail)


def worst_severity(findings: Iterable[Finding]) -> Severity:
    """Unknown where there are none: nothing was checked."""
    said = {one.severity for one in findings}
    for severity in WORST_FIRST:
        if severity in said:
            return severity
    return "unknown"


def sorted_by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    order = {severity: k for k, severity in enumerate(WORST_FIRST)}
    return tuple(sorted(findings, key=lambda one: (order[one.severity], one.check, one.device)))


def memory_after(
    memory: CheckMemory,
    found: JudgedSamples,
    about: JudgeContext,
    stuck: Mapping[str, StuckProcess],
) -> CheckMemory:
    rule = about.settings.flaps
    after = updated_memory(
        memory, boot=found.boot or memory.boot, counts=found.counts, events=found.events,
        now_ns=about.t_ns, rule=FlapRule(rule.times, rule.window_s, rule.recovery_s),
    )  # fmt: skip
    return replace(after, stuck=dict(stuck))


def report_lines(report: NodeReport) -> Iterator[str]:
    """The report as text, the worst first."""
    for one in report.findings:
        if one.severity != "healthy":
            where = " ".join(filter(None, (one.check, one.device, one.code)))
            yield f"{one.severity:8} {where}: {one.detail}"
    well: dict[str, int] = {}
    for one in report.findings:
        if one.severity == "healthy":
            well[one.check] = well.get(one.check, 0) + 1
    if well:
        said = (f"{name} ({many})" if many > 1 else name for name, many in sorted(well.items()))
        yield "healthy  " + ", ".join(said)
    for each in report.not_applicable:
        where = " ".join(filter(None, (each.check, each.device)))
        yield f"not here {where}: {each.why}"
    yield from (f"note: {note}" for note in report.notes)


def summary_line(findings: Sequence[Finding], severity: Severity) -> str:
    """The node in a line."""
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
    """For Slurm and for hands. A report that is unknown because nothing at all was checked does not
    pass in any case."""
    if report.severity == "unknown" and unknown_passes and report.findings:
        return 0
    return EXIT_SEVERITY[report.severity]


def nagios(report: NodeReport) -> tuple[int, str]:
    """The code, and the plugin's line: text, and figures after a bar."""
    code = NAGIOS[report.severity]
    said = summary_line(report.findings, report.severity).replace("|", "/").replace("\n", " ")
    figures = " ".join(
        f"{severity}={sum(one.severity == severity for one in report.findings)}"
        for severity in ("now", "drain", "unknown", "warn", "healthy")
    )
    return code, f"{WORDS[code]} - {report.node}: {said} | {figures}"
