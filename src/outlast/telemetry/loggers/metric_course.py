"""Metrics of the course of a run that counts: each step once, after rollbacks and resumes.

A generation that begins at step s undoes all later steps of earlier generations. A metric belongs
to the generation of the phase before it in its worker's own events; clocks are not compared.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from outlast.events import (
    AnyEvent,
    Decided,
    GenerationOpened,
    Metrics,
    PhaseDone,
    RunEnded,
    RunStarted,
    WorkerSeated,
)


class MetricPoint(NamedTuple):
    """Metrics of one step. `t_ns`: of the first report."""

    step: int
    t_ns: int
    values: dict[str, float]


@dataclass(slots=True)
class _Row:
    generation: int
    t_ns: int
    values: dict[str, float]


class MetricCourse:
    """Metrics of one rank, from events of all workers, in each worker's order.

    `changed`: the lowest step whose metrics are others, or were taken back, since it was set to
    None. A report waits until the generation of its worker, and where that begins, are known:
    another writer has these events.
    """

    def __init__(self, rank: int = 0) -> None:
        self.ranks: set[int] = set()  # that have reported metrics
        self.changed: int | None = None
        self.is_ended = False
        self._rank = rank
        self._generations: dict[str, int] = {}  # newest of each worker
        self._begins: dict[int, int] = {}  # step at which a generation begins
        self._order: list[int] = []  # its generations
        self._waiting: list[tuple[int | None, Metrics]] = []
        self._rows: dict[int, _Row] = {}
        self._steps: list[int] = []  # of the rows
        self._resumed_step = 0

    def take(self, event: AnyEvent) -> None:
        """Update the course with the next event."""
        if isinstance(event, PhaseDone):
            self._generations[event.worker] = event.generation
        elif isinstance(event, Metrics):
            self.ranks.add(event.seat)
            if event.seat == self._rank:
                self._report(self._generations.get(event.worker), event)
        elif isinstance(event, WorkerSeated):
            self._generations.setdefault(event.worker, event.generation)
            self._retry()
        elif isinstance(event, RunStarted):
            self._resumed_step, self.is_ended = max(0, event.resumed_step), False
        elif isinstance(event, Decided):
            if event.rung != "stop":
                self._begin(event.generation, event.step)
        elif isinstance(event, GenerationOpened):
            if event.generation not in self._begins:
                self._begin(event.generation, self._resumed_step)
        elif isinstance(event, RunEnded):
            self.is_ended = True

    @property
    def last(self) -> int:
        """Last step that is complete: the script may report more about the newest one of a run
        without an end. -1: none."""
        steps = self._steps if self.is_ended else self._steps[:-1]
        return steps[-1] if steps else -1

    def points(self, after: int = -1, until: int | None = None) -> Iterator[MetricPoint]:
        """Yield the points above a step, up to `until` (default: the last complete one)."""
        until = self.last if until is None else until
        for index in range(bisect_right(self._steps, after), bisect_right(self._steps, until)):
            row = self._rows[self._steps[index]]
            yield MetricPoint(self._steps[index], row.t_ns, dict(row.values))

    def _begin(self, generation: int, step: int) -> None:
        """Take back what the generation undoes, and take the reports that waited for it."""
        if generation not in self._begins:
            insort(self._order, generation)
        self._begins[generation] = step
        for undone in self._steps[bisect_right(self._steps, step) :]:
            if self._rows[undone].generation < generation:
                del self._rows[undone]
                self._change(undone)
        self._steps = self._steps if len(self._steps) == len(self._rows) else sorted(self._rows)
        self._retry()

    def _retry(self) -> None:
        waiting, self._waiting = self._waiting, []
        for generation, event in waiting:
            known = self._generations.get(event.worker) if generation is None else generation
            self._report(known, event)

    def _report(self, generation: int | None, event: Metrics) -> None:
        if generation is None or generation > (self._order[-1] if self._order else 0):
            self._waiting.append((generation, event))
            return
        later = self._order[bisect_right(self._order, generation) :]
        if later and event.step > min(self._begins[one] for one in later):
            return
        row = self._rows.get(event.step)
        if row is None:
            self._rows[event.step] = _Row(generation, event.t_ns, dict(event.values))
            if self._steps and event.step < self._steps[-1]:
                insort(self._steps, event.step)
                self._change(event.step)
            else:
                self._steps.append(event.step)
            return
        for name, value in event.values.items():
            known = row.values.get(name)
            if known is not None and (math.isnan(value) or generation < row.generation):
                continue  # lost with a worker, or undone
            if known is None or known != value:
                row.values[name] = value
                self._change(event.step)
        row.generation = max(row.generation, generation)

    def _change(self, step: int) -> None:
        self.changed = step if self.changed is None else min(self.changed, step)


class CourseDigest:
    """Digest of points in order of steps, to which points are added."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, point: MetricPoint) -> None:
        """Add the next point."""
        for name, value in sorted(point.values.items()):
            packed = struct.pack("<qd", point.step, value) + name.encode() + b"\0"
            self._digest.update(packed)

    def text(self) -> str:
        """Return the digest of the points so far."""
        return self._digest.hexdigest()
