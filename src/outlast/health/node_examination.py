"""Examination of this node by a profile: samples taken, recorded, judged and remembered."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from outlast.atomic_files import open_draft
from outlast.errors import ConfigError, SourceError, StorageError
from outlast.health import check_memory
from outlast.health.check_contract import AbsentError, AnyCheck, Check, JudgeContext, Probe, Sample
from outlast.health.check_memory import CheckMemory
from outlast.health.check_settings import CheckSettings, Profile
from outlast.health.checks import (
    clock_check,
    compute_check,
    disk_check,
    gpu_check,
    kernel_log_check,
    link_check,
    memory_check,
    mount_check,
    neighbour_check,
    service_check,
)
from outlast.health.node_report import (
    JudgedSamples,
    NodeReport,
    judge_samples,
    memory_after,
    sorted_by_severity,
    unknown_finding,
    worst_severity,
)
from outlast.health.probe_runner import ProbeRequest, TakenSample, run_probes, stuck_processes
from outlast.node_logs.nvidia_errors import XidPolicy

SHIPPED: tuple[AnyCheck, ...] = (
    kernel_log_check.CHECK,
    mount_check.CHECK,
    disk_check.CHECK,
    disk_check.SMART,
    memory_check.CHECK,
    link_check.CHECK,
    clock_check.CHECK,
    service_check.CHECK,
    gpu_check.CHECK,
    gpu_check.LEFTOVER,
    compute_check.CHECK,
    neighbour_check.CHECK,
)


class ProfilePlan(NamedTuple):
    """Checks of a profile, besides the site's own.

    `within_s`: time limit of all checks together.
    """

    checks: tuple[str, ...]
    within_s: float


QUICK = ("kernel", "mount", "memory", "link", "gpu")
PROFILES: dict[Profile, ProfilePlan] = {
    "prolog": ProfilePlan(QUICK, 10.0),
    "periodic": ProfilePlan((*QUICK, "disk", "smart", "clock", "service"), 30.0),
    "epilog": ProfilePlan((*QUICK, "leftover"), 20.0),
    "preflight": ProfilePlan(
        (*QUICK, "disk", "smart", "clock", "service", "leftover", "matmul", "neighbour"), 300.0
    ),
}


def all_checks(settings: CheckSettings) -> dict[str, AnyCheck]:
    """Return the shipped checks and the site's own by name. Raises ConfigError."""
    found = {check.name: check for check in SHIPPED}
    for where in settings.own:
        for check in _own_checks(where):
            if check.name in found:
                raise ConfigError(f"own: {where}: a check {check.name!r} exists already")
            found[check.name] = check
    return found


def checks_of_profile(
    profile: Profile, settings: CheckSettings, checks: dict[str, AnyCheck], only: Iterable[str] = ()
) -> list[AnyCheck]:
    """Return the checks of a profile, or those named in `only`.

    Raises ConfigError for an unknown name.
    """
    names = tuple(only) or getattr(settings.profiles, profile)
    if names is None:
        shipped = {check.name for check in SHIPPED}
        names = (*PROFILES[profile].checks, *(name for name in checks if name not in shipped))
    for name in names:
        if name not in checks:
            close = difflib.get_close_matches(name, checks, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(checks)}"
            raise ConfigError(f"unknown check {name!r}: {hint}; nothing was checked")
    return [checks[name] for name in dict.fromkeys(names)]


def _own_checks(where: str) -> tuple[AnyCheck, ...]:
    module, _, name = where.partition(":")
    try:
        found = getattr(import_module(module), name or "CHECKS")
    except Exception as error:  # a module of one's own may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"own: {where}: {reason}; nothing was checked") from error
    found = found if isinstance(found, tuple | list) and not isinstance(found, Check) else (found,)
    if not all(isinstance(check, Check) for check in found):
        raise ConfigError(f"own: {where} is not a Check, or several, of outlast.health")
    return tuple(found)


LOCK_S = 5.0
NOTHING_HERE = "no check to run"
NO_STATE = "no --state DIR: rises of counters, flaps and earlier events were not judged"


class Examined(NamedTuple):
    """Result of an examination. `before`: memory of the checks that it was judged with."""

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
                about = _context(subject, t_ns, stored.memory, remembers=True)
                found = judge_samples(taken, own, about)
                stuck = {key: one for key, one in stored.memory.stuck.items() if key not in keys}
                after = memory_after(stored.memory, found, about, stuck | stuck_processes(taken))
                check_memory.write_memory(state, after)
            notes = [stored.note] if stored.note else []
            return Examined(_report(subject, found, about, began, notes), taken, stored.memory)
        except StorageError as error:
            trouble = str(error)
    about = _context(subject, t_ns, CheckMemory(), remembers=False)
    found = judge_samples(taken, own, about)
    if trouble:
        found.findings.append(unknown_finding(about, "state", "disk", trouble))
    return Examined(_report(subject, found, about, began, [NO_STATE]), taken, CheckMemory())


