"""Metrics of the course of a run that counts: each step once, after rollbacks and resumes.

A generation that begins at step s undoes all later steps of earlier generations. A metric belongs
to the generation of the phase before it in its worker's own events; clocks are not compared.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

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


class _Report(NamedTuple):
    generation: int
    event: Metrics


def metric_points(events: Iterable[AnyEvent], rank: int = 0) -> list[MetricPoint]:
    """Return the metrics of a rank by step, without undone ones. `events`: of all workers, in each
    worker's order. The last step of a run without an end is not complete yet, and omitted."""
    generations: dict[str, int] = {}  # newest of each worker
    begins: dict[int, int] = {}  # step at which a generation begins
    reports: list[_Report] = []
    resumed_step, is_ended = 0, False
    for event in events:
        if isinstance(event, PhaseDone):
            generations[event.worker] = event.generation
        elif isinstance(event, WorkerSeated):
            generations.setdefault(event.worker, event.generation)
        elif isinstance(event, Metrics):
            if event.seat == rank:
                reports.append(_Report(generations.get(event.worker, 0), event))
        elif isinstance(event, RunStarted):
            resumed_step, is_ended = max(0, event.resumed_step), False
        elif isinstance(event, Decided):
            if event.rung != "stop":
                begins[event.generation] = event.step
        elif isinstance(event, GenerationOpened):
            begins.setdefault(event.generation, resumed_step)
        elif isinstance(event, RunEnded):
            is_ended = True
    points = _merge(reports, begins)
    return points if is_ended else points[:-1]


def _merge(reports: list[_Report], begins: dict[int, int]) -> list[MetricPoint]:
    order = sorted(begins)
    earliest = [begins[generation] for generation in order]  # of this and all later generations
    for index in range(len(earliest) - 2, -1, -1):
        earliest[index] = min(earliest[index], earliest[index + 1])
    points: dict[int, MetricPoint] = {}
    for generation, event in sorted(reports, key=lambda report: report.generation):
        later = bisect_right(order, generation)
        if later < len(order) and event.step > earliest[later]:
            continue
        known = points.setdefault(event.step, MetricPoint(event.step, event.t_ns, {}))
        for name, value in event.values.items():
            if not (math.isnan(value) and name in known.values):  # lost with a worker
                known.values[name] = value
    return [points[step] for step in sorted(points)]
