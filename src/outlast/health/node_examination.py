"""Examination of this node: samples taken, judged and remembered."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from outlast.errors import StorageError
from outlast.health import check_memory
from outlast.health.check_contract import AbsentError, AnyCheck, JudgeContext, Probe, Sample
from outlast.health.check_memory import CheckMemory
from outlast.health.check_profiles import PROFILES
from outlast.health.check_settings import CheckSettings, Profile
from outlast.health.node_report import (
    JudgedSamples,
    NodeReport,
    judge_samples,
    memory_after,
    sorted_by_severity,
    worst_severity,
)
from outlast.health.probe_runner import ProbeRequest, TakenSample, run_probes, stuck_processes
from outlast.log_records import Finding
from outlast.node_logs.xid_policy import XidPolicy

LOCK_S = 5.0
NOTHING_HERE = "there is nothing to check"
NO_STATE = "no memory (--state DIR): what counters did, flaps and earlier events were not judged"


class Examined(NamedTuple):
    """Result of an examination.

    `before`: memory of the checks that it was judged with.
    """

    report: NodeReport
    taken: list[TakenSample]
    before: CheckMemory


class Subject(NamedTuple):
    """Node under examination, with its profile, settings and XID policy."""

    cluster: str
    node: str
    profile: Profile
    settings: CheckSettings
    policy: XidPolicy | None


def examine(
    subject: Subject, checks: Sequence[AnyCheck], state: Path | None, own: dict[str, AnyCheck]
) -> Examined:
    """Probe this node, judge the samples and update the state directory.

    An unusable state directory makes the report unknown, but does not end the examination.
    """
    began = time.monotonic()
    before, trouble = _read_memory(state)
    requests = [one for check in checks for one in _probe_requests(check, subject.settings)]
    keys = {one.key for one in requests}
    taken = run_probes(requests, within_s=PROFILES[subject.profile].within_s, stuck=before.stuck)
    t_ns = time.time_ns()
    if state and not trouble:
        try:
            with check_memory.lock_state(state, LOCK_S):
                stored = check_memory.read_memory(
                    state
                )  # again: another check may have written meanwhile
                about = _about(subject, t_ns, stored.memory, remembers=True)
                found = judge_samples(taken, own, about)
                stuck = {key: one for key, one in stored.memory.stuck.items() if key not in keys}
                after = memory_after(stored.memory, found, about, stuck | stuck_processes(taken))
                check_memory.write_memory(state, after)
            notes = [stored.note] if stored.note else []
            return Examined(_report(subject, found, about, began, notes), taken, stored.memory)
        except StorageError as error:
            trouble = str(error)
    about = _about(subject, t_ns, CheckMemory(), remembers=False)
    found = judge_samples(taken, own, about)
    if trouble:
        found.findings.append(_unusable(about, trouble))
    return Examined(_report(subject, found, about, began, [NO_STATE]), taken, CheckMemory())


def _probe_requests(check: AnyCheck, settings: CheckSettings) -> list[ProbeRequest]:
    try:
        found = [ProbeRequest(check, probe) for probe in check.probes(settings)]
        return found or [ProbeRequest(check, Probe("", partial(_raise, AbsentError(NOTHING_HERE))))]
    except Exception as error:  # noqa: BLE001 - a check of one's own must not end all others
        return [ProbeRequest(check, Probe("", partial(_raise, error)))]


def _raise(error: Exception) -> Sample:
    raise error


def _read_memory(state: Path | None) -> tuple[CheckMemory, str]:
    """Return the memory, and the error if the state directory cannot be read."""
    try:
        return (check_memory.read_memory(state).memory if state else CheckMemory()), ""
    except StorageError as error:
        return CheckMemory(), str(error)


def _unusable(about: JudgeContext, trouble: str) -> Finding:
    return Finding(
        t_ns=about.t_ns, cluster=about.cluster, node=about.node, check="state", symptom="disk",
        severity="unknown", code="", device="", detail=trouble,
    )  # fmt: skip


def examine_recording(
    subject: Subject,
    taken: Iterable[TakenSample],
    before: CheckMemory,
    t_ns: int,
    own: dict[str, AnyCheck],
) -> NodeReport:
    """Judge a recording, with its own settings or with other ones."""
    began = time.monotonic()
    about = _about(subject, t_ns, before, remembers=True)
    return _report(subject, judge_samples(taken, own, about), about, began, ["replayed"])


def _about(subject: Subject, t_ns: int, memory: CheckMemory, *, remembers: bool) -> JudgeContext:
    return JudgeContext(
        subject.cluster, subject.node, t_ns, subject.settings, memory, remembers, subject.policy
    )


def _report(
    subject: Subject, found: JudgedSamples, about: JudgeContext, began: float, notes: list[str]
) -> NodeReport:
    findings = sorted_by_severity(found.findings)
    return NodeReport(
        cluster=subject.cluster,
        node=subject.node,
        profile=subject.profile,
        t_ns=about.t_ns,
        took_s=round(time.monotonic() - began, 3),
        severity=worst_severity(findings),
        findings=findings,
        not_applicable=tuple(found.absent),
        notes=tuple(notes),
    )
