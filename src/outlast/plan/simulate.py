"""Replications of one job: a row each, all of them at hand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import closing

import numpy as np

from outlast.errors import UsageError
from outlast.plan.job import Job
from outlast.plan.parts import ROWS, parts, results

ROWS_MAX = 10_000_000  # 1.1 GB


def simulate(
    job: Job,
    replications: int,
    *,
    seed: int = 0,
    executor: Executor | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """A row of ROWS for each replication, in their order; `wall_s` is infinity for a run that has
    not finished within the job's `failures_max`.

    The same seed gives the same rows, whatever executor runs them (here and now without one), and
    the k-th replication of two jobs meets the same failures. `on_progress` hears how many are done.
    Ctrl-C ends it with those that are done, the first ones without a gap.

    Raises UsageError naming the field of `job` that cannot be, and above ROWS_MAX replications.
    """
    if replications > ROWS_MAX:
        raise UsageError(
            f"replications: {replications:,} rows are more than the {ROWS_MAX:,} that are held in"
            " memory; outlast.plan.parts gives any number of them, a part at a time"
        )
    done: list[np.ndarray] = []
    wanted = ((None, part) for part in parts(job, replications, seed))
    with closing(results(wanted, executor)) as found:
        for _, _, rows in found:
            if isinstance(rows, Exception):
                raise rows
            done.append(rows)
            on_progress(sum(map(len, done)))
    return np.concatenate(done) if done else np.empty(0, ROWS)
