"""A small sacct log with one field changed, and its records."""

from pathlib import Path
from typing import Any

import polars as pl

from outlast.fleet.formats import sacct
from outlast.fleet.formats.log_reading import ReadTotals, RecordBatch

HEADER = "JobID|JobName|State|ExitCode|Submit|Start|End|ElapsedRaw|NNodes|NodeList|AllocTRES"
ROW = (
    "7|train|COMPLETED|0:0|2024-05-17T10:00:00|2024-05-17T10:00:10|2024-05-17T11:00:10|3600|2"
    "|n[1-2]|cpu=96,gres/gpu:a100=16,gres/gpu=16,node=2"
)
TEN_S = 1_715_940_000  # 2024-05-17T10:00:00Z


def row(**changes: str) -> str:
    names = HEADER.lower().split("|")
    return "|".join(
        changes.get(name, field) for name, field in zip(names, ROW.split("|"), strict=True)
    )


def read(folder: Path, text: str | bytes, **options: Any) -> tuple[RecordBatch, ReadTotals]:
    path = folder / "sacct.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    reading = sacct.read_sacct(path, sacct.SacctOptions(**options))
    parts = list(reading)
    reading.totals.check()
    tables = [part.tables["jobs"] for part in parts if "jobs" in part.tables]
    assert reading.totals.records["jobs"] == sum(table.height for table in tables)
    jobs = {"jobs": pl.concat(tables)} if tables else {}
    return RecordBatch(jobs, [one for part in parts for one in part.rejects]), reading.totals


def jobs(folder: Path, *rows: str, **options: Any) -> list[dict[str, Any]]:
    part, totals = read(folder, "\n".join([HEADER, *rows, ""]), **options)
    assert totals.rows == len(rows)
    assert not part.rejects, part.rejects
    return part.tables["jobs"].to_dicts() if part.tables else []
