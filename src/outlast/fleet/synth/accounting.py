"""The table of jobs as `sacct --parsable2 --duplicates` would print it, times in UTC."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO

import polars as pl

HEADER = (
    "JobID", "JobName", "User", "Account", "Cluster", "Partition", "QOS", "State", "ExitCode",
    "Submit", "Eligible", "Start", "End", "ElapsedRaw", "NNodes", "AllocTRES", "NodeList",
    "FailedNode", "Priority", "Restarts", "SubmitLine",
)  # fmt: skip
_ROWS = 100_000  # at a time
_STEPS = 200  # one job in so many shows its steps
_FIRST_UID = 5000


def write(jobs: pl.DataFrame, to: IO[bytes], tell: Callable[[float], None]) -> None:
    """All attempts, by job. Raises OSError."""
    ordered = jobs.sort(pl.col("job").cast(pl.Int64), "attempt")
    for first in range(0, max(1, len(ordered)), _ROWS):
        some = ordered[first : first + _ROWS]
        text = _with_steps(_texts(some))
        text.write_csv(to, include_header=not first, separator="|", quote_style="never")
        tell(min(1.0, (first + _ROWS) / max(1, len(ordered))))


def _texts(jobs: pl.DataFrame) -> pl.DataFrame:
    running = pl.col("state") == "RUNNING"
    uid = _FIRST_UID + pl.col("user").str.strip_prefix("user").cast(pl.Int64)
    cancelled = pl.format("CANCELLED by {}", uid)
    resources = pl.format(
        "billing={},cpu={},gres/gpu:a100={},gres/gpu={},mem={}G,node={}", "gpus",
        pl.col("gpus") * 16, "gpus", "gpus", pl.col("gpus") * 120, "nodes",
    )  # fmt: skip
    excluded = pl.when(pl.col("excluded") == "").then(pl.lit("")).otherwise(
        pl.format("--exclude={} ", "excluded")
    )  # fmt: skip
    line = pl.format("sbatch --nodes={} {}job.sh", "nodes", excluded)
    texts = jobs.select(
        JobID="job", JobName="name", User="user", Account="account", Cluster="cluster",
        Partition="partition", QOS="qos",
        State=pl.when(pl.col("state") == "CANCELLED").then(cancelled)
        .otherwise(pl.col("state").cast(pl.String)),
        ExitCode=pl.format("{}:{}", "exit_code", "signal"),
        Submit=_time("submit_ns"), Eligible=_time("eligible_ns"), Start=_time("start_ns"),
        End=pl.when(running).then(pl.lit("Unknown")).otherwise(_time("t_ns")),
        ElapsedRaw=((pl.col("t_ns") - pl.col("start_ns")) // 10**9),
        NNodes="nodes", AllocTRES=resources, NodeList="hosts", FailedNode="failed_node",
        Priority="priority", Restarts="restarts", SubmitLine=line,
    )  # fmt: skip
    return texts.select(pl.col(HEADER).cast(pl.String))


def _with_steps(texts: pl.DataFrame) -> pl.DataFrame:
    """Some jobs are followed by their steps, which are no jobs."""
    numbered = texts.with_row_index("row")
    shown = numbered.filter(pl.col("row") % _STEPS == 0)
    steps = [
        shown.with_columns(
            JobID=pl.col("JobID") + f".{step}", JobName=pl.lit(step), User=pl.lit(""),
            Partition=pl.lit(""), QOS=pl.lit(""), SubmitLine=pl.lit(""),
        )
        for step in ("batch", "extern")
    ]  # fmt: skip
    return pl.concat([numbered, *steps]).sort("row", maintain_order=True).drop("row")


def _time(column: str) -> pl.Expr:
    return pl.from_epoch(pl.col(column), "ns").dt.strftime("%Y-%m-%dT%H:%M:%S")
