"""Handmade attempts of jobs, in hours after a fixed time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
from msgspec.structs import replace

from outlast.fleet.lake_writer import open_writer
from outlast.fleet.record_tables import DAY_NS, NAMES, Tables, tables
from outlast.log_records import JobEnded, Record

T0_NS = 20_000 * DAY_NS
HOUR_NS = 3600 * 10**9
BLANK = JobEnded(
    t_ns=0, cluster="c", job="1", attempt=0, name="train", user="u", account="a", partition="p",
    qos="high", state="COMPLETED", exit_code=0, signal=0, submit_ns=None, eligible_ns=None,
    start_ns=None, nodes=1, gpus=8, hosts="", excluded="", failed_node="", priority=10, restarts=0,
)  # fmt: skip


def at_ns(hours: float) -> int:
    return T0_NS + round(hours * HOUR_NS)


def attempt(
    job: str, start_h: float | None, end_h: float, *, eligible_h: float | None = None, **more: Any
) -> JobEnded:
    """Return an attempt, by default eligible when it started."""
    ready_h = start_h if eligible_h is None else eligible_h
    ready_ns = None if ready_h is None else at_ns(ready_h)
    start_ns = None if start_h is None else at_ns(start_h)
    return replace(
        BLANK, job=job, t_ns=at_ns(end_h), start_ns=start_ns, eligible_ns=ready_ns,
        submit_ns=ready_ns, **more,
    )  # fmt: skip


def of(*records: Record, days: float = 28) -> Tables:
    return tables(records, T0_NS, T0_NS + round(days * DAY_NS))


def failed(*keys: tuple[str, int]) -> pl.LazyFrame:
    """Return the table of attempts that infrastructure ended, by job and number."""
    rows = [("c", job, number) for job, number in keys]
    schema = {"cluster": pl.String, "job": pl.String, "attempt": pl.Int64}
    return pl.LazyFrame(rows, schema=schema, orient="row")


def put(path: Path, made: Tables) -> None:
    """Write a lake with these records."""
    with open_writer(path) as writer:
        for name in NAMES.values():
            frame = getattr(made, name).collect()
            if len(frame):
                writer.add(name, frame)
        writer.commit([], "")
