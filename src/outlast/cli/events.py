"""`outlast events`: events of a live or finished run, one line each."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from outlast.cli.output_stream import pour, tell
from outlast.errors import EXIT_DONE, RunDirError
from outlast.events import AnyEvent, Event, Fault, RunEnded, RunStarted, WorkerSpawned
from outlast.telemetry import event_store
from outlast.telemetry.launcher_liveness import life_of

LOOK_S = 1.0
_FIELDS_APART = {"t_ns", "type"}


def events(run_dir: Path, *, follow: bool = False, json: bool = False) -> int:
    """List a run's events by time, over all its workers.

    Parameters
    ----------
    run_dir
        The directory that `outlast run` printed at its start. The run may be alive, done or dead.
    follow
        Go on with new events until the run ends or its launcher has died (or Ctrl-C).
    json
        One JSON object a line.
    """
    found = _following(run_dir) if follow else event_store.read_events(run_dir)
    _print(found, json=json, live=follow)
    return EXIT_DONE


def _following(run_dir: Path) -> Iterator[AnyEvent]:
    if not (run_dir / event_store.DIRECTORY).is_dir():
        raise RunDirError(
            f"{run_dir} is no run directory ({run_dir / event_store.DIRECTORY} is missing);"
            " give the directory that `outlast run` printed at its start"
        )
    watch = _Watch(run_dir)
    for event in event_store.follow(run_dir, watch.stop, idle=watch.look):
        yield event
        watch.take(event)
    if watch.died:
        tell(
            f"outlast: {run_dir}: the events end here without an end of the run: its launcher has"
            " died; the same `outlast run` command resumes it"
        )


class _Watch:
    """Condition to stop following a run: its end, or the death of its launcher."""

    def __init__(self, run_dir: Path) -> None:
        self.stop = threading.Event()
        self.died = False
        self._run_dir = run_dir
        self._spawned: list[WorkerSpawned] = []
        self._next_s = 0.0

    def take(self, event: AnyEvent) -> None:
        if isinstance(event, RunEnded):
            self.stop.set()  # one more look, in case another launcher took the run up meanwhile
            self.died = False
        elif isinstance(event, RunStarted):
            self.stop.clear()
            self.died = False
        elif isinstance(event, WorkerSpawned):
            self._spawned = [event]

    def look(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s or self.stop.is_set():
            return
        self._next_s = now_s + LOOK_S
        if life_of(self._run_dir, self._spawned) == "died":
            self.died = True  # unless the last look finds that it ended, or was taken up again
            self.stop.set()


def _print(found: Iterable[AnyEvent], *, json: bool, live: bool) -> None:
    encode = msgspec.json.Encoder().encode
    pour((encode(event).decode() if json else format_event(event) for event in found), live=live)


def format_event(event: Event) -> str:
    """Return one event on one line: local time, name, and its fields as key=value."""
    when = datetime.fromtimestamp(event.t_ns / 1e9, tz=UTC).astimezone()
    values = ((name, getattr(event, name)) for name in event.__struct_fields__)
    fields = [f"{name}={_value(value)}" for name, value in values if name not in _FIELDS_APART]
    return " ".join([f"{when:%H:%M:%S.%f}"[:-3], f"{type(event).__name__:<16}", *fields])


def _value(value: object) -> str:
    if isinstance(value, Fault):
        return f"<{value.kind} rank={value.seat} worker={value.worker or '-'}: {value.detail}>"
    if isinstance(value, str) and (not value or any(c.isspace() for c in value)):
        return repr(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
