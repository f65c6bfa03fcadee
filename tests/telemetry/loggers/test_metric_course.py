"""Course of metrics that counts, over rollbacks, resumes and lost workers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.events import AnyEvent, Metrics, PhaseDone
from outlast.telemetry.event_store import read_events
from outlast.telemetry.loggers.metric_course import MetricCourse, MetricPoint


def metric_points(events: Iterable[AnyEvent], rank: int = 0) -> list[MetricPoint]:
    course = MetricCourse(rank)
    for event in events:
        course.take(event)
    return list(course.points())


def losses(run: SyntheticRun, rank: int = 0) -> dict[int, float]:
    points = metric_points(read_events(run.run_dir), rank)
    assert len({point.step for point in points}) == len(points)
    return {point.step: point.values["loss"] for point in points}


def report(run: SyntheticRun, step: int, value: float, **more: float) -> None:
    worker, values = run.seats[0], {"loss": value, **more}
    run.write(worker, Metrics(t_ns=run.t_ns, worker=worker, seat=0, step=step, values=values))


def test_each_step_is_there_once_over_a_restart_and_a_resume(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, world=2, spares=1)
    run.start().phase(loss=1).phase(loss=2).phase(loss=3)
    run.broken(0, run.fault("killed", 0)).restart(n=1, step=1).phase(loss=20)
    run.end("interrupted", 4)
    assert losses(run) == {1: 1, 2: 20}  # step 3 was lost, and not redone
    run.start(resumed_n=1, resumed_step=1).phase(loss=200).phase(loss=300).end()
    assert losses(run) == losses(run, 1) == {1: 1, 2: 200, 3: 300}


def test_clocks_of_hosts_are_not_compared(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, world=2, spares=1)
    run.start().phase(loss=1).phase(loss=2)
    run.broken(0, run.fault("killed", 0)).restart(n=1, step=1)
    run.t_ns -= 2_000_000_000  # the redone step comes from a host that is behind
    run.phase(loss=20)
    run.t_ns += 2_000_000_000
    run.end()
    assert losses(run) == {1: 1, 2: 20}


def test_a_rank_keeps_its_metrics_under_another_worker(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, world=2, spares=1)
    run.start().phase(loss=1).killed(0)
    report(run, 1, math.nan)  # the new worker repeats what was lost with the other one
    report(run, 1, math.nan, late=5.0)
    run.phase(loss=2).end()
    points = metric_points(read_events(tmp_path))
    assert [point.values for point in points] == [{"loss": 1, "late": 5}, {"loss": 2}]


def test_the_last_step_of_a_run_without_an_end_waits(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, world=2, spares=1)
    run.start().phase(loss=1).phase(loss=2)
    run.close()
    assert losses(run) == {1: 1}


@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_writers_that_are_read_late_change_nothing(random: Random) -> None:
    with TemporaryDirectory() as folder:
        run = SyntheticRun(Path(folder), world=2, spares=1)
        run.start().phase(loss=1).phase(loss=2).killed(0)
        report(run, 2, math.nan)
        run.phase(loss=3).broken(0, run.fault("killed", 0)).restart(n=1, step=1).phase(loss=20)
        run.phase(loss=30).phase(loss=40).end("interrupted", 4)
        run.start(resumed_n=3, resumed_step=3).phase(loss=400).end()
        events = read_events(run.run_dir)
    writers = dict[str, list[AnyEvent]]()
    for event in events:
        own = isinstance(event, PhaseDone | Metrics)
        writers.setdefault(event.worker if own else "", []).append(event)
    course, queues = MetricCourse(), [deque(each) for each in writers.values()]
    while queues := [queue for queue in queues if queue]:
        course.take(random.choice(queues).popleft())
    assert list(course.points()) == metric_points(events)
    assert {point.step: point.values["loss"] for point in course.points()} == {
        1: 1, 2: 20, 3: 30, 4: 400,
    }  # fmt: skip
