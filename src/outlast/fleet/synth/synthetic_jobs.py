"""Synthetic jobs, and the scheduler's results: attempts, failures, outages of nodes."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from outlast.fleet.synth.cluster_shapes import GPUS, ClusterShape, JobSize
from outlast.log_records import JOB_STATES, LEMON_PARTS, JobState

CODE: dict[JobState, int] = {state: code for code, state in enumerate(JOB_STATES)}
LOW, NORMAL, HIGH = range(3)
QOS = ("low", "normal", "high")
_BY_HOUR = np.array([2.0] * 8 + [5, 7, 8, 8, 7, 8, 8, 8, 7, 6, 5, 4, 4, 3, 3, 2])
SHORTEST_S = 10.0


class SyntheticJob:
    """Job of whole nodes, or (`lanes` GPUs wide) a node shared by smaller jobs."""

    __slots__ = (
        "attempts",
        "excluded",
        "lanes",
        "left_s",
        "loops",
        "number",
        "outcome",
        "qos",
        "requeues",
        "run",
        "size",
        "submit_s",
    )

    def __init__(
        self, number: int, submit_s: float, size: int, left_s: float, qos: int, outcome: int
    ) -> None:
        self.number = number
        self.run = number  # the number of the first job of the same run
        self.submit_s = submit_s
        self.size = size  # nodes
        self.left_s = left_s  # of work
        self.qos = qos
        self.outcome = outcome  # a code of JOB_STATES
        self.requeues = 0  # remaining requests for a requeue
        self.loops = 0  # remaining attempts that crash soon after their start
        self.lanes = 0
        self.attempts = 0
        self.excluded: frozenset[int] = frozenset()


def mean_s(shape: ClusterShape, size: JobSize) -> float:
    """Return the mean working time of jobs of a size."""
    gpu_s_a_day = GPUS * shape.nodes * shape.utilization * 86400.0
    return gpu_s_a_day * size.gpu_time / (shape.jobs_a_day * size.jobs * size.gpus)


def works_s(shape: ClusterShape, mean: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw log-normal working times with a given mean, clipped to the cluster's limit.

    The scale is adjusted so that clipping keeps the mean.
    """
    sigma = shape.work_sigma
    normal = np.random.default_rng(0).standard_normal(20_000)
    scale = mean * np.exp(-(sigma**2) / 2)
    for _ in range(20):  # until the clipped mean matches
        cut = np.clip(scale * np.exp(sigma * normal), SHORTEST_S, shape.limit_s).mean()
        scale *= mean / cut
    drawn = scale * np.exp(sigma * rng.standard_normal(count))
    return np.clip(drawn, SHORTEST_S, shape.limit_s)


