"""Job runs over all their attempts (Kokolis et al. 2025, II.D), job sizes and final states.

A scheduler that requeues a job after a failure or a preemption keeps its id; a user who resubmits
it gets a new one. In both cases the attempts may be one run of training, judged as a whole.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from outlast.errors import UsageError
from outlast.fleet.analysis.exposure import HOUR_S, KEY, SECOND_NS
from outlast.fleet.analysis.failure_attribution import AttributedFailures
from outlast.fleet.lake import UNFINISHED
from outlast.fleet.record_tables import Tables

NS_PER_SECOND = 10**9
ATTEMPT_KEY = ["cluster", "job", "attempt"]
RUN_COLUMNS = [
    *ATTEMPT_KEY,
    "name",
    "user",
    "partition",
    "qos",
    "state",
    "submit_ns",
    "eligible_ns",
    "start_ns",
    "t_ns",
    "nodes",
    "gpus",
    "priority",
    "restarts",
]
SAME = ["cluster", "user", "name", "gpus"]  # equal for all ids of one run


def node_fails(tables: Tables) -> pl.LazyFrame:
    """Return the attempts in state NODE_FAIL or BOOT_FAIL.

    They are known to be ended by infrastructure without any attribution. Columns as
    `attempts_of_runs` takes them.
    """
    return tables.jobs.filter(pl.col("state").is_in(["NODE_FAIL", "BOOT_FAIL"])).select(ATTEMPT_KEY)


def attempts_of_runs(
    tables: Tables, infra: pl.LazyFrame, *, across_s: float | None = None
) -> pl.DataFrame:
    """Return all attempts, ordered by run and within it by time.

    `infra`: cluster, job, attempt of those that infrastructure ended. With `across_s`, an id whose
    last attempt infrastructure ended continues under the next one with the same user, name and GPUs
    that was ready within this many seconds; at most one id continues another.

    New columns: `run` (a number from 0), `nth` attempt of the run, `last`, `infra`; `runtime_s`,
    start to end, and `wait_s`, from the time it could start (eligible, else submitted, and not
    before the previous attempt ended) until it started or was given up, neither below 0; `hidden`,
    at the last record of an id: attempts that the scheduler counted (`restarts`) without a record.
    """
    failed = infra.select(ATTEMPT_KEY).unique().with_columns(infra=pl.lit(value=True))
    found = (
        tables.jobs.select(RUN_COLUMNS)
        .join(failed, on=ATTEMPT_KEY, how="left")
        .with_columns(
            pl.col("infra").fill_null(value=False),
            ready_ns=pl.coalesce("eligible_ns", "submit_ns"),
            id=pl.struct("cluster", "job").hash(),
        )
        .sort("id", "attempt")
        .collect()
    )
    changed = pl.any_horizontal(
        pl.col(name) != pl.col(name).shift(1) for name in ("id", "cluster", "job")
    )
    found = found.with_columns(run=changed.fill_null(value=False).cum_sum().cast(pl.Int64))
    unknown = (pl.col("restarts") - _nth_attempt()).clip(lower_bound=0)
    found = found.with_columns(hidden=pl.when(_last_attempt()).then(unknown).otherwise(0))
    if across_s is not None:
        found = _join_across_ids(found, across_s)
    return _with_times(found).drop("id", "ready_ns")


def job_runs(tables: Tables, infra: pl.LazyFrame, *, across_s: float | None = None) -> pl.DataFrame:
    """Return one row per run of the attempts of `attempts_of_runs`.

    `nodes` and `gpus`: the most that it held; `scheduled_s` + `wait_s` is its wall time, without
    the time before it could have started; `interruptions`: ends of attempts that another one
    followed; `infra`: attempts that infrastructure ended; `ended`: no longer running.
    """
    return runs_of(attempts_of_runs(tables, infra, across_s=across_s))


def runs_of(found: pl.DataFrame) -> pl.DataFrame:
    """Return one row per run, as `job_runs`, of the result of `attempts_of_runs`."""
    first = ("cluster", "job", "name", "user", "partition", "qos")
    return (
        found.lazy()
        .group_by("run", maintain_order=True)
        .agg(
            *(pl.col(name).first() for name in first),
            pl.col("priority").max(),
            pl.col("nodes").max(),
            pl.col("gpus").max(),
            attempts=pl.len().cast(pl.Int64),
            interruptions=(~pl.col("last")).sum().cast(pl.Int64),
            infra=pl.col("infra").sum().cast(pl.Int64),
            hidden=pl.col("hidden").sum(),
            scheduled_s=pl.col("runtime_s").sum(),
            wait_s=pl.col("wait_s").sum(),
            end_ns=pl.col("t_ns").max(),
            state=pl.col("state").last(),
        )
        .with_columns(ended=~pl.col("state").is_in(UNFINISHED))
        .collect()
    )


def size_bucket(gpus: str = "gpus") -> pl.Expr:
    """Round GPUs up to a power of two; 0 stays 0."""
    power = (pl.col(gpus).log(2) - 1e-9).ceil().clip(lower_bound=0)
    return pl.when(pl.col(gpus) > 0).then(2**power).otherwise(0).cast(pl.Int64).alias("bucket")


def _with_times(found: pl.DataFrame) -> pl.DataFrame:
    """Add the order and the durations of attempts that are sorted by run."""
    new = pl.col("run") != pl.col("run").shift(1)
    before_ns = pl.when(~new).then(pl.col("t_ns").shift(1))
    ready_ns = pl.max_horizontal(pl.col("ready_ns"), before_ns)
    begun_ns = pl.coalesce("start_ns", "t_ns")
    return found.with_columns(
        nth=_nth_attempt(),
        last=_last_attempt(),
        wait_s=_seconds(begun_ns - ready_ns),
        runtime_s=_seconds(pl.col("t_ns") - pl.col("start_ns")),
    )


def _nth_attempt() -> pl.Expr:
    row = pl.int_range(pl.len(), dtype=pl.Int64)
    new = pl.col("run").ne_missing(pl.col("run").shift(1))
    return row - pl.when(new).then(row).forward_fill()


def _last_attempt() -> pl.Expr:
    return pl.col("run").ne_missing(pl.col("run").shift(-1))


def _seconds(span_ns: pl.Expr) -> pl.Expr:
    return (span_ns / NS_PER_SECOND).clip(lower_bound=0).fill_null(0.0)


def _join_across_ids(found: pl.DataFrame, across_s: float) -> pl.DataFrame:
    """Merge the `run` of ids that continue each other, and sort the attempts by it."""
    if not 0 <= across_s < float("inf"):
        raise UsageError(f"across_s must be 0 or above and finite, not {across_s!r}")
    begun = pl.coalesce("ready_ns", "start_ns", "t_ns")
    ids = found.lazy().group_by("run", maintain_order=True)
    starts = ids.agg(*(pl.col(name).first() for name in SAME), at_ns=begun.first())
    ends = (
        ids.agg(
            *(pl.col(name).last() for name in (*SAME, "infra")),
            at_ns=pl.col("t_ns").last(),
            begun_ns=begun.first(),
        )
        .filter(pl.col("infra") & (pl.col("at_ns") > pl.col("begun_ns")))  # so that no chain loops
        .select(*SAME, "at_ns", before="run")
    )
    pairs = (
        starts.sort("at_ns")
        .join_asof(
            ends.sort("at_ns"),
            on="at_ns",
            by=SAME,
            strategy="backward",
            tolerance=round(across_s * NS_PER_SECOND),
            check_sortedness=False,
        )
        .filter(pl.col("before").is_not_null())
        .unique("before", keep="first", maintain_order=True)
        .select("run", "before")
        .collect()
    )
    count = 1 + int(found["run"].to_numpy()[-1]) if len(found) else 0
    roots = _roots(count, pairs["run"].to_numpy(), pairs["before"].to_numpy())
    order = pl.coalesce("start_ns", "t_ns")
    return found.with_columns(run=pl.Series(roots)[found["run"]]).sort(
        "run", order, "attempt", maintain_order=True
    )


def _roots(count: int, after: NDArray[np.int64], before: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first run of the chain of each run.

    Pointers are doubled, as often as the longest chain can need.
    """
    root = np.arange(count, dtype=np.int64)
    root[after] = before
    for _ in range(max(1, count).bit_length()):
        root = root[root]
    return root


