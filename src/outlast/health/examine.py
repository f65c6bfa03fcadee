"""This node examined: samples taken, judged with what is remembered, and remembered."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from outlast.errors import StorageError
from outlast.health import keeping
from outlast.health.contract import About, AbsentError, AnyCheck, Probe, Sample
from outlast.health.memory import Memory
from outlast.health.probing import Asked, Taken, lateness, take_all
from outlast.health.profiles import PROFILES
from outlast.health.report import Judged, Report, judged, memory_after, sorted_by_severity, worst
from outlast.health.settings import Profile, Settings
from outlast.log_records import Finding
from outlast.symptoms.policy import Policy

LOCK_S = 5.0
NOTHING_HERE = "there is nothing to look at"
NO_STATE = "no memory (--state DIR): what counters did, flaps and earlier events were not judged"


class Examined(NamedTuple):
    """`before`: what was remembered when it was judged."""

    report: Report
    taken: list[Taken]
    before: Memory


class Subject(NamedTuple):
    cluster: str
    node: str
    profile: Profile
    settings: Settings
    policy: Policy | None


def examine(
    subject: Subject, checks: Sequence[AnyCheck], state: Path | None, own: dict[str, AnyCheck]
) -> Examined:
    """A state directory that cannot be used makes the report unknown, and ends nothing."""
    began = time.monotonic()
    before, trouble = _remembered(state)
    asked = [one for check in checks for one in _asked(check, subject.settings)]
    keys = {one.key for one in asked}
    taken = take_all(asked, within_s=PROFILES[subject.profile].within_s, stuck=before.stuck)
    t_ns = time.time_ns()
    if state and not trouble:
        try:
            with keeping.locked(state, LOCK_S):
                kept = keeping.read(state)  # again: another check may have written meanwhile
                about = _about(subject, t_ns, kept.memory, remembers=True)
                found = judged(taken, own, about)
                stuck = {key: one for key, one in kept.memory.stuck.items() if key not in keys}
                after = memory_after(kept.memory, found, about, stuck | lateness(taken))
                keeping.write(state, after)
            notes = [kept.note] if kept.note else []
            return Examined(_report(subject, found, about, began, notes), taken, kept.memory)
        except StorageError as error:
            trouble = str(error)
    about = _about(subject, t_ns, Memory(), remembers=False)
    found = judged(taken, own, about)
    if trouble:
        found.findings.append(_unusable(about, trouble))
    return Examined(_report(subject, found, about, began, [NO_STATE]), taken, Memory())


def _asked(check: AnyCheck, settings: Settings) -> list[Asked]:
    try:
        found = [Asked(check, probe) for probe in check.probes(settings)]
        return found or [Asked(check, Probe("", partial(_raise, AbsentError(NOTHING_HERE))))]
    except Exception as error:  # noqa: BLE001 - a check of one's own must not end all others
        return [Asked(check, Probe("", partial(_raise, error)))]


def _raise(error: Exception) -> Sample:
    raise error


def _remembered(state: Path | None) -> tuple[Memory, str]:
    """And why not, where there is a state directory that cannot be read."""
    try:
        return (keeping.read(state).memory if state else Memory()), ""
    except StorageError as error:
        return Memory(), str(error)


def _unusable(about: About, trouble: str) -> Finding:
    return Finding(
        t_ns=about.t_ns, cluster=about.cluster, node=about.node, check="state", symptom="disk",
        severity="unknown", code="", device="", detail=trouble,
    )  # fmt: skip


def again(
    subject: Subject, taken: Iterable[Taken], before: Memory, t_ns: int, own: dict[str, AnyCheck]
) -> Report:
    """A recording judged as it was, or by other settings."""
    began = time.monotonic()
    about = _about(subject, t_ns, before, remembers=True)
    return _report(subject, judged(taken, own, about), about, began, ["replayed"])


def _about(subject: Subject, t_ns: int, memory: Memory, *, remembers: bool) -> About:
    return About(
        subject.cluster, subject.node, t_ns, subject.settings, memory, remembers, subject.policy
    )


def _report(
    subject: Subject, found: Judged, about: About, began: float, notes: list[str]
) -> Report:
    findings = sorted_by_severity(found.findings)
    return Report(
        cluster=subject.cluster, node=subject.node, profile=subject.profile, t_ns=about.t_ns,
        took_s=round(time.monotonic() - began, 3), severity=worst(findings), findings=findings,
        not_applicable=tuple(found.absent), notes=tuple(notes),
    )  # fmt: skip
