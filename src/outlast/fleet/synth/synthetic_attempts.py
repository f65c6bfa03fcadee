"""Attempts of whole-node jobs and of jobs smaller than a node, in one set of columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outlast.fleet.synth.cluster_shapes import GPUS, ClusterShape
from outlast.fleet.synth.scheduler import REQUEUE_S
from outlast.fleet.synth.synthetic_jobs import CODE, LOW, SchedulerResult, mean_s, outcomes, works_s

_CUT = 1.3  # factor on the mean length, for jobs cut by the end of their shared node
_FULL = 0.85  # used share of a lane's time
_DEEP = 64  # jobs in a lane at most
_CHUNK = 20_000  # lanes at a time
_WAIT_S = 300.0  # in the queue, the mean
_REQUEUED = CODE["REQUEUED"]
_RUNNING = CODE["RUNNING"]
_PREEMPTED = CODE["PREEMPTED"]
_NODE_FAIL = CODE["NODE_FAIL"]
_COMPLETED = CODE["COMPLETED"]


class SmallJobs(NamedTuple):
    """Attempts of small jobs.

    `job` counts from 0 on, `row` is the shared node's in `SchedulerResult`.
    """

    job: np.ndarray
    submit_s: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    state: np.ndarray
    row: np.ndarray
    struck: np.ndarray  # whether the node failed, or was taken, under it
    gpus: np.ndarray


def small_jobs(shape: ClusterShape, ran: SchedulerResult, rng: np.random.Generator) -> SmallJobs:
    """Return all attempts of small jobs, by width, then by lane."""
    none = np.zeros(0)
    parts = [
        SmallJobs(
            none.astype(int),
            none,
            none,
            none,
            none.astype(int),
            none.astype(int),
            none.astype(bool),
            none.astype(int),
        )
    ]
    jobs = 0
    for size in shape.sizes:
        if size.gpus >= GPUS:
            continue
        rows = np.flatnonzero(ran.rows[:, 8] == size.gpus)
        rows = rows[np.argsort(ran.rows[rows, 3], kind="stable")]
        lanes = np.repeat(rows, GPUS // size.gpus)
        mean = mean_s(shape, size)
        chunks = [
            _fill_lanes(shape, ran, lanes[first : first + _CHUNK], _CUT * mean, rng)
            for first in range(0, len(lanes), _CHUNK)
        ]
        start_s, end_s, state, row, struck = (
            np.concatenate(columns) for columns in zip(*chunks, strict=True)
        )
        part = _link_restarts(start_s, end_s, state, row, struck, size.gpus, rng)
        parts.append(part._replace(job=part.job + jobs))
        jobs += len(part.job)
    return SmallJobs(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _fill_lanes(
    shape: ClusterShape,
    ran: SchedulerResult,
    lanes: np.ndarray,
    mean: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray, ...]:
    """Return start, end, state, row, and whether it was struck, of the jobs in these lanes."""
    rows = ran.rows[lanes]
    count = len(lanes) * _DEEP
    works = works_s(shape, mean, count, rng).reshape(-1, _DEEP)
    gaps = rng.exponential(mean * (1 - _FULL) / _FULL, (len(lanes), _DEEP))
    again = rng.random((len(lanes), _DEEP)) < shape.requeued
    works = np.where(again, works * rng.random(works.shape), works)
    works = np.ceil(works)
    gaps = np.ceil(gaps)
    ends = rows[:, 3:4] + np.cumsum(works + gaps, axis=1)
    starts = ends - works
    states = np.where(again, _REQUEUED, outcomes(shape, count, rng).reshape(-1, _DEEP))
    node_end = rows[:, 4:5]
    node_state = rows[:, 5:6]
    late = starts > node_end - shape.protected_s
    cut = ends >= node_end
    valid = starts < node_end
    valid &= ~(cut & late & (node_state == _PREEMPTED))
    struck = valid & cut & (node_state != _COMPLETED)
    states = np.where(struck, node_state.astype(int), states)
    rows_of = np.broadcast_to(lanes[:, None], starts.shape)
    ends = np.minimum(ends, node_end)
    return starts[valid], ends[valid], states[valid], rows_of[valid], struck[valid]


def _link_restarts(
    start_s: np.ndarray,
    end_s: np.ndarray,
    state: np.ndarray,
    row: np.ndarray,
    struck: np.ndarray,
    gpus: int,
    rng: np.random.Generator,
) -> SmallJobs:
    """Return attempts of one width, with restarts linked to the attempts that they continue."""
    order = np.argsort(start_s, kind="stable")
    start_s, end_s, state, row, struck = (
        each[order] for each in (start_s, end_s, state, row, struck)
    )
    count = len(start_s)
    ended = np.flatnonzero((struck & (state != _RUNNING)) | (state == _REQUEUED))
    ended = ended[np.argsort(end_s[ended], kind="stable")]
    ready_s = end_s[ended] + REQUEUE_S + np.ceil(rng.exponential(_WAIT_S, len(ended)))
    counted = np.arange(len(ended))
    following = np.searchsorted(start_s, ready_s)
    following = np.maximum.accumulate(following - counted) + counted  # each gets one of its own
    ended = ended[following < count]
    following = following[following < count]
    job = np.arange(count)
    job[following] = ended
    while True:  # until each points at its first attempt
        further = job[job]
        if np.array_equal(further, job):
            break
        job = further
    submit_s = start_s - np.ceil(rng.exponential(_WAIT_S, count))
    submit_s[following] = end_s[ended]
    return SmallJobs(job, submit_s, start_s, end_s, state, row, struck, np.full(count, gpus))


class Attempts(NamedTuple):
    """Attempts by start time. Seconds count from the window's begin."""

    job: np.ndarray  # from 0 on, by the first submit time
    attempt: np.ndarray  # from 0 on, among those in the table
    restarts: np.ndarray  # as the scheduler counts them, from the job's first on
    submit_s: np.ndarray
    eligible_s: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    state: np.ndarray  # code of JOB_STATES
    failure: np.ndarray  # index in SchedulerResult.failures; -1
    by: np.ndarray  # the attempt (a row here) that preempted it; -1
    gpus: np.ndarray
    nodes: np.ndarray
    first: np.ndarray  # of its nodes, in SchedulerResult.held_nodes
    qos: np.ndarray
    large: np.ndarray  # number of its job in SchedulerResult.jobs; -1: a small one
    run: np.ndarray  # the first job of its run, which may continue under other numbers


