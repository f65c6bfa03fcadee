"""Run directories of `outlast run` as records: attempts, failures, measured durations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from outlast.errors import RunDirError, SourceError
from outlast.events import (
    REQUESTS,
    AnyEvent,
    Fault,
    Noticed,
    RunEnded,
    Warned,
    WorkerLost,
    WorkerSpawned,
)
from outlast.fleet import host_lists
from outlast.fleet.formats.log_reading import (
    LogReading,
    ReadTotals,
    RecordBatch,
    Reject,
    make_reject,
)
from outlast.fleet.record_tables import NAMES, table
from outlast.log_records import (
    SEVERITIES,
    SYMPTOMS,
    Cost,
    Finding,
    Interruption,
    JobEnded,
    JobState,
    Record,
    Symptom,
)
from outlast.telemetry.event_store import life_of
from outlast.telemetry.history.launcher_terms import LauncherTerm, split_terms
from outlast.telemetry.history.run_history import RunHistory, read_history
from outlast.telemetry.run_costs import is_host_lost, run_costs
from outlast.telemetry.segment_files import SegmentDamage

CHECK = "outlast run"
_STATES: dict[str, JobState] = {
    "done": "COMPLETED",
    "user_error": "FAILED",
    "gave_up": "FAILED",
    "interrupted": "CANCELLED",
}
# Symptoms by the text of a fault; the first match counts.
_WORDS: tuple[tuple[str, Symptom], ...] = (
    (r"out of memory|oom", "oom"),
    (r"ecc error|uncorrectable", "gpu-memory"),
    (r"nvlink", "nvlink"),
    (r"cuda error|cudnn|cublas", "gpu-driver"),
    (r"nccl|collective", "nccl-timeout"),
)
_KINDS: dict[str, Symptom] = {"hung": "nccl-timeout", "storage": "filesystem"}


def read_run(run_dir: Path, cluster: str = "") -> LogReading:
    """Read a run directory; each rank counts as a GPU.

    A run that is still running is RUNNING as of its last event. One whose launcher died silently is
    FAILED there, or NODE_FAIL if it lost its host.
    """
    return LogReading(str(run_dir), "run", lambda totals: _parts(run_dir, cluster, totals))


def _parts(run_dir: Path, cluster: str, totals: ReadTotals) -> Iterator[RecordBatch]:
    rejects: list[Reject] = []

    def damaged(damage: SegmentDamage) -> None:
        totals.rows += 1
        rejects.append(make_reject(str(run_dir), 0, "damaged bytes among the events", str(damage)))

    try:
        history = read_history(run_dir, damaged)
        running = life_of(run_dir, history.events) == "running"
        terms = split_terms(history, running=running)
    except RunDirError as error:
        raise SourceError(str(error)) from error
    totals.rows += history.count
    if not running and terms[-1].ended is None and life_of(run_dir, history.events) == "unknown":
        totals.notes.append("it is unknown here whether the run continues; it counts as ended")
    records: list[Record] = []
    for number, term in enumerate(terms):
        going_on = running and number == len(terms) - 1
        findings = _findings(term, cluster)
        records += [_job(term, number, cluster, going_on), *findings]
    totals.skipped["events of no failure"] += history.count - len(records)
    derived = [*_interruptions(history, terms, cluster), *_costs(history, terms, cluster)]
    totals.more += len(derived)
    records += derived
    of = {kind: [record for record in records if type(record) is kind] for kind in NAMES}
    yield RecordBatch(
        {NAMES[kind]: table(kind, group) for kind, group in of.items() if group}, rejects
    )


def _job(term: LauncherTerm, number: int, cluster: str, going_on: bool) -> JobEnded:
    begun = term.started
    ended = term.ended
    cause = ended.cause if ended and ended.cause else None
    where = sorted(_hosts(term.events).values())
    return JobEnded(
        t_ns=term.end_ns,
        cluster=cluster,
        job=begun.run,
        attempt=number,
        name=PurePosixPath(begun.script).name,
        user="",
        account="",
        partition="",
        qos="",
        state="RUNNING" if going_on else _state(ended, cause),
        exit_code=ended.exit_code if ended else 0,
        signal=cause.signal if cause else 0,
        submit_ns=begun.t_ns,
        eligible_ns=begun.t_ns,
        start_ns=begun.t_ns,
        nodes=len(set(where)),
        gpus=begun.world,
        hosts=host_lists.compress(where),
        excluded="",
        failed_node=cause.host if cause else "",
        priority=0,
        restarts=number,
    )


def _interruptions(
    history: RunHistory, terms: Sequence[LauncherTerm], cluster: str
) -> Iterator[Interruption]:
    """Yield the incidents that the run survived."""
    for incident in run_costs(history).survived:
        attempt = _attempt(terms, incident.t_ns)
        hosts_of = _hosts(terms[attempt].events)
        cause = incident.cause
        yield Interruption(
            t_ns=incident.t_ns,
            cluster=cluster,
            job=terms[attempt].started.run,
            attempt=attempt,
            node=cause.host or hosts_of.get(cause.worker, ""),
            cause=cause.kind,
            rung=incident.rung,
            gpus=terms[attempt].started.world,
            took_node=int(is_host_lost(incident)),
            length_ns=round(incident.total_ms * 1e6),
        )


def _costs(history: RunHistory, terms: Sequence[LauncherTerm], cluster: str) -> Iterator[Cost]:
    """Yield the run's measured durations, dated by its start; steps by their mean alone."""
    for what, seconds in run_costs(history).seconds.items():
        groups = [seconds] if what == "step" and seconds else [[length_s] for length_s in seconds]
        for group in groups:
            mean_s = sum(group) / len(group)
            yield Cost(
                t_ns=terms[0].started.t_ns,
                cluster=cluster,
                job=terms[0].started.run,
                attempt=0,
                what=what,
                length_ns=round(mean_s * 1e9),
                many=len(group),
            )


