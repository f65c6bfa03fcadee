"""Ground truth of a synthetic cluster, from its scheduler alone."""

from __future__ import annotations

import msgspec
import numpy as np

from outlast.fleet.synth.cluster_shapes import (
    DAY_S,
    GPUS,
    ClusterShape,
    ClusterWindow,
    FailureProcess,
)
from outlast.fleet.synth.synthetic_attempts import Attempts
from outlast.fleet.synth.synthetic_jobs import CODE, QOS, SchedulerResult
from outlast.fleet.synth.synthetic_tables import is_detected, job_number
from outlast.log_records import JOB_STATES

LONG_S = 86400.0  # shorter job runs are omitted


class TrueJobRun(msgspec.Struct, frozen=True):
    """A job over its attempts, under all its numbers.

    `wall_s`: since it could first start, as far as the table shows; `productive_s`: scheduled time
    without lost work: the time saved before each interruption and, in the last attempt, all after
    its start.
    """

    jobs: tuple[str, ...]
    gpus: int
    qos: str
    attempts: int
    wall_s: float
    scheduled_s: float
    productive_s: float
    ettr: float


class TrueCrashLoop(msgspec.Struct, frozen=True):
    """Job that crashed repeatedly after a hardware failure.

    `attempts` times, and the number of attempts of others that these preempted.
    """

    job: str
    gpus: int
    attempts: int
    preempted: int


def true_job_runs(shape: ClusterShape, attempts: Attempts) -> list[TrueJobRun]:
    """Return the runs of whole nodes that held them for a day or longer, in all."""
    (whole_nodes,) = np.nonzero(attempts.large >= 0)
    order = whole_nodes[np.lexsort((attempts.start_s[whole_nodes], attempts.run[whole_nodes]))]
    if not len(order):
        return []
    run = attempts.run[order]
    firsts = np.flatnonzero(np.r_[True, run[1:] != run[:-1]])
    lasts = np.r_[firsts[1:], len(order)] - 1
    held_s = attempts.end_s[order] - attempts.start_s[order]
    useful_s = np.maximum(0.0, held_s - shape.restart_s)
    kept_s = useful_s // shape.checkpoint_s * shape.checkpoint_s
    kept_s[lasts] = useful_s[lasts]
    scheduled = np.add.reduceat(held_s, firsts)
    productive = np.add.reduceat(kept_s, firsts)
    wall = attempts.end_s[order[lasts]] - attempts.eligible_s[order[firsts]]
    found = []
    for at in np.flatnonzero(scheduled >= LONG_S).tolist():
        rows = order[firsts[at] : lasts[at] + 1]
        jobs = tuple(map(job_number, np.unique(attempts.job[rows]).tolist()))
        job_run = TrueJobRun(
            jobs,
            int(attempts.gpus[rows[0]]),
            QOS[attempts.qos[rows[0]]],
            len(rows),
            float(wall[at]),
            float(scheduled[at]),
            float(productive[at]),
            float(productive[at] / wall[at]),
        )
        found.append(job_run)
    return found


def true_crash_loops(attempts: Attempts, ran: SchedulerResult) -> list[TrueCrashLoop]:
    """Return the crash loops, as far as they lie in the window."""
    found = []
    runs_of = np.array([*(job.run for job in ran.jobs), -1])[attempts.large]
    for number, failure in ran.looping:
        run = ran.jobs[number].run
        crashed = (
            (runs_of == run)
            & (attempts.start_s >= ran.failures[failure].t_s)
            & (attempts.state == CODE["FAILED"])
            & (attempts.failure < 0)
            & (attempts.end_s - attempts.start_s <= 3600)
        )
        (rows,) = np.nonzero(crashed)
        if len(rows):
            preempted = int(np.isin(attempts.by, rows).sum())
            job = job_number(int(attempts.job[rows[0]]))
            found.append(TrueCrashLoop(job, int(attempts.gpus[rows[0]]), len(rows), preempted))
    return found