def attempts(ran: SchedulerResult, small: SmallJobs) -> Attempts:
    """Return all attempts, warm-up included."""
    rows = ran.rows
    whole_nodes = rows[rows[:, 8] == 0]
    numbers = whole_nodes[:, 1].astype(int)
    serial = rows[:, 0].astype(int)
    under = rows[small.row]  # the shared nodes' rows
    struck = small.struck
    qos_of = np.array([job.qos for job in ran.jobs] or [0])
    zeros = np.zeros(len(small.job), int)
    failed = struck & (small.state != CODE["PREEMPTED"]) & (small.state != CODE["RUNNING"])
    pairs = (
        (numbers, small.job + len(ran.jobs)),
        (whole_nodes[:, 2], small.submit_s),
        (whole_nodes[:, 3], small.start_s),
        (whole_nodes[:, 4], small.end_s),
        (whole_nodes[:, 5], small.state),
        (whole_nodes[:, 6], np.where(failed, under[:, 6], -1)),
        (whole_nodes[:, 7], np.where(struck & (small.state == CODE["PREEMPTED"]), under[:, 7], -1)),
        (whole_nodes[:, 10] * GPUS, small.gpus),
        (whole_nodes[:, 10], zeros + 1),
        (whole_nodes[:, 9], under[:, 9]),
        (qos_of[numbers], zeros + LOW),
        (numbers, zeros - 1),
    )
    columns = [np.concatenate(pair) for pair in pairs]
    order = np.lexsort((columns[0], columns[2]))
    job, submit_s, start_s, end_s, state, failure, by, gpus, nodes, first, qos, large = (
        each[order] for each in columns
    )
    attempt = _attempt_numbers(job)
    job = _by_submit(job, submit_s)
    eligible_s = np.where(attempt > 0, submit_s + REQUEUE_S, submit_s)
    at = np.full(int(serial.max(initial=-1)) + 2, -1)
    merged_serial = np.concatenate((whole_nodes[:, 0].astype(int), zeros - 1))[order]
    large_rows = np.flatnonzero(merged_serial >= 0)
    at[merged_serial[large_rows]] = large_rows
    return Attempts(
        job,
        attempt,
        attempt,
        submit_s,
        eligible_s,
        start_s,
        end_s,
        state.astype(int),
        failure.astype(int),
        at[by.astype(int)],
        gpus.astype(int),
        nodes.astype(int),
        first.astype(int),
        qos.astype(int),
        large.astype(int),
        _runs(job, large.astype(int), ran),
    )


def clip_attempts(found: Attempts, ran: SchedulerResult, since_s: float) -> Attempts:
    """Return the attempts that ended after `since_s`, renumbered."""
    rows = np.flatnonzero(found.end_s > since_s)
    at = np.full(len(found.job) + 1, -1)
    at[rows] = np.arange(len(rows))
    less = Attempts(*(column[rows] for column in found))
    numbers = np.unique(less.job, return_inverse=True)[1]
    run = _runs(numbers, less.large, ran)
    return less._replace(job=numbers, attempt=_attempt_numbers(numbers), by=at[less.by], run=run)


def _runs(job: np.ndarray, large: np.ndarray, ran: SchedulerResult) -> np.ndarray:
    roots = np.array([job.run for job in ran.jobs] or [0])
    run = roots[large]
    first = np.full(len(roots), np.iinfo(np.int64).max)
    np.minimum.at(first, run[large >= 0], job[large >= 0])
    return np.where(large >= 0, first[run], job)


def _attempt_numbers(job: np.ndarray) -> np.ndarray:
    """Return each attempt's number within its job; rows are sorted by start time."""
    order = np.argsort(job, kind="stable")
    sorted_jobs = job[order]
    firsts = np.flatnonzero(np.r_[True, sorted_jobs[1:] != sorted_jobs[:-1]])
    counts = np.diff(np.r_[firsts, len(job)])
    counted = np.empty(len(job), int)
    counted[order] = np.arange(len(job)) - np.repeat(firsts, counts)
    return counted


def _by_submit(job: np.ndarray, submit_s: np.ndarray) -> np.ndarray:
    """Renumber jobs from 0 on, by their first submit time."""
    unique, inverse = np.unique(job, return_inverse=True)
    first_s = np.full(len(unique), np.inf)
    np.minimum.at(first_s, inverse, submit_s)
    rank = np.empty(len(unique), int)
    rank[np.argsort(first_s, kind="stable")] = np.arange(len(unique))
    return rank[inverse]