def _attempt(terms: Sequence[LauncherTerm], t_ns: int) -> int:
    """Return the number of the term that was under way."""
    began = [number for number, term in enumerate(terms) if term.started.t_ns <= t_ns]
    return began[-1] if began else 0


def _state(ended: RunEnded | None, cause: Fault | None) -> JobState:
    if ended is None:
        return "FAILED"
    if ended.outcome == "gave_up" and cause and cause.kind == "agent_lost":
        return "NODE_FAIL"
    return _STATES.get(ended.outcome, "FAILED")


def _findings(term: LauncherTerm, cluster: str) -> list[Finding]:
    """Return the faults and the findings of node checks.

    A fault that was noticed before its worker was lost is one finding.
    """
    known: set[tuple[str, str, int]] = set()
    where = _hosts(term.events)
    findings: list[Finding] = []
    for event in term.events:
        if isinstance(event, Warned):
            findings.append(_warning_finding(event, cluster))
        if not isinstance(event, WorkerLost | Noticed) or event.fault.kind in REQUESTS:
            continue
        fault = event.fault
        key = (fault.worker, fault.kind, fault.n)
        if key in known:
            continue
        known.add(key)
        findings.append(
            Finding(
                t_ns=fault.t_ns or event.t_ns,
                cluster=cluster,
                node=fault.host or where.get(fault.worker, ""),
                check=CHECK,
                symptom=_symptom(fault),
                severity="now",
                code=fault.kind,
                device=f"rank {fault.seat}" if fault.seat >= 0 else "",
                detail=fault.detail,
            )
        )
    return findings


def _warning_finding(event: Warned, cluster: str) -> Finding:
    symptom = event.symptom
    severity = event.severity
    return Finding(
        t_ns=event.t_ns,
        cluster=cluster,
        node=event.host,
        check=event.check,
        symptom=symptom if symptom in SYMPTOMS else "other",
        severity=severity if severity in SEVERITIES else "unknown",
        code=event.code,
        device=event.device,
        detail=event.detail,
    )


def _symptom(fault: Fault) -> Symptom:
    text = f"{fault.detail} {fault.traceback}".lower()
    for words, symptom in _WORDS:
        if re.search(words, text):
            return symptom
    return _KINDS.get(fault.kind, "other")


def _hosts(events: Sequence[AnyEvent]) -> dict[str, str]:
    """Return the host of each worker that reports one."""
    return {
        event.worker: event.host
        for event in events
        if isinstance(event, WorkerSpawned) and event.host
    }
