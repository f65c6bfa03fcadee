"""Record of what was logged of a run, so that each step is logged once."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import xxhash

from outlast.atomic_files import replace_file
from outlast.errors import RunDirError, StorageError, UsageError
from outlast.events import AnyEvent, Metrics, RunEnded, RunStarted
from outlast.telemetry.event_store import read_events
from outlast.telemetry.incidents import Tracker
from outlast.telemetry.loggers.metric_course import MetricPoint, metric_points
from outlast.telemetry.loggers.metric_logs import LoggedIncident, LoggedRun, open_log
from outlast.telemetry.run_board import headline

DIRECTORY = "loggers"
T = TypeVar("T")


class LogRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Points that a target has: up to `step`, with `digest`. `writing`: a call has not ended."""

    version: int = 1
    target: str
    identity: str = ""
    step: int = -1
    digest: str = ""
    writing: bool = False


class LoggedSteps(NamedTuple):
    """Result of a call: points written, and the last step of all."""

    points: int
    step: int
    identity: str


def log_run(run_dir: Path, target: str, *, rank: int = 0, name: str = "") -> LoggedSteps:
    """Write what is new of a run to a target. Raises RunDirError, StorageError,
    UsageError."""
    log = open_log(target)
    events = read_events(run_dir)
    run = _run_of(events, name, rank)
    points = metric_points(events, rank)
    ranks = sorted({event.seat for event in events if isinstance(event, Metrics)})
    if not points and rank not in ranks:
        known_ranks = ", ".join(map(str, ranks)) or "none"
        raise UsageError(f"rank {rank} has reported no metrics (ranks that have: {known_ranks})")
    incidents = list(_incidents(events))
    last = points[-1].step if points else -1
    path = run_dir / DIRECTORY / _file_name(target, run.name)
    record = LogRecord(target=target) if log.rewrites else _read(path, target)
    _refuse(record, points)
    new = [point for point in points if point.step > record.step]
    identity = _attempt(target, lambda: log.begin(run, record.identity))
    if not log.rewrites:
        _store(path, msgspec.structs.replace(record, identity=identity, writing=True))
    _attempt(target, lambda: log.write(run, new, incidents))
    if not log.rewrites:
        digest = _digest(points)
        _store(path, LogRecord(target=target, identity=identity, step=last, digest=digest))
    return LoggedSteps(len(new), last, identity)


def _attempt(target: str, call: Callable[[], T]) -> T:
    """Return the result of a logger's call. Raises StorageError for its errors, of any type."""
    try:
        return call()
    except Exception as error:
        raise StorageError(f"--to {target}: {type(error).__name__}: {error}") from error


def _run_of(events: Iterable[AnyEvent], name: str, rank: int) -> LoggedRun:
    """Return the run, with a name that no other run, rank or `--name` has at a target."""
    if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise UsageError(f"--name {name!r}: up to 64 letters, digits, dots, - and _ are possible")
    run, ended = None, ""
    for event in events:
        if isinstance(event, RunStarted):
            run, ended = event, ""
        elif isinstance(event, RunEnded):
            ended = event.outcome
    if run is None:
        raise RunDirError("the events of the run have no start; nothing was logged")
    parts = [run.run, name, f"rank{rank}" if rank else ""]
    return LoggedRun("-".join(filter(None, parts)), run.script, run.world, ended)


def _incidents(events: Iterable[AnyEvent]) -> Iterable[LoggedIncident]:
    tracker = Tracker()
    for event in events:
        tracker.take(event)
    for one in tracker.found():
        if not one.is_request:
            yield LoggedIncident(one.number, max(0, one.step), one.t_ns, headline(one))


def _file_name(target: str, name: str) -> str:
    kind = target.partition(":")[0]
    return f"{kind}-{xxhash.xxh3_64_hexdigest(f'{target} {name}'.encode())}.json"


def _refuse(record: LogRecord, points: list[MetricPoint]) -> None:
    """Raise UsageError where the target has what it cannot take back."""
    again = "give --name NAME for another run there, or --to tensorboard:DIR"
    if record.writing:
        raise UsageError(
            f"an earlier call was interrupted while it wrote steps behind {record.step} to"
            f" {record.target}, or still writes; nothing was logged; {again}"
        )
    logged = [point for point in points if point.step <= record.step]
    if record.step >= 0 and _digest(logged) != record.digest:
        raise UsageError(
            f"steps up to {record.step} are in {record.target}, and the run has gone back since:"
            f" some of them have other values now, or were not redone; nothing was logged; {again}"
        )


def _digest(points: list[MetricPoint]) -> str:
    digest = xxhash.xxh3_128()
    for point in points:
        for name, value in sorted(point.values.items()):
            digest.update(struct.pack("<qd", point.step, value) + name.encode() + b"\0")
    return digest.hexdigest()


def _read(path: Path, target: str) -> LogRecord:
    try:
        return msgspec.json.decode(path.read_bytes(), type=LogRecord)
    except FileNotFoundError:
        return LogRecord(target=target)
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirError(f"{path} cannot be read ({error}); nothing was logged") from error


def _store(path: Path, record: LogRecord) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, msgspec.json.encode(record))
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror or error}") from error