def jobs_by_size(tables: Tables) -> pl.DataFrame:
    """Count the attempts that started, by GPUs rounded up to a power of two (`gpus`; 0: none).

    `jobs`, their `gpu_hours` from start to end, both as shares of all, and the shares of jobs that
    are at least so large (`jobs_from`, `gpu_hours_from`).
    """
    held_s = ((pl.col("t_ns") - pl.col("start_ns")) / SECOND_NS).clip(lower_bound=0)
    counted = (
        tables.jobs.filter(
            pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left"),
            pl.col("start_ns").is_not_null(),
        )
        .select("gpus", size=size_bucket(), held_s=held_s)
        .group_by("size")
        .agg(
            jobs=pl.len().cast(pl.Int64),
            gpu_hours=(pl.col("gpus") * pl.col("held_s")).sum() / HOUR_S,
        )
        .sort("size")
        .collect()
    )
    return counted.rename({"size": "gpus"}).with_columns(
        *(
            _share_by_size(pl.col(name), name).alias(f"{name}_share")
            for name in ("jobs", "gpu_hours")
        ),
        *(
            _share_by_size(pl.col(name).cum_sum(reverse=True), name).alias(f"{name}_from")
            for name in ("jobs", "gpu_hours")
        ),
    )


def _share_by_size(of: pl.Expr, name: str) -> pl.Expr:
    total = pl.col(name).sum()
    return pl.when(total > 0).then(of / total).otherwise(0.0)


def jobs_by_state(tables: Tables, found: AttributedFailures) -> pl.DataFrame:
    """Count attempts by state and by whether infrastructure ended them (`hw`).

    `jobs` (attempts, as a scheduler counts them), their `gpu_hours` from start to end, and both as
    shares of all. Most GPU time first. Jobs that never started count, with no GPU time.
    `backwards`: those whose end is before their start.
    """
    hw = found.failures.lazy().select(KEY).with_columns(hw=pl.lit(value=True))
    held_s = (pl.col("t_ns") - pl.col("start_ns")).fill_null(0) / SECOND_NS
    counted = (
        tables.jobs.filter(
            pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
        )
        .select(*KEY, "state", "gpus", held_s=held_s)
        .join(hw, on=KEY, how="left")
        .group_by("state", pl.col("hw").fill_null(value=False))
        .agg(
            jobs=pl.len().cast(pl.Int64),
            gpu_hours=(pl.col("gpus") * pl.col("held_s").clip(lower_bound=0)).sum() / HOUR_S,
            backwards=(pl.col("held_s") < 0).sum().cast(pl.Int64),
        )
        .collect()
    )
    return counted.select(
        pl.col("state").cast(pl.String),
        "hw",
        "jobs",
        _share_by_state("jobs"),
        "gpu_hours",
        _share_by_state("gpu_hours"),
        "backwards",
    ).sort(["gpu_hours", "jobs", "state"], descending=[True, True, False])


def _share_by_state(name: str) -> pl.Expr:
    total = pl.col(name).sum()
    return pl.when(total > 0).then(pl.col(name) / total).otherwise(0.0).alias(f"{name}_share")
