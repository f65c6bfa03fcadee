"""Ground truth of a synthetic cluster, from its scheduler alone."""

from __future__ import annotations

import msgspec
import numpy as np

from outlast.fleet.synth.cluster_shapes import DAY_S, GPUS, ClusterShape, FailureProcess
from outlast.fleet.synth.synthetic_attempts import Attempts
from outlast.fleet.synth.synthetic_jobs import CODE, QOS, SchedulerResult
from outlast.fleet.synth.synthetic_tables import is_detected, job_number
from outlast.log_records import JOB_STATES

LONG_S = 86400.0  # job runs that held nodes for less are not told of


class TrueJobRun(msgspec.Struct, frozen=True):
    """A job over its attempts, under whatever numbers. `wall_s`: since it could first start, as far
    as the table knows; `productive_s`: scheduled time that was kept, which is what was saved before
    each interruption and, in the last attempt, all after its start."""

    jobs: tuple[str, ...]
    gpus: int
    qos: str
    attempts: int
    wall_s: float
    scheduled_s: float
    productive_s: float
    ettr: float


class TrueCrashLoop(msgspec.Struct, frozen=True):
    """A job that crashed again and again after a hardware failure, `attempts` times, and how many
    attempts of others these preempted."""

    job: str
    gpus: int
    attempts: int
    preempted: int


def true_job_runs(shape: ClusterShape, made: Attempts) -> list[TrueJobRun]:
    """Those of whole nodes that held them for a day or longer, in all."""
    (whole,) = np.nonzero(made.large >= 0)
    order = whole[np.lexsort((made.start_s[whole], made.run[whole]))]
    if not len(order):
        return []
    run = made.run[order]
    firsts = np.flatnonzero(np.r_[True, run[1:] != run[:-1]])
    lasts = np.r_[firsts[1:], len(order)] - 1
    held_s = made.end_s[order] - made.start_s[order]
    useful_s = np.maximum(0.0, held_s - shape.restart_s)
    kept_s = useful_s // shape.checkpoint_s * shape.checkpoint_s
    kept_s[lasts] = useful_s[lasts]
    scheduled = np.add.reduceat(held_s, firsts)
    productive = np.add.reduceat(kept_s, firsts)
    wall = made.end_s[order[lasts]] - made.eligible_s[order[firsts]]
    found = []
    for at in np.flatnonzero(scheduled >= LONG_S).tolist():
        rows = order[firsts[at] : lasts[at] + 1]
        jobs = tuple(map(job_number, np.unique(made.job[rows]).tolist()))
        one = TrueJobRun(
            jobs, int(made.gpus[rows[0]]), QOS[made.qos[rows[0]]], len(rows), float(wall[at]),
            float(scheduled[at]), float(productive[at]), float(productive[at] / wall[at]),
        )  # fmt: skip
        found.append(one)
    return found


def true_crash_loops(made: Attempts, ran: SchedulerResult) -> list[TrueCrashLoop]:
    """Those that crashed in the window, as far as they did there."""
    found = []
    runs_of = np.array([*(job.run for job in ran.jobs), -1])[made.large]
    for number, failure in ran.looping:
        run = ran.jobs[number].run
        crashed = (
            (runs_of == run)
            & (made.start_s >= ran.failures[failure].t_s)
            & (made.state == CODE["FAILED"])
            & (made.failure < 0)
            & (made.end_s - made.start_s <= 3600)
        )
        (rows,) = np.nonzero(crashed)
        if len(rows):
            preempted = int(np.isin(made.by, rows).sum())
            job = job_number(int(made.job[rows[0]]))
            found.append(TrueCrashLoop(job, int(made.gpus[rows[0]]), len(rows), preempted))
    return found


LARGE_GPUS = 128  # r_f is of jobs above this
LOST_S = 1800.0  # of work, if all save hourly


class TrueFailure(msgspec.Struct, frozen=True):
    """Hardware ended this attempt. `seen`: a check has a finding of it; `counted`: the paper's
    definition finds it (it is, or its state is NODE_FAIL)."""

    job: str
    attempt: int
    t_ns: int
    node: str
    cause: str  # a symptom
    state: str
    gpus: int
    seen: bool
    counted: bool


class TrueCascade(msgspec.Struct, frozen=True):
    """An attempt was preempted by one that a hardware failure had made begin anew."""

    job: str
    attempt: int
    by_job: str
    by_attempt: int