def _probe_requests(check: AnyCheck, settings: CheckSettings) -> list[ProbeRequest]:
    try:
        found = [ProbeRequest(check, probe) for probe in check.probes(settings)]
        return found or [
            ProbeRequest(check, Probe("", partial(_raise_error, AbsentError(NOTHING_HERE))))
        ]
    except Exception as error:  # noqa: BLE001 - a check of one's own must not end all others
        return [ProbeRequest(check, Probe("", partial(_raise_error, error)))]


def _raise_error(error: Exception) -> Sample:
    raise error


def _read_memory(state: Path | None) -> tuple[CheckMemory, str]:
    """Return the memory, and the error if the state directory cannot be read."""
    try:
        return (check_memory.read_memory(state).memory if state else CheckMemory()), ""
    except StorageError as error:
        return CheckMemory(), str(error)


def examine_recording(
    subject: Subject,
    taken: Iterable[TakenSample],
    before: CheckMemory,
    t_ns: int,
    own: dict[str, AnyCheck],
) -> NodeReport:
    """Judge a recording, with its own settings or with other ones."""
    began = time.monotonic()
    about = _context(subject, t_ns, before, remembers=True)
    return _report(subject, judge_samples(taken, own, about), about, began, ["replayed"])


def _context(subject: Subject, t_ns: int, memory: CheckMemory, *, remembers: bool) -> JudgeContext:
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


VERSION = 1
FILE_BYTES_MAX = 256 << 20


class RecordingHead(msgspec.Struct, frozen=True, kw_only=True):
    """Head of a recording. `samples`: number of samples that follow; None in old recordings."""

    version: int = VERSION
    cluster: str
    node: str
    profile: Profile
    t_ns: int
    settings: CheckSettings
    memory: CheckMemory
    samples: int | None = None


class Recording(NamedTuple):
    """Head and samples of a recording."""

    head: RecordingHead
    taken: list[TakenSample]


def write_recording(path: Path, head: RecordingHead, taken: Sequence[TakenSample]) -> None:
    """Write a recording atomically. Raises StorageError."""
    head = replace(head, samples=len(taken))
    try:
        with open_draft(path) as draft, draft.open("wb") as file:
            file.write(msgspec.json.encode(head) + b"\n")
            file.writelines(msgspec.json.encode(one) + b"\n" for one in taken)
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror}") from error


def read_recording(path: Path) -> Recording:
    """Read a recording. Raises SourceError if it is damaged or incomplete."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise SourceError(f"{path}: larger than {FILE_BYTES_MAX:,} bytes: not a recording")
    first, *rest = data.rstrip(b"\n").split(b"\n")
    try:
        head = msgspec.json.decode(first, type=RecordingHead)
        if head.version != VERSION:
            raise SourceError(
                f"{path}: recording version {head.version}; this Outlast reads {VERSION}"
            )
        if head.samples not in (None, len(rest)):
            raise SourceError(
                f"{path}: {len(rest)} of {head.samples} recorded samples: the file is incomplete;"
                " copy it again"
            )
        decoder = msgspec.json.Decoder(TakenSample)
        return Recording(head, [decoder.decode(line) for line in rest])
    except (ValueError, RecursionError, ConfigError) as error:
        raise SourceError(f"{path}: not a recording of `outlast check`: {error}") from error


EXPECTED_BY = {
    "gpu": "gpus",
    "leftover": "gpus",
    "disk": "disks",
    "smart": "disks",
    "service": "services",
    "matmul": "compute",
}
"""The part of the settings by which each check's probe decides that a device may be absent."""
_NOT_SEEN = "not probed when this was recorded"


def apply_settings(
    taken: Iterable[TakenSample], now: CheckSettings, before: CheckSettings
) -> list[TakenSample]:
    """Return the samples as other settings would see them.

    A device that only the new settings expect, and that was not probed, becomes a failed sample.
    `before`: the settings of the recording.
    """
    if now == before:
        return list(taken)
    known = [_as_expected(one, now, before) for one in taken]
    mounts = [one for one in known if one.check == "mount"]
    if mounts:
        recorded = {one.device for one in mounts}
        known += [
            replace(mounts[0], device=path, **_failed_fields(_NOT_SEEN))
            for path in now.mounts.expected
            if path not in recorded and path not in now.mounts.ignore
        ]
    return known


def _as_expected(one: TakenSample, now: CheckSettings, before: CheckSettings) -> TakenSample:
    part = EXPECTED_BY.get(one.check)
    if not one.absent or part is None or getattr(now, part) == getattr(before, part):
        return one
    return replace(one, **_failed_fields(f"{_NOT_SEEN}: {one.absent}"))


def _failed_fields(why: str) -> dict[str, Any]:
    bare = TakenSample(check="", device="", t_ns=0, took_s=0.0, failed=why)
    return {name: getattr(bare, name) for name in ("sample", "absent", "failed", "late", "stuck")}
