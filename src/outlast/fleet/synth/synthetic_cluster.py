"""Synthetic clusters with known truth (Kokolis et al. 2025, II and III), and their files.

Modelled, so that records and truth are consistent:

- Jobs by size, length (log-normal, at most 7 days) and hour of the day; the shares of jobs, GPU
  time and end states of the paper; three QOS, of which high preempts the others after two hours.
- A scheduler: whole nodes event by event (`schedule`), jobs smaller than a node in lanes of nodes
  that are set aside for them (`shared`). A job that is preempted, requests it or loses a node is
  requeued under the same number from its last hourly checkpoint; some users resubmit instead.
- Hardware failures, Poisson in the time that a node runs jobs, at its own rate: lemons 30 to 60
  times the fleet's. With each comes its cause, whether the job ends as NODE_FAIL or FAILED, what
  checks find within minutes (if anything), and an outage: a reboot, a ticket, a replaced part.
- Checks added in the middle of the window, findings that drain a node after its job, irrelevant
  warnings, users who exclude nodes, large jobs that keep crashing after a failure. Episodes, in
  which a cause occurs more often, for shapes that have them.

Not modelled: queues by project and fair share, time limits that users set, backfill, topology,
arrays, heterogeneous jobs and jobs that never start; failures of idle nodes, of racks and switches
(nodes fail independently), slow nodes, repaired lemons, clock skew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import polars as pl

from outlast.atomic_files import open_draft, refuse_existing
from outlast.errors import StorageError, UsageError
from outlast.fleet.record_tables import Tables, schema
from outlast.fleet.synth.cluster_shapes import (
    RSC1,
    RSC2,
    SHAPES,
    ClusterShape,
    ClusterWindow,
    FailureProcess,
    check_shape,
    choose_lemons,
    resize_shape,
)
from outlast.fleet.synth.ground_truth import GroundTruth, ground_truth
from outlast.fleet.synth.scheduler import Scheduler
from outlast.fleet.synth.synthetic_attempts import attempts, clip_attempts, small_jobs
from outlast.fleet.synth.synthetic_jobs import whole_node_jobs
from outlast.fleet.synth.synthetic_tables import (
    draw_drains,
    make_findings,
    make_jobs_table,
    make_node_tables,
    node_names,
)
from outlast.log_records import TAXONOMY, Bandwidth, Cost, Interruption

__all__ = ["RSC1", "RSC2", "SHAPES", "ClusterShape", "GroundTruth", "make_cluster", "resize_shape"]
SINCE_NS = 1_717_200_000 * 10**9  # 2024-06-01 in UTC
WARM_UP_S = 2 * 86400.0  # before the window; only attempts that end in it are in the tables
DAYS_MAX = 3660
NODES_MIN = 4
NODES_MAX = 100_000


def make_cluster(
    shape: str | ClusterShape,
    days: float,
    seed: int = 0,
    nodes: int | None = None,
    report: Callable[[float], None] = lambda _: None,
) -> tuple[Tables, GroundTruth]:
    """Return a cluster's records over `days`, and their ground truth.

    Deterministic. `nodes`: another size, with jobs in proportion. `report` is called with the share
    of the schedule that is done. Raises UsageError for an unknown shape or an invalid size.
    """
    shape = _shape(shape, days, seed, nodes)
    streams = [np.random.default_rng([seed, part]) for part in range(6)]
    bad = choose_lemons(shape, streams[0])
    pace = FailureProcess(shape, days, bad)
    since_s = -WARM_UP_S
    until_s = float(round(days * 86400))
    jobs = whole_node_jobs(shape, since_s, until_s, bad, streams[1])
    drained = draw_drains(shape, days, since_s, bad, streams[2])
    ran = Scheduler(shape, jobs, pace, bad, seed).run(since_s, until_s, drained, report)
    clipped = clip_attempts(attempts(ran, small_jobs(shape, ran, streams[3])), ran, 0.0)
    window = ClusterWindow(shape, days, seed, node_names(shape.name, shape.nodes), SINCE_NS)
    found = make_findings(shape, days, ran, drained, streams[4])
    rest = make_node_tables(window, ran, found, streams[4])
    table = make_jobs_table(window, clipped, ran, streams[5])
    tables = Tables(
        table.lazy(),
        *(frame.lazy() for frame in rest),
        interruptions=pl.LazyFrame(schema=schema(Interruption)),
        costs=pl.LazyFrame(schema=schema(Cost)),
        bandwidths=pl.LazyFrame(schema=schema(Bandwidth)),
        since_ns=SINCE_NS,
        until_ns=window.until_ns,
    )
    return tables, ground_truth(window, clipped, ran, pace, bad)


def _shape(shape: str | ClusterShape, days: float, seed: int, nodes: int | None) -> ClusterShape:
    """Return the shape in the given size. Raises UsageError."""
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise UsageError(f"shape {shape} is not known; there are {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    if not 0 < days <= DAYS_MAX:
        raise UsageError(f"{days} days: more than 0, at most {DAYS_MAX:,}")
    if seed < 0:
        raise UsageError(f"seed {seed}: 0 or more")
    if nodes is None:
        return check_shape(shape)
    if not NODES_MIN <= nodes <= NODES_MAX:
        raise UsageError(f"{nodes} nodes: from {NODES_MIN} to {NODES_MAX:,}")
    return check_shape(resize_shape(shape, nodes))


HEADER = (
    "JobID", "JobName", "User", "Account", "Cluster", "Partition", "QOS", "State", "ExitCode",
    "Submit", "Eligible", "Start", "End", "ElapsedRaw", "NNodes", "AllocTRES", "NodeList",
    "FailedNode", "Priority", "Restarts", "SubmitLine",
)  # fmt: skip
_ROWS = 100_000  # at a time
_STEPS = 200  # one job in so many has rows of its steps
_FIRST_UID = 5000


def write_sacct(jobs: pl.DataFrame, to: IO[bytes], report: Callable[[float], None]) -> None:
    """Write all attempts as `sacct --parsable2`, by job. Raises OSError."""
    ordered = jobs.sort(pl.col("job").cast(pl.Int64), "attempt")
    for first in range(0, max(1, len(ordered)), _ROWS):
        some = ordered[first : first + _ROWS]
        text = _with_steps(_sacct_texts(some))
        text.write_csv(to, include_header=not first, separator="|", quote_style="never")
        report(min(1.0, (first + _ROWS) / max(1, len(ordered))))


def _sacct_texts(jobs: pl.DataFrame) -> pl.DataFrame:
    running = pl.col("state") == "RUNNING"
    uid = _FIRST_UID + pl.col("user").str.strip_prefix("user").cast(pl.Int64)
    cancelled = pl.format("CANCELLED by {}", uid)
    resources = pl.format(
        "billing={},cpu={},gres/gpu:a100={},gres/gpu={},mem={}G,node={}",
        "gpus",
        pl.col("gpus") * 16,
        "gpus",
        "gpus",
        pl.col("gpus") * 120,
        "nodes",
    )
    excluded = (
        pl.when(pl.col("excluded") == "")
        .then(pl.lit(""))
        .otherwise(pl.format("--exclude={} ", "excluded"))
    )
    line = pl.format("sbatch --nodes={} {}job.sh", "nodes", excluded)
    texts = jobs.select(
        JobID="job",
        JobName="name",
        User="user",
        Account="account",
        Cluster="cluster",
        Partition="partition",
        QOS="qos",
        State=pl.when(pl.col("state") == "CANCELLED")
        .then(cancelled)
        .otherwise(pl.col("state").cast(pl.String)),
        ExitCode=pl.format("{}:{}", "exit_code", "signal"),
        Submit=_time("submit_ns"),
        Eligible=_time("eligible_ns"),
        Start=_time("start_ns"),
        End=pl.when(running).then(pl.lit("Unknown")).otherwise(_time("t_ns")),
        ElapsedRaw=((pl.col("t_ns") - pl.col("start_ns")) // 10**9),
        NNodes="nodes",
        AllocTRES=resources,
        NodeList="hosts",
        FailedNode="failed_node",
        Priority="priority",
        Restarts="restarts",
        SubmitLine=line,
    )
    return texts.select(pl.col(HEADER).cast(pl.String))


def _with_steps(texts: pl.DataFrame) -> pl.DataFrame:
    """Add rows of steps to some jobs."""
    numbered = texts.with_row_index("row")
    shown = numbered.filter(pl.col("row") % _STEPS == 0)
    steps = [
        shown.with_columns(
            JobID=pl.col("JobID") + f".{step}",
            JobName=pl.lit(step),
            User=pl.lit(""),
            Partition=pl.lit(""),
            QOS=pl.lit(""),
            SubmitLine=pl.lit(""),
        )
        for step in ("batch", "extern")
    ]
    return pl.concat([numbered, *steps]).sort("row", maintain_order=True).drop("row")


def _time(column: str) -> pl.Expr:
    return pl.from_epoch(pl.col(column), "ns").dt.strftime("%Y-%m-%dT%H:%M:%S")


KINDS = {row.title: row.symptom for row in TAXONOMY.values()}  # this site's names of symptoms
STATUS = {"CRITICAL": "now", "DRAIN": "drain", "WARNING": "warn"}
_THEIRS = {ours: theirs for theirs, ours in KINDS.items()}


def write_files(
    tables: Tables,
    truth: GroundTruth,
    target: Path,
    report: Callable[[float], None] = lambda _: None,
) -> list[str]:
    """Write the files of a cluster atomically; return their names in `target`.

    `report` is called with the share that is written. Raises UsageError if `target` exists,
    StorageError if it cannot be written.
    """
    refuse_existing(target)
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is no directory; nothing was written")
    try:
        with open_draft(target, new=True) as draft:
            draft.mkdir()
            _write_tables(tables, truth, draft, report)
            written = sorted(path.name for path in draft.iterdir())
    except OSError as error:
        why = error.strerror or error
        raise StorageError(f"{target} could not be written: {why}; nothing was kept") from error
    return written


def _write_tables(
    tables: Tables, truth: GroundTruth, into: Path, report: Callable[[float], None]
) -> None:
    with (into / "sacct.txt").open("wb") as file:
        write_sacct(tables.jobs.collect(), file, report)
    findings = tables.findings.collect().select(
        time=_iso("t_ns"),
        cluster="cluster",
        host="node",
        check="check",
        kind=pl.col("symptom").cast(pl.String).replace(_THEIRS),
        status=pl.col("severity").cast(pl.String).replace({o: t for t, o in STATUS.items()}),
        code="code",
        device="device",
        message="detail",
    )
    findings.write_ndjson(into / "health.jsonl")
    columns = {
        "time": "time",
        "cluster": "cluster",
        "node": "host",
        "check": "check",
        "symptom": "kind",
        "severity": "status",
        "code": "code",
        "device": "device",
        "detail": "message",
    }
    _write_mapping(into / "health.toml", "events", columns, {"symptom": KINDS, "severity": STATUS})
    for name, table in (
        ("nodes", tables.nodes),
        ("repairs", tables.repairs),
        ("outages", tables.outages),
        ("checks", tables.checks),
    ):
        frame = table.collect()
        ours = {"t_ns": "time"} | {
            column: column.removesuffix("_ns") for column in frame.columns if column != "t_ns"
        }
        times = [column for column in frame.columns if column.endswith("_ns")]
        plain = frame.with_columns(_iso(column) for column in times).rename(ours)
        plain.write_csv(into / f"{name}.csv")
        _write_mapping(into / f"{name}.toml", name, {each: each for each in ours.values()}, {})
    json = msgspec.json.format(msgspec.json.encode(truth), indent=1)
    (into / "truth.json").write_bytes(json + b"\n")


def _iso(column: str) -> pl.Expr:
    return pl.from_epoch(pl.col(column), "ns").dt.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").alias(column)


def _write_mapping(
    path: Path, rows: str, columns: Mapping[str, str], values: Mapping[str, Mapping[str, str]]
) -> None:
    sections: dict[str, Any] = {"columns": columns}
    sections |= {f"values.{column}": table for column, table in values.items()}
    lines = [f'rows = "{rows}"']
    for name, table in sections.items():
        lines += ["", f"[{name}]", *(f'"{key}" = "{value}"' for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n", "utf-8")