class GroundTruth(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are per node-day of running jobs unless they say otherwise. `r_f` is what was expected
    of the exposure that there was, in jobs above 128 GPUs: the failures that were counted there are
    Poisson around `r_f` times `node_days`. `r_f_counted`: without the failures that nobody can
    see."""

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
    shape: ClusterShape,
    seed: int,
    days: float,
    made: Attempts,
    ran: SchedulerResult,
    pace: FailureProcess,
    lemons: dict[int, float],
    named: list[str],
    since_ns: int,
) -> GroundTruth:
    """Of the attempts that the table has."""
    struck = np.flatnonzero(made.failure >= 0)
    failed = [_failed(shape, days, made, ran, named, since_ns, int(row)) for row in struck]
    large = made.gpus > LARGE_GPUS
    expected, node_days = _exposure(made, ran, pace)
    hidden = _hidden_share(shape)
    lost = made.gpus * np.minimum(made.end_s - made.start_s, LOST_S) / 3600
    second = _second(made)
    first_hours, second_hours = float(lost[struck].sum()), float(lost[second].sum())
    long = true_job_runs(shape, made)
    high = [one.ettr for one in long if one.qos == "high"]
    counted = sum(one.counted and one.gpus > LARGE_GPUS for one in failed)
    all_days = float(node_days.sum() + _shared_days(ran))
    rate = float(expected[large].sum() / max(1e-9, node_days[large].sum()))
    gpu_hours = float(node_days.sum()) * 24 * GPUS
    return GroundTruth(
        shape=shape.name, seed=seed, nodes=shape.nodes, days=days, since_ns=since_ns,
        until_ns=since_ns + round(days * DAY_S) * 10**9, r_f=rate,
        r_f_counted=rate * (1 - hidden), r_f_asked=shape.r_f,
        node_days=float(node_days[large].sum()), failures_large=int(large[struck].sum()),
        failures_counted=counted, failures=len(failed),
        all_rate=float(expected.sum() / max(1e-9, node_days.sum())), all_node_days=all_days,
        causes_per_gpu_hour={
            cause.symptom: float(expected.sum() * cause.share / max(1e-9, gpu_hours))
            for cause in shape.causes
        },
        lemons={named[node]: factor for node, factor in lemons.items()},
        plain_rate=float(pace.rates.min() * DAY_S),
        first_order_gpu_hours=first_hours, second_order_gpu_hours=second_hours,
        second_order_share=second_hours / max(1e-9, first_hours + second_hours),
        checkpoint_s=shape.checkpoint_s, restart_s=shape.restart_s,
        ettr=sum(high) / len(high) if high else None, failed=failed, runs=long,
        loops=true_crash_loops(made, ran),
        cascades=[
            TrueCascade(
                job_number(int(made.job[row])), int(made.attempt[row]),
                job_number(int(made.job[made.by[row]])), int(made.attempt[made.by[row]]),
            )
            for row in second
        ],
    )  # fmt: skip


def _failed(
    shape: ClusterShape,
    days: float,
    made: Attempts,
    ran: SchedulerResult,
    named: list[str],
    since_ns: int,
    row: int,
) -> TrueFailure:
    failure = ran.failures[made.failure[row]]
    visible = is_detected(shape, days, failure.cause, failure.t_s)
    state = JOB_STATES[made.state[row]]
    return TrueFailure(
        job_number(int(made.job[row])), int(made.attempt[row]),
        since_ns + round(made.end_s[row]) * 10**9, named[failure.node],
        shape.causes[failure.cause].symptom, state, int(made.gpus[row]), visible,
        visible or state == "NODE_FAIL",
    )  # fmt: skip


def _exposure(
    made: Attempts, ran: SchedulerResult, pace: FailureProcess
) -> tuple[np.ndarray, np.ndarray]:
    """Failures that were to be expected, and node-days, by attempt of whole nodes (0 for others):
    the sum of its nodes' rates times the seconds at the mean pace that it ran."""
    # Exposure before the window is of those that lived to see it: none of it counts.
    starts_s = np.maximum(made.start_s, 0.0)
    sums = np.r_[0.0, np.cumsum(pace.rates[ran.held_nodes])]
    whole = made.large >= 0
    rates = np.where(whole, sums[made.first + made.nodes] - sums[made.first], 0.0)
    times = np.concatenate((starts_s, made.end_s))
    ages = np.array([pace.age(t_s) for t_s in times.tolist()]).reshape(2, -1)
    node_days = np.where(whole, made.nodes * (made.end_s - starts_s) / DAY_S, 0.0)
    return rates * (ages[1] - ages[0]), node_days


def _shared_days(ran: SchedulerResult) -> float:
    """Node-days of nodes that small jobs shared, in the window."""
    rows = ran.rows[(ran.rows[:, 8] > 0) & (ran.rows[:, 4] > 0)]
    return float((rows[:, 4] - np.maximum(rows[:, 3], 0)).sum() / DAY_S)


def _hidden_share(shape: ClusterShape) -> float:
    """Of the failures, those that end as FAILED before there is a check that sees them."""
    since = dict(shape.new_checks)
    return sum(
        cause.share * since.get(cause.symptom, 0.0) * (1 - shape.node_fail_share)
        for cause in shape.causes
        if cause.check
    )


def _second(made: Attempts) -> np.ndarray:
    """Rows that were preempted by an attempt whose run hardware had ended just before."""
    order = np.lexsort((made.start_s, made.run))
    before = np.full(len(order), -1)
    same = made.run[order][1:] == made.run[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    anew = (before >= 0) & (made.failure[before] >= 0)
    (preempted,) = np.nonzero((made.by >= 0) & (made.state == CODE["PREEMPTED"]))
    return preempted[anew[made.by[preempted]]]
