"""Events of this worker: phases, refused attempts and metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from outlast import events
from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.keeper.keeper_frames import Outcome
from outlast.config import WorkerSettings
from outlast.telemetry.event_store import EventClock, EventWriter


class WorkerEvents:
    """Writer of one worker's events; without a run directory (plain `python script.py`) a clock
    only."""

    def __init__(self, writer: EventWriter | None, worker: str) -> None:
        self._writer, self.worker = writer, worker
        self.seat = -1
        self.generation = 0
        self._noted: set[str] = set()

    @classmethod
    def of_worker(cls, settings: WorkerSettings | None) -> WorkerEvents:
        """Return the events of a worker with these settings; None: it has no launcher."""
        if settings is None:
            return cls(None, "alone")
        clock = EventClock(settings.clock_anchor_ns)
        folder = Path(settings.run_dir) / "events"
        return cls(EventWriter(folder, settings.worker, clock), settings.worker)

    def now_ns(self) -> int:
        """Return the time on the run's clock in nanoseconds."""
        return self._writer.now_ns() if self._writer else time.time_ns()

    def phase(self, n: int, step: int, kind: str, begin_ns: int, vote_ns: int) -> None:
        """Write that a phase is complete."""
        self._emit(
            events.PhaseDone(
                t_ns=self.now_ns(),
                worker=self.worker,
                seat=self.seat,
                generation=self.generation,
                n=n,
                step=step,
                kind=kind,
                t_begin_ns=begin_ns,
                t_vote_ns=vote_ns,
            )
        )

    def refused(self, n: int, step: int, kind: str, begin_ns: int, reason: str) -> None:
        """Write that an attempt was refused."""
        self._emit(
            events.AttemptRefused(
                t_ns=self.now_ns(),
                worker=self.worker,
                seat=self.seat,
                generation=self.generation,
                n=n,
                step=step,
                kind=kind,
                t_begin_ns=begin_ns,
                reason=reason,
            )
        )

    def dry_steps(self, key: str, begin_ns: int) -> None:
        """Write that a joiner's dry steps are done."""
        self._emit(
            events.DrySteps(
                t_ns=self.now_ns(), worker=self.worker, seat=self.seat, key=key, t_begin_ns=begin_ns
            )
        )

    def loop(self, until: int | None, epochs: int | None, length: int | None) -> None:
        """Write that a loop begins."""
        self._emit(
            events.LoopBegun(
                t_ns=self.now_ns(),
                worker=self.worker,
                seat=self.seat,
                until=until,
                epochs=epochs,
                length=length,
            )
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write metrics of a step."""
        if values:
            self._emit(
                events.Metrics(
                    t_ns=self.now_ns(),
                    worker=self.worker,
                    seat=self.seat,
                    step=step,
                    values=dict(values),
                )
            )

    def note_once(self, text: str, about: str = "") -> None:
        """Write a note, unless there was one `about` the same."""
        if (about or text) not in self._noted:
            self._noted.add(about or text)
            self.note(text)

    def note(self, text: str, *, warning: bool = True) -> None:
        """Write a note."""
        self._emit(
            events.Note(
                t_ns=self.now_ns(),
                worker=self.worker,
                seat=self.seat,
                text=text,
                level="warning" if warning else "info",
            )
        )

    def emit(self, event: events.AnyEvent) -> None:
        """Write an event."""
        self._emit(event)

    def close(self) -> None:
        """Close the event file."""
        if self._writer:
            self._writer.close()

    def _emit(self, event: events.AnyEvent) -> None:
        if self._writer:
            self._writer.emit(event)


def memory_copied(t_ns: int, place: SavePoint, seconds: float) -> events.MemoryCopied:
    """Return the event of a version that each rank's keeper holds."""
    return events.MemoryCopied(t_ns=t_ns, n=place.n, step=place.step, seconds=seconds)


def peers_copied(t_ns: int, seat: int, outcome: Outcome) -> events.PeersCopied:
    """Return the event of a seat's part at other keepers."""
    return events.PeersCopied(
        t_ns=t_ns,
        seat=seat,
        n=outcome.place.n,
        step=outcome.place.step,
        copies=outcome.copies,
        strips=outcome.strips,
        size_bytes=outcome.size_bytes,
        seconds=outcome.seconds,
        error=outcome.error,
    )
