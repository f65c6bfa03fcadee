"""What is true of a synthetic cluster, from what its scheduler did: nothing here reads tables."""

from __future__ import annotations

import msgspec
import numpy as np

from outlast.fleet.synth.attempts import Attempts
from outlast.fleet.synth.findings import seen
from outlast.fleet.synth.frames import job_number
from outlast.fleet.synth.pace import DAY_S, Pace
from outlast.fleet.synth.progress import Loop, Run, loops, runs
from outlast.fleet.synth.ran import Ran
from outlast.fleet.synth.shapes import GPUS, Shape
from outlast.fleet.synth.workload import CODE
from outlast.log_records import JOB_STATES

LARGE_GPUS = 128  # r_f is of jobs above this
LOST_S = 1800.0  # of work, if all save hourly


class Failed(msgspec.Struct, frozen=True):
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


class Cascade(msgspec.Struct, frozen=True):
    """An attempt was preempted by one that a hardware failure had made begin anew."""

    job: str
    attempt: int
    by_job: str
    by_attempt: int


class Truth(msgspec.Struct, frozen=True, kw_only=True):
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
    failed: list[Failed]
    cascades: list[Cascade]
    runs: list[Run]
    loops: list[Loop]


def truth(
    shape: Shape, seed: int, days: float, made: Attempts, ran: Ran, pace: Pace,
    lemons: dict[int, float], named: list[str], since_ns: int,
) -> Truth:  # fmt: skip
    """Of the attempts that the table has."""
    struck = np.flatnonzero(made.failure >= 0)
    failed = [_failed(shape, days, made, ran, named, since_ns, int(row)) for row in struck]
    large = made.gpus > LARGE_GPUS
    expected, node_days = _exposure(made, ran, pace)
    hidden = _hidden_share(shape)
    lost = made.gpus * np.minimum(made.end_s - made.start_s, LOST_S) / 3600
    second = _second(made)
    first_hours, second_hours = float(lost[struck].sum()), float(lost[second].sum())
    long = runs(shape, made)
    high = [one.ettr for one in long if one.qos == "high"]
    counted = sum(one.counted and one.gpus > LARGE_GPUS for one in failed)
    all_days = float(node_days.sum() + _shared_days(ran))
    rate = float(expected[large].sum() / max(1e-9, node_days[large].sum()))
    gpu_hours = float(node_days.sum()) * 24 * GPUS
    return Truth(
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
        loops=loops(made, ran),
        cascades=[
            Cascade(
                job_number(int(made.job[row])), int(made.attempt[row]),
                job_number(int(made.job[made.by[row]])), int(made.attempt[made.by[row]]),
            )
            for row in second
        ],
    )  # fmt: skip


def _failed(
    shape: Shape, days: float, made: Attempts, ran: Ran, named: list[str], since_ns: int, row: int
) -> Failed:
    failure = ran.failures[made.failure[row]]
    visible = seen(shape, days, failure.cause, failure.t_s)
    state = JOB_STATES[made.state[row]]
    return Failed(
        job_number(int(made.job[row])), int(made.attempt[row]),
        since_ns + round(made.end_s[row]) * 10**9, named[failure.node],
        shape.causes[failure.cause].symptom, state, int(made.gpus[row]), visible,
        visible or state == "NODE_FAIL",
    )  # fmt: skip


def _exposure(made: Attempts, ran: Ran, pace: Pace) -> tuple[np.ndarray, np.ndarray]:
    """Failures that were to be expected, and node-days, by attempt of whole nodes (0 for others):
    the sum of its nodes' rates times the seconds at the mean pace that it ran."""
    # Exposure before the window is of those that lived to see it: none of it counts.
    starts_s = np.maximum(made.start_s, 0.0)
    sums = np.r_[0.0, np.cumsum(pace.rates[ran.held])]
    whole = made.large >= 0
    rates = np.where(whole, sums[made.first + made.nodes] - sums[made.first], 0.0)
    times = np.concatenate((starts_s, made.end_s))
    ages = np.array([pace.age(t_s) for t_s in times.tolist()]).reshape(2, -1)
    node_days = np.where(whole, made.nodes * (made.end_s - starts_s) / DAY_S, 0.0)
    return rates * (ages[1] - ages[0]), node_days


def _shared_days(ran: Ran) -> float:
    """Node-days of nodes that small jobs shared, in the window."""
    rows = ran.rows[(ran.rows[:, 8] > 0) & (ran.rows[:, 4] > 0)]
    return float((rows[:, 4] - np.maximum(rows[:, 3], 0)).sum() / DAY_S)


def _hidden_share(shape: Shape) -> float:
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
