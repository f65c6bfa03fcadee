"""Log of a run at a target of an experiment logger, at once or while the run trains."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from outlast.errors import RunDirError, StorageError, UsageError
from outlast.events import AnyEvent, RunEnded, RunStarted
from outlast.telemetry.event_store import EventReader
from outlast.telemetry.incidents import Tracker
from outlast.telemetry.loggers.log_record import (
    LogRecord,
    read_record,
    record_path,
    sole_writer,
    write_record,
)
from outlast.telemetry.loggers.metric_course import CourseDigest, MetricCourse, MetricPoint
from outlast.telemetry.loggers.metric_logs import (
    MARK,
    LoggedIncident,
    LoggedRun,
    MetricLog,
    open_log,
)
from outlast.telemetry.run_board import headline
from outlast.telemetry.run_watch import RunWatch

T = TypeVar("T")
POLL_S = 2.0
_BATCH = 500  # points between two writes of the record
_AGAIN = "give --name NAME for another run there, or --to tensorboard:DIR"


class LoggedSteps(NamedTuple):
    """Result of a call: points written, and the last step of all. `died`: its launcher did."""

    points: int
    step: int
    identity: str
    died: bool = False


def log_run(
    run_dir: Path, target: str, *, rank: int = 0, name: str = "", follow: bool = False
) -> LoggedSteps:
    """Write what is new of a run to a target. `follow`: until the run ends, its launcher dies, or
    KeyboardInterrupt. Raises RunDirError, StorageError, UsageError."""
    log = open_log(target)
    if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise UsageError(f"--name {name!r}: up to 64 letters, digits, dots, - and _ are possible")
    parts = [name, f"rank{rank}" if rank else ""]
    logger = RunLogger(run_dir, target, log, rank, "-".join(filter(None, parts)))
    try:
        return _followed(run_dir, logger) if follow else _logged(run_dir, logger)
    finally:
        logger.release()


def _logged(run_dir: Path, logger: RunLogger) -> LoggedSteps:
    RunWatch(run_dir)  # names what is no run directory
    for event in EventReader(run_dir).stream(last=True):
        logger.take(event)
    logger.write()
    return logger.close()


def _followed(run_dir: Path, logger: RunLogger) -> LoggedSteps:
    watch, reader = RunWatch(run_dir), EventReader(run_dir)
    try:
        while True:
            is_last = watch.stop.is_set()
            is_idle = True
            for event in reader.stream(last=is_last):
                logger.take(event)
                watch.take(event)
                is_idle = False
            if is_last and watch.stop.is_set():
                break
            logger.write(live=True)
            if is_idle:
                watch.look()
            watch.stop.wait(POLL_S)
    except KeyboardInterrupt:
        return logger.close(live=True)
    logger.write()
    return logger.close()._replace(died=watch.died)


class RunLogger:
    """Writer of one run to one target, from its events.

    `_digest`: of the points up to the record's step. `_is_verified`: the course still has them.
    """

    def __init__(self, run_dir: Path, target: str, log: MetricLog, rank: int, suffix: str) -> None:
        self._run_dir, self._target, self._log = run_dir, target, log
        self._rank, self._suffix = rank, suffix
        self._course = MetricCourse(rank)
        self._tracker = Tracker()
        self._started: RunStarted | None = None
        self._outcome = ""
        self._record = LogRecord(target=target)
        self._path: Path | None = None  # of the record, once the run is known
        self._lock = contextlib.ExitStack()
        self._digest = CourseDigest()
        self._is_verified = True
        self._newest: dict[str, int] = {}  # by metric, what an interrupted call has written
        self._is_open = False
        self._points = 0

    def take(self, event: AnyEvent) -> None:
        """Take the run's next event."""
        self._course.take(event)
        self._tracker.take(event)
        if isinstance(event, RunStarted):
            self._started, self._outcome = event, ""
        elif isinstance(event, RunEnded):
            self._outcome = event.outcome

    def write(self, *, live: bool = False) -> None:
        """Write the points that are complete and not at the target. `live`: steps that were taken
        back may come again. Raises as `log_run` does."""
        if self._started is None:
            if live:
                return
            raise RunDirError("the events of the run have no start; nothing was logged")
        if self._path is None:
            self._find_record()
        if not self._is_known(live=live):
            return
        if not live and self._rank not in self._course.ranks and not self._is_open:
            known = ", ".join(map(str, sorted(self._course.ranks))) or "none"
            raise UsageError(
                f"rank {self._rank} has reported no metrics (ranks that have: {known})"
            )
        incidents = self._incidents(self._record.incidents)
        points = self._course.points(after=self._record.step)
        while batch := list(islice(points, _BATCH)):
            due = list(takewhile(lambda one: one.step <= batch[-1].step, incidents))
            incidents = incidents[len(due) :]
            self._write(batch, due)
        if incidents and not live:
            self._write([], incidents)
        if not live:
            self._open()

    def close(self, *, live: bool = False) -> LoggedSteps:
        """Close the run at the target. `live`: it goes on."""
        if self._is_open:
            self._attempt(lambda: self._log.end(self._outcome))
            self._store(
                writing=False,
                safe_step=self._record.step,
                safe_incidents=self._record.incidents,
            )
        last = max(self._record.step, -1 if live else self._course.last)
        return LoggedSteps(self._points, last, self._record.identity)

    def release(self) -> None:
        """Let others write to the target."""
        self._lock.close()

    # --- the record ---

    def _find_record(self) -> None:
        """Take the record, alone. Raises UsageError where what was written cannot be known."""
        self._path = record_path(self._run_dir, self._target, self._run().name)
        if self._log.rewrites:
            return
        self._lock.enter_context(sole_writer(self._path))
        self._record = read_record(self._path, self._target)
        self._is_verified = self._record.step < 0

    def _store(self, **changes: object) -> None:
        self._record = replace(self._record, **changes)
        if self._path is not None and not self._log.rewrites:
            write_record(self._path, self._record)

    def _is_known(self, *, live: bool) -> bool:
        """Return whether the course has the points that the target has, with the same values.

        Raises UsageError where it has not.
        """
        course, step = self._course, self._record.step
        changed, course.changed = course.changed, None
        if changed is not None and changed <= step:
            if self._log.rewrites:
                self._take_back(changed)
                return True
            self._is_verified = False
        if self._is_verified:
            return True
        if live and course.last < step:
            return False
        self._digest = CourseDigest()
        for point in course.points(until=min(step, course.last)):
            self._digest.add(point)
        if self._digest.text() != self._record.digest:
            raise UsageError(
                f"steps up to {step} are in {self._target}, and the run has gone back since: some"
                " of them have other values now, or were not redone; nothing more was logged;"
                f" {_AGAIN}"
            )
        self._is_verified = True
        return True

    def _take_back(self, changed: int) -> None:
        """Take back the points from a step on; the course will have them again."""
        self._open()
        self._attempt(lambda: self._log.take_back(changed))
        number = min(
            (one.number for one in self._tracker.found() if one.step >= changed),
            default=self._record.incidents + 1,
        )
        self._record = replace(
            self._record, step=changed - 1, incidents=min(self._record.incidents, number - 1)
        )

    # --- the target ---

    def _open(self) -> None:
        """Begin the run at the target, once. Raises UsageError where an earlier call was
        interrupted, and the target cannot tell what it has."""
        if self._is_open:
            return
        identity = self._attempt(lambda: self._log.begin(self._run(), self._record.identity))
        self._is_open = True
        if self._record.writing:
            names = {name for point in self._course.points() for name in point.values} | {MARK}
            newest = self._attempt(lambda: self._log.newest(names))
            if newest is None:
                raise UsageError(
                    f"an earlier call was interrupted while it wrote steps behind"
                    f" {self._record.safe_step} to {self._target}, which cannot tell the last one"
                    f" that it has; nothing was logged; {_AGAIN}"
                )
            self._newest = newest
            self._rewrite()
        self._store(identity=identity, writing=True)

    def _rewrite(self) -> None:
        """Write what an interrupted call gave to the target, and the target does not have."""
        record = self._record
        unsafe = self._incidents(record.safe_incidents)
        incidents = [one for one in unsafe if one.number <= record.incidents]
        points = self._course.points(after=record.safe_step, until=record.step)
        while batch := list(islice(points, _BATCH)):
            due = list(takewhile(lambda one: one.step <= batch[-1].step, incidents))
            incidents = incidents[len(due) :]
            self._add(batch, due)
        if incidents:
            self._add([], incidents)

    def _write(self, points: list[MetricPoint], incidents: list[LoggedIncident]) -> None:
        self._open()
        for point in points:
            self._digest.add(point)
        number = max((one.number for one in incidents), default=self._record.incidents)
        step = points[-1].step if points else self._record.step
        self._store(step=step, digest=self._digest.text(), incidents=number)
        self._add(points, incidents)
        if self._log.is_synchronous:
            self._record = replace(self._record, safe_step=step, safe_incidents=number)

    def _add(self, points: list[MetricPoint], incidents: list[LoggedIncident]) -> None:
        """Add points, without the metrics that an interrupted call has written, and incidents."""
        if self._log.marks:
            points = list(_marked(points, incidents))
        if self._newest:
            points = [point for point in map(self._without_known, points) if point.values]
        if points:
            self._attempt(lambda: self._log.add(points))
            self._points += len(points)
        if incidents:
            self._attempt(lambda: self._log.mark(incidents))

    def _without_known(self, point: MetricPoint) -> MetricPoint:
        values = point.values.items()
        fresh = {name: one for name, one in values if point.step > self._newest.get(name, -1)}
        return point._replace(values=fresh)

    def _incidents(self, after: int) -> list[LoggedIncident]:
        """Return incidents above a number that are over, by number, up to an open one."""
        found: list[LoggedIncident] = []
        count = self._tracker.count - after
        for one in self._tracker.found(count) if count > 0 else ():
            if one.state == "open":
                break
            if not one.is_request:
                found.append(LoggedIncident(one.number, max(0, one.step), one.t_ns, headline(one)))
        return found

    def _run(self) -> LoggedRun:
        """Return the run, with a name that no other run, rank or `--name` has at a target."""
        assert self._started is not None
        name = "-".join(filter(None, (self._started.run, self._suffix)))
        return LoggedRun(name, self._started.script, self._started.world, self._outcome)

    def _attempt(self, call: Callable[[], T]) -> T:
        """Return the result of a logger's call. Raises StorageError for its errors, of any type."""
        try:
            return call()
        except Exception as error:
            raise StorageError(f"--to {self._target}: {type(error).__name__}: {error}") from error


def _marked(
    points: Iterable[MetricPoint], incidents: list[LoggedIncident]
) -> Iterator[MetricPoint]:
    """Yield the points; the first one from an incident's step on has its number as a metric.

    Raises UsageError where the script has a metric of that name.
    """
    waiting = list(incidents)
    for point in points:
        if MARK in point.values:
            raise UsageError(
                f"the script reports a metric {MARK!r} in step {point.step}, the name of the marks"
                " of incidents; give it another name, or --to tensorboard:DIR"
            )
        number = 0
        while waiting and waiting[0].step <= point.step:
            number = max(number, waiting.pop(0).number)
        yield point._replace(values=point.values | {MARK: float(number)}) if number else point
