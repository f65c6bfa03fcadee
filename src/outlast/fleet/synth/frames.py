"""Attempts as the table of jobs."""

from __future__ import annotations

import numpy as np
import polars as pl

from outlast.fleet.synth.attempts import Attempts
from outlast.fleet.synth.hosts import host_lists
from outlast.fleet.synth.ran import Ran
from outlast.fleet.synth.shapes import Shape
from outlast.fleet.synth.workload import CODE, QOS
from outlast.fleet.tables import schema
from outlast.log_records import JOB_STATES, JobEnded

FIRST_JOB = 1_000_001
_USERS, _ACCOUNTS = 240, 16
_PRIORITY = (100, 1000, 10_000)  # by QOS
_WORDS = ("train", "eval", "sweep", "finetune", "ablate", "debug", "pretrain", "export")


def job_number(job: int) -> str:
    """As the scheduler shows it."""
    return str(FIRST_JOB + job)


def jobs_table(
    shape: Shape, made: Attempts, ran: Ran, named: list[str], since_ns: int, until_ns: int,
    rng: np.random.Generator,
) -> pl.DataFrame:  # fmt: skip
    """By end time."""
    many = len(made.job)
    jobs = int(made.job.max(initial=-1)) + 1
    user = np.minimum(rng.zipf(1.5, jobs), _USERS) - 1  # a few have most of the jobs
    word = rng.integers(len(_WORDS), size=jobs)
    trial = rng.integers(1000, size=jobs)
    odd = np.where(rng.random(jobs) < 0.001, "|lr=0.1", "")

    def of(column: np.ndarray) -> np.ndarray:
        return column[made.run]  # what goes on under another number keeps its name and its user

    def texts(options: list[str] | tuple[str, ...], at: np.ndarray) -> pl.Series:
        return pl.Series(options, dtype=pl.String).gather(at)

    failed_node = np.full(many, len(named))
    struck = (made.failure >= 0) & (made.state == CODE["NODE_FAIL"])
    culprits = np.array([failure.node for failure in ran.failures] or [0])
    failed_node[struck] = culprits[made.failure[struck]]
    states = np.zeros((2, len(JOB_STATES)), int)  # exit code and signal
    states[0, CODE["FAILED"]], states[1, CODE["CANCELLED"]] = 1, 15
    states[1, CODE["PREEMPTED"]], states[0, CODE["OUT_OF_MEMORY"]] = 15, 137
    qos = texts(QOS, made.qos)
    excluded = {job.number: job.excluded for job in ran.jobs if job.excluded}
    exclusions = {
        number: ",".join(named[node] for node in sorted(nodes))
        for number, nodes in excluded.items()
    }
    lists = ["", *exclusions.values()]
    at = np.zeros(len(ran.jobs) + 1, int)
    at[list(exclusions)] = np.arange(1, len(lists))
    frame = pl.DataFrame({
        "t_ns": _ns(made.end_s, since_ns), "cluster": pl.repeat(shape.name, many, eager=True),
        "job": pl.Series(made.job + FIRST_JOB).cast(pl.String), "attempt": made.attempt,
        "name": texts(_WORDS, of(word)) + "-" + pl.Series(of(trial)).cast(pl.String)
        + texts(("", "|lr=0.1"), (of(odd) != "").astype(int)),
        "user": texts([f"user{n:03}" for n in range(_USERS)], of(user)),
        "account": texts([f"team{n:02}" for n in range(_ACCOUNTS)], of(user % _ACCOUNTS)),
        "partition": pl.repeat("learn", many, eager=True), "qos": qos,
        "state": texts(JOB_STATES, made.state), "exit_code": states[0, made.state],
        "signal": states[1, made.state], "submit_ns": _ns(made.submit_s, since_ns),
        "eligible_ns": _ns(made.eligible_s, since_ns), "start_ns": _ns(made.start_s, since_ns),
        "nodes": made.nodes, "gpus": made.gpus,
        "hosts": host_lists(named, ran.held, made.first, made.nodes),
        "excluded": texts(lists, at[made.large]),
        "failed_node": texts([*named, ""], failed_node),
        "priority": np.array(_PRIORITY)[made.qos] + of(trial) % 100, "restarts": made.restarts,
    })  # fmt: skip
    frame = frame.with_columns(pl.col("t_ns").clip(upper_bound=until_ns))
    types = schema(JobEnded)
    return frame.cast(types).select(types.names()).sort("t_ns", maintain_order=True)


def _ns(t_s: np.ndarray, since_ns: int) -> np.ndarray:
    return since_ns + t_s.astype(np.int64) * 1_000_000_000