LARGE_GPUS = 128  # r_f is of jobs above this
LOST_S = 1800.0  # of work per failure, with hourly checkpoints


class TrueFailure(msgspec.Struct, frozen=True):
    """Attempt that hardware ended.

    `detected`: a check has a finding of it; `counted`: the paper's definition includes it
    (`detected`, or its state is NODE_FAIL).
    """

    job: str
    attempt: int
    t_ns: int
    node: str
    cause: str  # a symptom
    state: str
    gpus: int
    detected: bool = msgspec.field(name="seen")
    counted: bool


class TrueCascade(msgspec.Struct, frozen=True):
    """Attempt that was preempted by one that restarted after a hardware failure."""

    job: str
    attempt: int
    by_job: str
    by_attempt: int


class GroundTruth(msgspec.Struct, frozen=True, kw_only=True):
    """Ground truth; rates are per node-day of running jobs unless noted.

    `r_f`: expectation for the actual exposure of jobs above 128 GPUs: the failures counted there
    are Poisson around `r_f` times `node_days`. `r_f_counted`: without the undetectable failures.
    """

    shape: str
    seed: int
    nodes: int
    days: float
    since_ns: int
    until_ns: int
    r_f: float
    r_f_counted: float
    r_f_asked: float  # the shape's
    node_days: float  # jobs above 128 GPUs
    failures_large: int
    failures_counted: int
    failures: int  # attempts of any size that hardware ended
    all_rate: float  # as r_f, of all nodes at work
    all_node_days: float
    causes_per_gpu_hour: dict[str, float]  # jobs of whole nodes; a symptom of the shape's causes
    lemons: dict[str, float]  # times `r_f_asked`
    plain_rate: float  # of a node that is no lemon
    first_order_gpu_hours: float
    second_order_gpu_hours: float
    second_order_share: float
    checkpoint_s: float  # with these two the work of `runs` went on
    restart_s: float
    ettr: float | None  # the mean of `runs` of QOS high
    failed: list[TrueFailure]
    cascades: list[TrueCascade]
    runs: list[TrueJobRun]
    loops: list[TrueCrashLoop]


def ground_truth(
    window: ClusterWindow,
    attempts: Attempts,
    ran: SchedulerResult,
    pace: FailureProcess,
    lemons: dict[int, float],
) -> GroundTruth:
    """Return the ground truth of the attempts in the table."""
    shape = window.shape
    struck = np.flatnonzero(attempts.failure >= 0)
    failed = [_true_failure(window, attempts, ran, int(row)) for row in struck]
    large = attempts.gpus > LARGE_GPUS
    expected, node_days = _exposure(attempts, ran, pace)
    hidden = _hidden_share(shape)
    lost = attempts.gpus * np.minimum(attempts.end_s - attempts.start_s, LOST_S) / 3600
    second = _second_order_rows(attempts)
    first_hours = float(lost[struck].sum())
    second_hours = float(lost[second].sum())
    long = true_job_runs(shape, attempts)
    high = [run.ettr for run in long if run.qos == "high"]
    counted = sum(run.counted and run.gpus > LARGE_GPUS for run in failed)
    all_days = float(node_days.sum() + _shared_days(ran))
    rate = float(expected[large].sum() / max(1e-9, node_days[large].sum()))
    gpu_hours = float(node_days.sum()) * 24 * GPUS
    return GroundTruth(
        shape=shape.name,
        seed=window.seed,
        nodes=shape.nodes,
        days=window.days,
        since_ns=window.since_ns,
        until_ns=window.until_ns,
        r_f=rate,
        r_f_counted=rate * (1 - hidden),
        r_f_asked=shape.r_f,
        node_days=float(node_days[large].sum()),
        failures_large=int(large[struck].sum()),
        failures_counted=counted,
        failures=len(failed),
        all_rate=float(expected.sum() / max(1e-9, node_days.sum())),
        all_node_days=all_days,
        causes_per_gpu_hour={
            cause.symptom: float(expected.sum() * cause.share / max(1e-9, gpu_hours))
            for cause in shape.causes
        },
        lemons={window.nodes[node]: factor for node, factor in lemons.items()},
        plain_rate=float(pace.rates.min() * DAY_S),
        first_order_gpu_hours=first_hours,
        second_order_gpu_hours=second_hours,
        second_order_share=second_hours / max(1e-9, first_hours + second_hours),
        checkpoint_s=shape.checkpoint_s,
        restart_s=shape.restart_s,
        ettr=sum(high) / len(high) if high else None,
        failed=failed,
        runs=long,
        loops=true_crash_loops(attempts, ran),
        cascades=[
            TrueCascade(
                job_number(int(attempts.job[row])),
                int(attempts.attempt[row]),
                job_number(int(attempts.job[attempts.by[row]])),
                int(attempts.attempt[attempts.by[row]]),
            )
            for row in second
        ],
    )


