"""A synthetic cluster as the files that its site would have, and the truth beside them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from outlast.atomic_files import draft_path, refuse_existing, sync
from outlast.errors import StorageError, UsageError
from outlast.fleet.synth import accounting
from outlast.fleet.synth.truth import Truth
from outlast.fleet.tables import Tables
from outlast.symptoms.taxonomy import TABLE

KINDS = {row.title: row.symptom for row in TABLE.values()}  # what this site's checks say
STATUS = {"CRITICAL": "now", "DRAIN": "drain", "WARNING": "warn"}
_THEIRS = {ours: theirs for theirs, ours in KINDS.items()}


def write(
    tables: Tables, truth: Truth, target: Path, tell: Callable[[float], None] = lambda _: None
) -> list[str]:
    """The names of the files in `target`, which is there whole or not at all. `tell` hears the
    share that is written.

    Raises UsageError where something is there already, StorageError where it cannot be written.
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
        shutil.rmtree(draft, ignore_errors=True)  # it is gone where all went well
    return written


def _fill(tables: Tables, truth: Truth, into: Path, tell: Callable[[float], None]) -> None:
    with (into / "sacct.txt").open("wb") as file:
        accounting.write(tables.jobs.collect(), file, tell)
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
    said: dict[str, Any] = {"columns": columns}
    said |= {f"values.{column}": table for column, table in values.items()}
    lines = [f'rows = "{rows}"']
    for name, table in said.items():
        lines += ["", f"[{name}]", *(f'"{key}" = "{value}"' for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n", "utf-8")
