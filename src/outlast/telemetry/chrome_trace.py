"""Trace of a run in Chrome's JSON format, which Perfetto and chrome://tracing open.

Source of the format: the Trace Event Format document of the Chromium project. Times are
microseconds since the run's begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from outlast.events import (
    AnyEvent,
    CheckpointSaved,
    Drained,
    MemoryCopied,
    PeersCopied,
    Transferred,
    Warned,
    WorkerSeated,
)
from outlast.telemetry.history.incident_course import PHASES, Incident
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import RunHistory
from outlast.telemetry.history.time_buckets import TimeAccount
from outlast.telemetry.run_board import headline
from outlast.telemetry.time_accounting import account
from outlast.text_formatting import size, warning

_JOB = 0  # process of what concerns all ranks
_RANKS = 1
_COPIES = 2  # of state, from rank to rank
_KEEPERS = 3  # copies of ranks' parts at other keepers
_US = 1_000


def trace_events(history: RunHistory, *, running: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace: each rank's time, incidents with their phases, copies,
    saves, and findings.

    Raises RunDirError and CorruptionError as `account` does.
    """
    times = account(history, running=running)
    yield _name("process_name", _JOB, 0, "job")
    yield _name("process_name", _RANKS, 0, "ranks")
    yield _name("thread_name", _JOB, 0, "incidents")
    yield _name("thread_name", _JOB, 1, "checkpoints")
    yield _name("thread_name", _JOB, 2, "findings")
    yield _name("thread_name", _JOB, 3, "copies in memory")
    for lane in times.lanes:
        yield _name("thread_name", _RANKS, lane.seat, f"rank {lane.seat}")
        for span in lane.spans:
            yield _span(span.bucket, _RANKS, lane.seat, span.begin_ns, span.end_ns, times)
    for incident in incidents(history):
        yield from _incident(incident, times)
    for event in history.events:
        yield from _event(event, times)
    yield from _copies(history.events, times)
    yield from _peers(history.events, times)


def _incident(incident: Incident, times: TimeAccount) -> Iterator[dict[str, Any]]:
    end_ns = incident.t_ns + round(incident.total_ms * 1e6)
    about = {"reason": incident.reason, "rung": incident.rung, "state": incident.state}
    yield _span(headline(incident, brief=True), _JOB, 0, incident.t_ns, end_ns, times, about)
    at_ns = incident.t_ns
    for phase in PHASES:
        spent_ns = round(incident.phases_ms.get(phase, 0.0) * 1e6)
        if spent_ns:
            yield _span(phase, _JOB, 0, at_ns, at_ns + spent_ns, times)
        at_ns += spent_ns


def _event(event: AnyEvent, times: TimeAccount) -> Iterator[dict[str, Any]]:
    match event:
        case CheckpointSaved() | Drained():
            where = event.path if isinstance(event, CheckpointSaved) else event.where
            begin_ns = event.t_ns - round(event.seconds * 1e9)
            about = {"path": where, "bytes": event.size_bytes}
            kind = "checkpoint" if isinstance(event, CheckpointSaved) else "upload"
            name = f"{kind} of step {event.step}"
            yield _span(name, _JOB, 1, begin_ns, event.t_ns, times, about)
        case MemoryCopied():
            begin_ns = event.t_ns - round(event.seconds * 1e9)
            yield _span(f"copy of step {event.step}", _JOB, 3, begin_ns, event.t_ns, times)
        case Warned():
            yield _instant(warning(event), _JOB, 2, event.t_ns, times, "p")
        case WorkerSeated():
            yield _instant(f"{event.worker} joins", _RANKS, event.seat, event.t_ns, times, "t")
        case _:
            pass


def _copies(events: Iterable[AnyEvent], times: TimeAccount) -> Iterator[dict[str, Any]]:
    """Yield a lane for each pair of ranks between which state was copied in recoveries."""
    lanes: dict[tuple[int, int], int] = {}
    for event in events:
        if not isinstance(event, Transferred):
            continue
        pair = (event.donor, event.joiner)
        if not lanes:
            yield _name("process_name", _COPIES, 0, "copies of state")
        if pair not in lanes:
            lanes[pair] = len(lanes)
            name = f"rank {event.donor} to rank {event.joiner}"
            yield _name("thread_name", _COPIES, lanes[pair], name)
        begin_ns = event.t_ns - round(event.seconds * 1e9)
        about = {"bytes": event.size_bytes, "incident": event.incident}
        text = f"{size(event.size_bytes)} for generation {event.generation}"
        yield _span(text, _COPIES, lanes[pair], begin_ns, event.t_ns, times, about)


def _peers(events: Iterable[AnyEvent], times: TimeAccount) -> Iterator[dict[str, Any]]:
    """Yield a lane for each rank, with the copies of its part at other keepers."""
    seats = set[int]()
    for event in events:
        if not isinstance(event, PeersCopied):
            continue
        if not seats:
            yield _name("process_name", _KEEPERS, 0, "copies at peers")
        if event.seat not in seats:
            seats.add(event.seat)
            yield _name("thread_name", _KEEPERS, event.seat, f"part of rank {event.seat}")
        begin_ns = event.t_ns - round(event.seconds * 1e9)
        about = {"bytes": event.size_bytes, "copies": event.copies, "error": event.error}
        whole = "" if event.is_whole else ", not whole"
        name = f"step {event.step}, {size(event.size_bytes)}{whole}"
        yield _span(name, _KEEPERS, event.seat, begin_ns, event.t_ns, times, about)


def _span(
    name: str,
    process: int,
    thread: int,
    begin_ns: int,
    end_ns: int,
    times: TimeAccount,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": (begin_ns - times.begin_ns) / _US,
        "dur": max(0, end_ns - begin_ns) / _US,
        **({"args": about} if about else {}),
    }


def _instant(
    name: str, process: int, thread: int, t_ns: int, times: TimeAccount, scope: str
) -> dict[str, Any]:
    at_us = (t_ns - times.begin_ns) / _US
    return {"ph": "i", "name": name, "pid": process, "tid": thread, "ts": at_us, "s": scope}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