def _true_failure(
    window: ClusterWindow, attempts: Attempts, ran: SchedulerResult, row: int
) -> TrueFailure:
    failure = ran.failures[attempts.failure[row]]
    detected = is_detected(window.shape, window.days, failure.cause, failure.t_s)
    state = JOB_STATES[attempts.state[row]]
    return TrueFailure(
        job_number(int(attempts.job[row])),
        int(attempts.attempt[row]),
        window.since_ns + round(attempts.end_s[row]) * 10**9,
        window.nodes[failure.node],
        window.shape.causes[failure.cause].symptom,
        state,
        int(attempts.gpus[row]),
        detected,
        detected or state == "NODE_FAIL",
    )


def _exposure(
    attempts: Attempts, ran: SchedulerResult, pace: FailureProcess
) -> tuple[np.ndarray, np.ndarray]:
    """Return expected failures and node-days, by attempt of whole nodes (0 for others).

    Expected failures: the sum of the nodes' rates times the attempt's seconds at the mean pace.
    """
    # Exposure before the window is biased towards survivors, so it does not count.
    starts_s = np.maximum(attempts.start_s, 0.0)
    sums = np.r_[0.0, np.cumsum(pace.rates[ran.held_nodes])]
    whole_nodes = attempts.large >= 0
    rates = np.where(whole_nodes, sums[attempts.first + attempts.nodes] - sums[attempts.first], 0.0)
    times = np.concatenate((starts_s, attempts.end_s))
    ages = np.array([pace.age(t_s) for t_s in times.tolist()]).reshape(2, -1)
    node_days = np.where(whole_nodes, attempts.nodes * (attempts.end_s - starts_s) / DAY_S, 0.0)
    return rates * (ages[1] - ages[0]), node_days


def _shared_days(ran: SchedulerResult) -> float:
    """Return the node-days in the window of nodes that small jobs shared."""
    rows = ran.rows[(ran.rows[:, 8] > 0) & (ran.rows[:, 4] > 0)]
    return float((rows[:, 4] - np.maximum(rows[:, 3], 0)).sum() / DAY_S)


def _hidden_share(shape: ClusterShape) -> float:
    """Return the share of failures that end as FAILED before a check detects them."""
    since = dict(shape.new_checks)
    return sum(
        cause.share * since.get(cause.symptom, 0.0) * (1 - shape.node_fail_share)
        for cause in shape.causes
        if cause.check
    )


def _second_order_rows(attempts: Attempts) -> np.ndarray:
    """Return the rows preempted by an attempt that restarted after a hardware failure."""
    order = np.lexsort((attempts.start_s, attempts.run))
    before = np.full(len(order), -1)
    same = attempts.run[order][1:] == attempts.run[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    anew = (before >= 0) & (attempts.failure[before] >= 0)
    (preempted,) = np.nonzero((attempts.by >= 0) & (attempts.state == CODE["PREEMPTED"]))
    return preempted[anew[attempts.by[preempted]]]
