"""Event-driven scheduler: whole nodes, three QOS, preemption, failures, repairs.

The job of QOS high that waited longest starts first and may preempt jobs of lower QOS that ran for
two hours; the others start, large before small, as soon as enough nodes are idle and no job of QOS
high waits. A job whose node fails, and a preempted job, is requeued under the same number.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from outlast.fleet.synth.cluster_shapes import GPUS, ClusterShape, FailureProcess
from outlast.fleet.synth.synthetic_jobs import (
    CODE,
    HIGH,
    LOW,
    SHORTEST_S,
    NodeAbsence,
    NodeFailure,
    ScheduledAttempt,
    SchedulerResult,
    SyntheticJob,
    draw_absence,
)

REQUEUE_S = 121.0  # until a job that was requeued may start again, as in Slurm
TELL_EVERY = 20_000
_ARRIVAL, _END, _OLD, _BACK, _DRAIN, _READY = range(6)
_PREEMPTED, _NODE_FAIL, _FAILED = CODE["PREEMPTED"], CODE["NODE_FAIL"], CODE["FAILED"]
_RUNNING, _REQUEUED, _COMPLETED = CODE["RUNNING"], CODE["REQUEUED"], CODE["COMPLETED"]


class Scheduler:
    """Scheduler of `jobs`, which are sorted by submit time; nodes are numbered from 0 on."""

    def __init__(
        self,
        shape: ClusterShape,
        jobs: list[SyntheticJob],
        pace: FailureProcess,
        lemons: dict[int, float],
        seed: int,
    ) -> None:
        self._shape = shape
        self._jobs = jobs
        self._pace = pace
        self._rng = random.Random(seed)
        plain = [rate for node, rate in enumerate(pace.rates.tolist()) if node not in lemons]
        self._plain_rate = plain[0] if plain else 0.0
        self._extra = {node: float(pace.rates[node]) - self._plain_rate for node in lemons}
        order = list(range(shape.nodes))
        self._rng.shuffle(order)
        self._idle: deque[int] = deque(order)
        self._leaving: dict[int, int] = {}  # nodes that go down after their job, by cause
        self._away: set[int] = set()
        self._events: list[tuple[float, int, int, object]] = []
        self._sequence = 0
        self._serial = 0
        self._high: deque[SyntheticJob] = deque()
        self._others: dict[int, deque[SyntheticJob]] = {}
        self._waiting = 0
        self._old: list[ScheduledAttempt] = []  # can be preempted
        self._old_nodes = 0
        self._running: dict[int, ScheduledAttempt] = {}
        self._rows = array("d")
        self._held_nodes = array("i")
        self._failures: list[NodeFailure] = []
        self._absences: list[NodeAbsence] = []
        self._looping: list[tuple[int, int]] = []

    def run(
        self,
        since_s: float,
        until_s: float,
        drains: list[tuple[float, int, int]],
        report: Callable[[float], None] = lambda _: None,
    ) -> SchedulerResult:
        """Run from `since_s` to `until_s`.

        `drains`: time, node and cause of each drain. `report` is called with the share done.
        """
        for t_s, node, cause in drains:
            self._push(t_s, _DRAIN, (node, cause))
        for lanes, count in shared_nodes(self._shape):
            for _ in range(count):
                self._share(since_s, lanes)
        self._fill(since_s)
        arrivals, following = self._jobs, 0
        users = len(arrivals)
        while True:
            arrives_s = arrivals[following].submit_s if following < users else until_s
            if self._events and self._events[0][0] <= arrives_s:
                t_s, _, kind, thing = heappop(self._events)
            else:
                t_s, kind, thing = arrives_s, _ARRIVAL, None
            if t_s >= until_s:
                break
            if kind == _ARRIVAL:
                thing = arrivals[following]
                following += 1
                if not following % TELL_EVERY:
                    report((t_s - since_s) / (until_s - since_s))
            self._handle(t_s, kind, thing)
        for attempt in self._running.values():
            if attempt.start_s < until_s:  # else it had not started yet
                attempt.end_s, attempt.state = until_s, _RUNNING
                self._write(attempt, -1)
        rows = np.frombuffer(self._rows, float).reshape(-1, 11)
        return SchedulerResult(
            self._jobs,
            rows,
            np.frombuffer(self._held_nodes, np.int32),
            self._failures,
            self._absences,
            self._looping,
        )

    def _handle(self, t_s: float, kind: int, thing: object) -> None:
        if isinstance(thing, ScheduledAttempt):
            if thing.over:
                return
            if kind == _OLD:
                thing.place = len(self._old)
                self._old.append(thing)
                self._old_nodes += len(thing.nodes)
                if not self._high:
                    return
            else:
                self._end(thing, t_s)
        elif isinstance(thing, SyntheticJob):
            self._wait(thing)
        elif kind == _BACK:
            assert isinstance(thing, int)
            self._away.discard(thing)
            self._idle.append(thing)
        elif isinstance(thing, tuple):
            self._drain(t_s, *thing)
        if self._waiting:
            self._fill(t_s)

    def _push(self, t_s: float, kind: int, thing: object) -> None:
        self._sequence += 1
        heappush(self._events, (t_s, self._sequence, kind, thing))

    def _wait(self, job: SyntheticJob) -> None:
        self._waiting += 1
        if job.qos == HIGH:
            self._high.append(job)
        else:
            if job.size not in self._others:
                self._others[job.size] = deque()
                self._others = dict(sorted(self._others.items(), reverse=True))
            queue = self._others[job.size]
            (queue.appendleft if job.lanes else queue.append)(job)

    def _share(self, t_s: float, lanes: int) -> None:
        """Request a node to be shared by jobs of `lanes` GPUs."""
        life_s = 4 * 3600 + self._rng.expovariate(1 / (20 * 3600))
        job = SyntheticJob(-1, t_s, 1, life_s, LOW, _COMPLETED)
        job.lanes = lanes
        self._wait(job)

    def _fill(self, t_s: float) -> None:
        """Start all jobs that can start."""
        while self._high:
            if not self._place(self._high[0], t_s):
                return
            self._high.popleft()
            self._waiting -= 1
        for size, queue in self._others.items():
            while queue and len(self._idle) >= size + len(queue[0].excluded):
                job = queue.popleft()
                self._waiting -= 1
                self._start(job, t_s, self._take(size, job.excluded))

    def _take(self, count: int, excluded: frozenset[int]) -> list[int]:
        """Take idle nodes, of which there are enough."""
        idle = self._idle
        if not excluded:
            return [idle.popleft() for _ in range(count)]
        taken: list[int] = []
        passed: list[int] = []
        while len(taken) < count:
            node = idle.popleft()
            (passed if node in excluded else taken).append(node)
        idle.extend(passed)
        return taken

    def _place(self, job: SyntheticJob, t_s: float) -> bool:
        """Start a job of QOS high on idle and preempted nodes; return whether it could start."""
        idle = max(0, len(self._idle) - len(job.excluded))  # at least so many
        lower = self._old_nodes - len(self._leaving) - len(job.excluded)  # at least so many
        if job.size - idle > max(0, lower):
            return False
        share = self._shape.preempt_share
        wanted = round(self._rng.gauss(job.size * share, (job.size * share * (1 - share)) ** 0.5))
        wanted = max(min(wanted, lower, job.size), job.size - idle, 0)
        nodes: list[int] = []
        serial = self._serial
        while len(nodes) < wanted:
            pair = self._rng.choice(self._old), self._rng.choice(self._old)
            victim = min(pair, key=lambda job: len(job.nodes))  # small jobs are preempted first
            for node in self._preempt(victim, t_s, serial):
                fits = len(nodes) < wanted and node not in job.excluded
                (nodes if fits else self._idle).append(node)
        nodes += self._take(job.size - len(nodes), job.excluded)
        self._start(job, t_s + self._rng.randint(5, 30) if wanted > 0 else t_s, nodes)
        return True

    def _preempt(self, victim: ScheduledAttempt, t_s: float, by: int) -> list[int]:
        """Preempt an attempt; return its nodes without those that go down."""
        victim.by, victim.end_s, victim.state, victim.failing = by, t_s, _PREEMPTED, False
        nodes = [node for node in victim.nodes if node not in self._leaving]
        self._close(victim, -1)
        self._again(victim, t_s)
        for node in victim.nodes:
            if node in self._leaving:
                self._absent(node, t_s, self._leaving.pop(node))
        return nodes

    def _start(self, job: SyntheticJob, t_s: float, nodes: list[int]) -> None:
        shape, rng = self._shape, self._rng
        attempt = ScheduledAttempt(self._serial, job, t_s, nodes)
        self._serial += 1
        self._running[attempt.serial] = attempt
        if job.lanes:
            runs_s, state = job.left_s, _COMPLETED
        elif job.loops:
            runs_s, state = rng.uniform(300.0, 2400.0), _FAILED
        elif job.requeues:
            runs_s, state = max(SHORTEST_S, job.left_s * rng.random()), _REQUEUED
        else:
            runs_s, state = job.left_s, job.outcome
        if not job.lanes:
            runs_s += shape.restart_s
        if runs_s > shape.limit_s:
            runs_s, state = shape.limit_s, CODE["TIMEOUT"]
        job.attempts += 1
        rate = self._plain_rate * len(nodes)
        if not self._extra.keys().isdisjoint(nodes):
            rate += sum(self._extra.get(node, 0.0) for node in nodes)
        end_s = t_s + max(SHORTEST_S, round(runs_s))
        if rate:
            fails_s = self._pace.when(self._pace.age(t_s) + rng.expovariate(rate))
            if fails_s < end_s:
                attempt.failing, end_s = True, max(t_s + 1, float(round(fails_s)))
        attempt.end_s, attempt.state = end_s, state
        self._push(end_s, _END, attempt)
        if job.qos != HIGH and end_s > t_s + shape.protected_s:
            self._push(t_s + shape.protected_s, _OLD, attempt)

    def _end(self, attempt: ScheduledAttempt, t_s: float) -> None:
        """End an attempt, by itself or by a node failure."""
        job, failure = attempt.job, -1
        if attempt.failing:
            failure = len(self._failures)
            self._fail(attempt, t_s)
        self._close(attempt, failure)
        for node in attempt.nodes:
            if node in self._leaving:
                self._absent(node, t_s, self._leaving.pop(node))
            else:
                self._idle.append(node)
        if job.lanes:
            self._share(t_s, job.lanes)
        elif attempt.failing:
            if job.qos == HIGH and self._rng.random() < self._shape.loop_share:
                job.loops = 1 + int(self._rng.expovariate(1 / self._shape.loop_length))
                self._looping.append((job.number, failure))
            new = attempt.state == _FAILED and self._rng.random() < self._shape.resubmit_share
            self._again(attempt, t_s, self._failures[-1].node if new else None)
        elif job.loops:
            job.loops -= 1
            self._again(attempt, t_s)
        elif job.requeues:
            job.requeues = 0
            self._again(attempt, t_s)

    def _fail(self, attempt: ScheduledAttempt, t_s: float) -> None:
        node = self._culprit(attempt.nodes)
        cause = self._pace.cause(t_s, self._rng)
        check = self._shape.causes[cause].check
        down = not check or self._rng.random() < self._shape.node_fail_share
        attempt.state = _NODE_FAIL if down else _FAILED
        self._failures.append(NodeFailure(t_s, node, cause, attempt.serial, attempt.state))
        self._leaving[node] = cause

    def _culprit(self, nodes: list[int]) -> int:
        """Draw one of the nodes, by their rates."""
        plain = self._plain_rate * len(nodes)
        bad = [node for node in nodes if node in self._extra]
        drawn = self._rng.random() * (plain + sum(self._extra[node] for node in bad))
        if drawn < plain or not bad:
            return nodes[min(int(drawn / plain * len(nodes)), len(nodes) - 1)]
        drawn -= plain
        for node in bad:
            drawn -= self._extra[node]
            if drawn < 0:
                return node
        return bad[-1]

    def _again(self, attempt: ScheduledAttempt, t_s: float, without: int | None = None) -> None:
        """Requeue the attempt's job from its last checkpoint.

        With `without`, its user resubmits it under another number and excludes that node.
        """
        job, shape = attempt.job, self._shape
        if job.lanes:
            self._share(t_s, job.lanes)
            return
        worked_s = t_s - attempt.start_s - shape.restart_s
        saved_s = max(0.0, worked_s // shape.checkpoint_s) * shape.checkpoint_s
        job.left_s = max(SHORTEST_S, job.left_s - saved_s)
        if without is None:
            job.submit_s = t_s
            self._push(t_s + REQUEUE_S, _READY, job)
            return
        submit_s = t_s + self._rng.randint(60, 900)
        new = SyntheticJob(len(self._jobs), submit_s, job.size, job.left_s, job.qos, job.outcome)
        new.run, new.loops, new.excluded = job.run, job.loops, job.excluded | {without}
        self._jobs.append(new)
        self._push(submit_s, _READY, new)

    def _close(self, attempt: ScheduledAttempt, failure: int) -> None:
        attempt.over = True
        del self._running[attempt.serial]
        if attempt.place >= 0:  # no longer among those that may be preempted
            last = self._old.pop()
            if last is not attempt:
                self._old[attempt.place] = last
                last.place = attempt.place
            self._old_nodes -= len(attempt.nodes)
        self._write(attempt, failure)

    def _write(self, attempt: ScheduledAttempt, failure: int) -> None:
        job = attempt.job
        self._rows.extend(
            (
                attempt.serial,
                job.number,
                attempt.submit_s,
                attempt.start_s,
                attempt.end_s,
                attempt.state,
                failure,
                attempt.by,
                job.lanes,
                len(self._held_nodes),
                len(attempt.nodes),
            )
        )
        self._held_nodes.extend(attempt.nodes)

    def _drain(self, t_s: float, node: int, cause: int) -> None:
        if node in self._away or node in self._leaving:
            return
        if node in self._idle:
            self._idle.remove(node)
            self._absent(node, t_s, cause)
        else:
            self._leaving[node] = cause

    def _absent(self, node: int, t_s: float, cause: int) -> None:
        found = draw_absence(node, t_s, cause, self._rng)
        self._absences.append(found)
        self._away.add(node)
        self._push(found.until_s, _BACK, node)


def shared_nodes(shape: ClusterShape) -> list[tuple[int, int]]:
    """Return the number of shared nodes for each size of small jobs, in GPUs."""
    nodes_by_gpus = {
        size.gpus: size.gpu_time * shape.utilization * shape.nodes / 0.75
        for size in shape.sizes
        if size.gpus < GPUS
    }
    return [(gpus, max(1, round(nodes))) for gpus, nodes in nodes_by_gpus.items()]
