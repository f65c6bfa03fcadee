"""Figures of a real run, and the fields of a scenario that it measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from outlast.errors import RunDirError
from outlast.events import AnyEvent, CheckpointSaved
from outlast.plan.model.answer_values import CAUSES, Cause
from outlast.telemetry.event_store import life_of
from outlast.telemetry.history.run_history import RunHistory, read_history
from outlast.telemetry.history.time_buckets import CODES, Bucket, TimeAccount
from outlast.telemetry.run_costs import run_costs
from outlast.telemetry.run_summary import RunSummary, summarise_history
from outlast.telemetry.segment_files import SegmentDamage
from outlast.telemetry.time_accounting import account

# Buckets that the model covers; it excludes the first start and the last stop.
OF_BUCKET: dict[Bucket, Cause] = {
    "step": "work",
    "eval": "work",
    "script": "work",
    "checkpoint": "save",
    "lost": "redo",
    "recovery": "restart",
    "start": "restart",
    "absent": "wait",
    "stop": "restart",
    "down": "wait",
}


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a measured run.

    `spent_s`: seat-seconds by cause, without the first start and the last stop (`outside_s`); empty
    where nothing was measured. `work_s`: of one seat. `exposure_s`: seat-seconds in which something
    could fail. `transient`, `fatal`: shares of failures after which all hosts went on, and of those
    that restarted from storage. `course`: of one seat, pairs of seconds since its first step and
    seconds of work that lasted. `fields`: scenario fields by key, as measured.
    """

    summary: RunSummary
    failures: int
    transient: float
    fatal: float
    exposure_s: float
    outside_s: float
    work_s: float
    spent_s: dict[Cause, float]
    course: list[tuple[float, float]]
    fields: dict[str, str]


def read_measured_run(run_dir: Path) -> MeasuredRun:
    """Read a run; it may be done, alive or dead. Raises RunDirError when `run_dir` holds none, and
    CorruptionError when its times do not add up."""
    damages: list[SegmentDamage] = []
    history = read_history(run_dir, damages.append)
    life = life_of(run_dir, history.events)
    times = account(history, running=life == "running")
    summary = summarise_history(history, run_dir, damages, life=life, times=times)
    return measure_run(history, times, summary)


def measure_run(history: RunHistory, times: TimeAccount, summary: RunSummary) -> MeasuredRun:
    """Return the figures of a run from its history. Raises RunDirError where no time has passed."""
    if not times.wall_ns:
        raise RunDirError(
            f"{summary.run_dir}: no time has passed in this run; nothing can be compared"
        )
    outside_s = _outside_s(times)
    spent_s = _spent_s(summary, outside_s) if summary.goodput is not None else {}
    count = sum(cause.count for cause in summary.causes.values())
    fatal = sum(
        incident.rung == "restart" and incident.cause in summary.causes
        for incident in summary.incidents
    )
    hosts_lost = sum(
        incident.rung != "restart" and incident.cause == "agent_lost"
        for incident in summary.incidents
    )
    work_s = spent_s.get("work", 0.0) / summary.world
    return MeasuredRun(
        summary=summary,
        failures=count,
        transient=(count - fatal - hosts_lost) / count if count else 0.0,
        fatal=fatal / count if count else 0.0,
        exposure_s=times.capacity_ns / 1e9 - summary.buckets_s["down"],
        outside_s=outside_s,
        work_s=work_s,
        spent_s=spent_s,
        course=_course(times) if spent_s else [],
        fields=_fields(history, summary, work_s) if work_s else {},
    )


def scenario_texts(of: MeasuredRun) -> dict[str, str]:
    """Return the fields of a scenario that a run gives, by key: each rank is a node and a replica.

    Its failure rate is not among them.
    """
    texts = {
        **of.fields,
        "gpus": f"{of.summary.world}",
        "gpus-per-node": "1",
        "replica-gpus": "1",
    }
    if of.failures:
        texts |= {"transient": f"{of.transient:.6f}", "fatal": f"{of.fatal:.6f}"}
    return texts


def _fields(history: RunHistory, summary: RunSummary, work_s: float) -> dict[str, str]:
    """Return the scenario fields that the run measured, by key."""
    costs = run_costs(history)
    mean_s = {name: cost.mean_s for name, cost in costs.measured().items()}
    interval_s = _interval_s(history.events, work_s / max(1, summary.steps or 0)) or work_s
    mean_s["flush"] = min(mean_s.get("flush", 0.0), interval_s)
    mean_s.setdefault("cost", 0.0)
    fields = {name: f"{value:.6f}s" for name, value in mean_s.items() if value or name != "step"}
    fields["interval"] = f"{interval_s:.6f}s"
    if "pause" in mean_s:
        fields["window"] = "0"  # a replica is whole when its state has moved, in the pause
    return fields


def _interval_s(events: Sequence[AnyEvent], step_s: float) -> float:
    """Return the mean work between two checkpoints; 0 where none was saved."""
    saved = sorted({event.step for event in events if isinstance(event, CheckpointSaved)})
    return saved[-1] / len(saved) * step_s if saved else 0.0


def _outside_s(times: TimeAccount) -> float:
    """Return the seconds of the first start and the last stop of every seat."""
    lanes = [lane.claims for lane in times.lanes if len(lane.claims.begin)]
    edges = [claims.chosen(slice(1)) for claims in lanes if claims.code[0] == CODES["start"]]
    edges += [
        claims.chosen(slice(-1, None)) for claims in lanes if claims.code[-1] == CODES["stop"]
    ]
    return sum(int(edge.end[0] - edge.begin[0]) for edge in edges) / 1e9


def _course(times: TimeAccount) -> list[tuple[float, float]]:
    spans = [span for span in times.lanes[0].spans if span.bucket not in ("start", "stop")]
    begun_ns = spans[0].begin_ns if spans else 0
    done_s = 0.0
    course = [(0.0, 0.0)]
    for span in spans:
        if OF_BUCKET[span.bucket] == "work":
            course.append(((span.begin_ns - begun_ns) / 1e9, done_s))
            done_s += (span.end_ns - span.begin_ns) / 1e9
            course.append(((span.end_ns - begun_ns) / 1e9, done_s))
    return course


def _spent_s(summary: RunSummary, outside_s: float) -> dict[Cause, float]:
    spent_s: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    for bucket, seconds in summary.buckets_s.items():
        spent_s[OF_BUCKET[bucket]] += seconds
    spent_s["restart"] -= outside_s
    # Until a failure is noticed, its peers wait in an attempt that is then lost.
    noticing_s = (
        sum(incident.phases_ms["notice"] for incident in summary.incidents) / 1e3 * summary.world
    )
    spent_s["detect"] = min(spent_s["redo"], noticing_s)
    spent_s["redo"] -= spent_s["detect"]
    return spent_s
