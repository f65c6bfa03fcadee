"""Attempts of large and small jobs alike, in one set of columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outlast.fleet.synth.ran import Ran
from outlast.fleet.synth.schedule import REQUEUE_S
from outlast.fleet.synth.shapes import GPUS
from outlast.fleet.synth.shared import Small
from outlast.fleet.synth.workload import CODE, LOW


class Attempts(NamedTuple):
    """By start time. Seconds count from the window's begin."""

    job: np.ndarray  # from 0 on, by the first submit time
    attempt: np.ndarray  # from 0 on, of those that are told
    restarts: np.ndarray  # as the scheduler counts them, from the job's first on
    submit_s: np.ndarray
    eligible_s: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    state: np.ndarray  # code of JOB_STATES
    failure: np.ndarray  # in Ran.failures, that ended it; -1
    by: np.ndarray  # the attempt (a row here) that preempted it; -1
    gpus: np.ndarray
    nodes: np.ndarray
    first: np.ndarray  # of its nodes, in Ran.held
    qos: np.ndarray
    large: np.ndarray  # number of its Job in Ran.jobs; -1: a small one
    run: np.ndarray  # the first job of its run: of what goes on under several numbers


def attempts(ran: Ran, small: Small) -> Attempts:
    """All that began, warm-up included."""
    rows = ran.rows
    whole = rows[rows[:, 8] == 0]
    numbers = whole[:, 1].astype(int)
    serial = rows[:, 0].astype(int)
    under = rows[small.row]  # the shared nodes' rows
    struck = small.struck
    qos_of = np.array([job.qos for job in ran.jobs] or [0])
    zeros = np.zeros(len(small.job), int)
    failed = struck & (small.state != CODE["PREEMPTED"]) & (small.state != CODE["RUNNING"])
    pairs = (
        (numbers, small.job + len(ran.jobs)),
        (whole[:, 2], small.submit_s),
        (whole[:, 3], small.start_s),
        (whole[:, 4], small.end_s),
        (whole[:, 5], small.state),
        (whole[:, 6], np.where(failed, under[:, 6], -1)),
        (whole[:, 7], np.where(struck & (small.state == CODE["PREEMPTED"]), under[:, 7], -1)),
        (whole[:, 10] * GPUS, small.gpus),
        (whole[:, 10], zeros + 1),
        (whole[:, 9], under[:, 9]),
        (qos_of[numbers], zeros + LOW),
        (numbers, zeros - 1),
    )
    columns = [np.concatenate(pair) for pair in pairs]
    order = np.lexsort((columns[0], columns[2]))
    job, submit_s, start_s, end_s, state, failure, by, gpus, nodes, first, qos, large = (
        each[order] for each in columns
    )
    attempt = _counted(job)
    job = _by_submit(job, submit_s)
    eligible_s = np.where(attempt > 0, submit_s + REQUEUE_S, submit_s)
    at = np.full(int(serial.max(initial=-1)) + 2, -1)
    merged_serial = np.concatenate((whole[:, 0].astype(int), zeros - 1))[order]
    large_rows = np.flatnonzero(merged_serial >= 0)
    at[merged_serial[large_rows]] = large_rows
    return Attempts(
        job, attempt, attempt, submit_s, eligible_s, start_s, end_s, state.astype(int),
        failure.astype(int), at[by.astype(int)], gpus.astype(int), nodes.astype(int),
        first.astype(int), qos.astype(int), large.astype(int), _runs(job, large.astype(int), ran),
    )  # fmt: skip


def within(found: Attempts, ran: Ran, since_s: float) -> Attempts:
    """Those that ended after that, counted anew."""
    kept = np.flatnonzero(found.end_s > since_s)
    at = np.full(len(found.job) + 1, -1)
    at[kept] = np.arange(len(kept))
    less = Attempts(*(column[kept] for column in found))
    numbers = np.unique(less.job, return_inverse=True)[1]
    run = _runs(numbers, less.large, ran)
    return less._replace(job=numbers, attempt=_counted(numbers), by=at[less.by], run=run)


def _runs(job: np.ndarray, large: np.ndarray, ran: Ran) -> np.ndarray:
    roots = np.array([job.run for job in ran.jobs] or [0])
    run = roots[large]
    first = np.full(len(roots), np.iinfo(np.int64).max)
    np.minimum.at(first, run[large >= 0], job[large >= 0])
    return np.where(large >= 0, first[run], job)


def _counted(job: np.ndarray) -> np.ndarray:
    """Which of its job's attempts each is; they are by start time."""
    order = np.argsort(job, kind="stable")
    sorted_jobs = job[order]
    firsts = np.flatnonzero(np.r_[True, sorted_jobs[1:] != sorted_jobs[:-1]])
    counts = np.diff(np.r_[firsts, len(job)])
    counted = np.empty(len(job), int)
    counted[order] = np.arange(len(job)) - np.repeat(firsts, counts)
    return counted


def _by_submit(job: np.ndarray, submit_s: np.ndarray) -> np.ndarray:
    """Numbers from 0 on, by when each was submitted first."""
    unique, inverse = np.unique(job, return_inverse=True)
    first_s = np.full(len(unique), np.inf)
    np.minimum.at(first_s, inverse, submit_s)
    rank = np.empty(len(unique), int)
    rank[np.argsort(first_s, kind="stable")] = np.arange(len(unique))
    return rank[inverse]
