"""Files of a synthetic cluster: accounting, node logs and the ground truth."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import polars as pl

from outlast.atomic_files import draft_path, refuse_existing, sync
from outlast.errors import StorageError, UsageError
from outlast.fleet.record_tables import Tables
from outlast.fleet.synth.ground_truth import GroundTruth
from outlast.node_logs.taxonomy import TABLE

HEADER = (
    "JobID", "JobName", "User", "Account", "Cluster", "Partition", "QOS", "State", "ExitCode",
    "Submit", "Eligible", "Start", "End", "ElapsedRaw", "NNodes", "AllocTRES", "NodeList",
    "FailedNode", "Priority", "Restarts", "SubmitLine",
)  # fmt: skip
_ROWS = 100_000  # at a time
_STEPS = 200  # one job in so many has rows of its steps
_FIRST_UID = 5000


def write_sacct(jobs: pl.DataFrame, to: IO[bytes], tell: Callable[[float], None]) -> None:
    """Write all attempts as `sacct --parsable2`, by job. Raises OSError."""
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
    """Add rows of steps to some jobs."""
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


KINDS = {row.title: row.symptom for row in TABLE.values()}  # this site's names of symptoms
STATUS = {"CRITICAL": "now", "DRAIN": "drain", "WARNING": "warn"}
_THEIRS = {ours: theirs for theirs, ours in KINDS.items()}


def write_files(
    tables: Tables, truth: GroundTruth, target: Path, tell: Callable[[float], None] = lambda _: None
) -> list[str]:
    """Write the files of a cluster atomically; return their names in `target`.

    `tell` is called with the share that is written. Raises UsageError if `target` exists,
    StorageError if it cannot be written.
    """
    refuse_existing(target)
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is no directory; nothing was written")
    draft = draft_path(target)
    try:
        draft.mkdir()
        _fill(tables, truth, draft, tell)
        written = sorted(path.name for path in draft.iterdir())
        for name in written:
            sync(draft / name)
        sync(draft)
        refuse_existing(target)
        draft.rename(target)
        sync(target.parent)
    except OSError as error:
        why = error.strerror or error
        raise StorageError(f"{target} could not be written: {why}; nothing was kept") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # already renamed on success
    return written


def _fill(tables: Tables, truth: GroundTruth, into: Path, tell: Callable[[float], None]) -> None:
    with (into / "sacct.txt").open("wb") as file:
        write_sacct(tables.jobs.collect(), file, tell)
    findings = tables.findings.collect().select(
        time=_iso("t_ns"), cluster="cluster", host="node", check="check",
        kind=pl.col("symptom").cast(pl.String).replace(_THEIRS),
        status=pl.col("severity").cast(pl.String).replace({o: t for t, o in STATUS.items()}),
        code="code", device="device", message="detail",
    )  # fmt: skip
    findings.write_ndjson(into / "health.jsonl")
    columns = {
        "time": "time", "cluster": "cluster", "node": "host", "check": "check", "symptom": "kind",
        "severity": "status", "code": "code", "device": "device", "detail": "message",
    }  # fmt: skip
    _mapping(into / "health.toml", "events", columns, {"symptom": KINDS, "severity": STATUS})
    for name, table in (
        ("nodes", tables.nodes), ("repairs", tables.repairs), ("outages", tables.outages),
        ("checks", tables.checks),
    ):  # fmt: skip
        frame = table.collect()
        ours = {"t_ns": "time"} | {
            column: column.removesuffix("_ns") for column in frame.columns if column != "t_ns"
        }
        times = [column for column in frame.columns if column.endswith("_ns")]
        plain = frame.with_columns(_iso(column) for column in times).rename(ours)
        plain.write_csv(into / f"{name}.csv")
        _mapping(into / f"{name}.toml", name, {each: each for each in ours.values()}, {})
    json = msgspec.json.format(msgspec.json.encode(truth), indent=1)
    (into / "truth.json").write_bytes(json + b"\n")


def _iso(column: str) -> pl.Expr:
    return pl.from_epoch(pl.col(column), "ns").dt.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").alias(column)


def _mapping(
    path: Path, rows: str, columns: Mapping[str, str], values: Mapping[str, Mapping[str, str]]
) -> None:
    sections: dict[str, Any] = {"columns": columns}
    sections |= {f"values.{column}": table for column, table in values.items()}
    lines = [f'rows = "{rows}"']
    for name, table in sections.items():
        lines += ["", f"[{name}]", *(f'"{key}" = "{value}"' for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n", "utf-8")