def arrivals_s(count: int, since_s: float, until_s: float, rng: np.random.Generator) -> np.ndarray:
    """Draw sorted submit times, more of them in working hours."""
    days = rng.integers(int(since_s // 86400), max(1, int(np.ceil(until_s / 86400))), count)
    hours = rng.choice(24, count, p=_BY_HOUR / _BY_HOUR.sum())
    drawn = np.floor(days * 86400.0 + hours * 3600.0 + rng.uniform(0, 3600.0, count))
    return np.sort(drawn[drawn < until_s])


def outcomes(shape: ClusterShape, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the states of last attempts, as codes of JOB_STATES."""
    chances: dict[JobState, float] = {
        "COMPLETED": shape.completed,
        "FAILED": shape.failed,
        "TIMEOUT": shape.timeout,
        "OUT_OF_MEMORY": shape.oom,
    }
    chances["CANCELLED"] = max(0.0, 1 - sum(chances.values()))
    codes = np.array([CODE[state] for state in chances])
    shares = np.array(list(chances.values()))
    return rng.choice(codes, count, p=shares / shares.sum())


def whole_node_jobs(
    shape: ClusterShape,
    since_s: float,
    until_s: float,
    lemons: dict[int, float],
    rng: np.random.Generator,
) -> list[SyntheticJob]:
    """Draw the jobs of a node and more, by submit time, numbered from 0."""
    parts: list[np.ndarray] = []
    for size in shape.sizes:
        if size.gpus < GPUS:
            continue
        expected = shape.jobs_a_day * size.jobs * (until_s - since_s) / 86400
        submit_s = arrivals_s(int(rng.poisson(expected)), since_s, until_s, rng)
        count = len(submit_s)
        high = rng.random(count) < size.high
        qos = np.where(high, HIGH, np.where(rng.random(count) < 0.4, LOW, NORMAL))
        part = np.stack(
            (
                submit_s,
                np.full(count, size.gpus // GPUS, float),
                works_s(shape, mean_s(shape, size), count, rng),
                qos,
                outcomes(shape, count, rng),
                rng.random(count) < shape.requeued,
                rng.random(count) < shape.excluding,
            )
        )
        parts.append(part)
    columns = np.concatenate([np.zeros((7, 0)), *parts], axis=1)
    order = np.argsort(columns[0], kind="stable")
    jobs = []
    for number, row in enumerate(columns.T[order].tolist()):
        submit_s, nodes, work_s, qos, outcome, again, excluding = row
        left_s = max(SHORTEST_S, work_s - shape.restart_s)
        job = SyntheticJob(number, submit_s, int(nodes), left_s, int(qos), int(outcome))
        job.requeues = int(again)
        if excluding:
            job.excluded = _excluded(shape, lemons, rng)
        jobs.append(job)
    return jobs


def _excluded(
    shape: ClusterShape, lemons: dict[int, float], rng: np.random.Generator
) -> frozenset[int]:
    """Draw one to three nodes to exclude: lemons or, with equal probability, any."""
    known = list(lemons) if lemons and rng.random() < 0.5 else range(shape.nodes)
    count = min(int(rng.integers(1, 4)), len(known))
    return frozenset(int(node) for node in rng.choice(known, count, replace=False))


# Cumulative shares; for the rest a part is replaced.
_REBOOTED = 0.6
_TICKET = 0.9


class NodeAbsence(NamedTuple):
    """Outage of a node. `part`: "" for a reboot, "?" for an inspection without a replacement."""

    node: int
    since_s: float
    until_s: float
    cause: int
    part: str


def draw_absence(node: int, since_s: float, cause: int, rng: random.Random) -> NodeAbsence:
    """Draw an outage, 0.38 days in the mean.

    20 to 60 minutes for a reboot, half a day with a ticket, two days for a replaced part.
    """
    drawn = rng.random()
    if drawn < _REBOOTED:
        away_s = rng.uniform(1200, 3600)
        part = ""
    elif drawn < _TICKET:
        away_s = 3600 + rng.expovariate(1 / (11 * 3600))
        part = "?"
    else:
        away_s = 6 * 3600 + rng.expovariate(1 / (42 * 3600))
        (part,) = rng.choices(list(LEMON_PARTS), list(LEMON_PARTS.values()))
    return NodeAbsence(node, since_s, since_s + round(away_s), cause, part)


class ScheduledAttempt:
    """One allocation of nodes to a job."""

    __slots__ = (
        "by",
        "end_s",
        "failing",
        "job",
        "nodes",
        "over",
        "place",
        "serial",
        "start_s",
        "state",
        "submit_s",
    )

    def __init__(self, serial: int, job: SyntheticJob, start_s: float, nodes: list[int]) -> None:
        self.serial = serial
        self.job = job
        self.submit_s = job.submit_s
        self.start_s = start_s
        self.nodes = nodes
        self.end_s = start_s
        self.state = CODE["COMPLETED"]
        self.failing = False
        self.by = -1  # serial of the attempt that preempted it
        self.place = -1  # among those that may be preempted
        self.over = False


class NodeFailure(NamedTuple):
    """Failure of a node under an attempt; `cause` is an index of the shape's causes."""

    t_s: float
    node: int
    cause: int
    attempt: int
    state: int


class SchedulerResult(NamedTuple):
    """Result of the scheduler.

    `rows`: serial, job, submit, start, end, state, failure (-1: none), preempted by (serial; -1:
    none), lanes, its first index in `held_nodes` and number of nodes. `looping`: jobs in a crash
    loop, by number, and the failure before it.
    """

    jobs: list[SyntheticJob]
    rows: np.ndarray
    held_nodes: np.ndarray
    failures: list[NodeFailure]
    absences: list[NodeAbsence]
    looping: list[tuple[int, int]]
