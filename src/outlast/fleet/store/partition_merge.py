"""Merge of new records into a day's partition without duplicates."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import polars as pl

from outlast.fleet.record_tables import KIND_OF, Name, schema
from outlast.fleet.store.lake import UNFINISHED, LakePart, scan

_ATTEMPT = ("cluster", "job", "_began", "_held")
_OUTAGE = ("cluster", "node", "t_ns", "symptom", "detail")


class StaleRecords(NamedTuple):
    """Records of unfinished jobs for which better ones exist now.

    By the key of the attempt and `t_ns`; and the days of the lake that have some.
    """

    rows: pl.DataFrame
    days: tuple[str, ...]


class MergeCounts(NamedTuple):
    """Number of staged records, of those already known, and of replaced ones."""

    records: int
    again: int
    replaced: int


def find_stale(
    path: Path, kind: Name, parts: list[LakePart], staged: dict[str, list[Path]]
) -> StaleRecords:
    """Return the records of unfinished attempts that other records supersede.

    An attempt is a cluster's job that began (or, if it never did, was submitted) at one time. A
    finished record supersedes an unfinished one, and of those the latest wins.
    """
    none = pl.DataFrame(
        schema={
            "cluster": pl.String,
            "job": pl.String,
            "_began": pl.Int64,
            "_held": pl.Boolean,
            "t_ns": pl.Int64,
        }
    )
    if kind != "jobs":
        return StaleRecords(none, ())
    every = [file for files in staged.values() for file in files]
    running = [part for part in parts if part.unfinished]
    open_ = pl.concat([_attempts(_read(kind, every)), _attempts(scan(path, running, kind))]).filter(
        pl.col("state").is_in(UNFINISHED)
    )
    unfinished = open_.select(none.columns).unique().collect(engine="streaming")
    if not unfinished.height:
        return StaleRecords(none, ())
    keys = unfinished.select(_ATTEMPT).unique().lazy()
    ended = [
        _attempts(frame)
        .filter(~pl.col("state").is_in(UNFINISHED))
        .select(_ATTEMPT)
        .join(keys, on=_ATTEMPT, how="semi", nulls_equal=True)
        for frame in (_read(kind, every), scan(path, parts, kind))
    ]
    finished = pl.concat(ended).unique().collect(engine="streaming").with_columns(_done=True)
    latest = pl.col("t_ns") == pl.col("t_ns").max().over(_ATTEMPT)
    dead = unfinished.join(finished, on=_ATTEMPT, how="left", nulls_equal=True).filter(
        pl.col("_done").is_not_null() | ~latest
    )
    return StaleRecords(dead.select(none.columns), _days(path, running, dead))


def merge_partition(
    path: Path, kind: Name, had: LakePart | None, staged: Iterable[Path], stale: StaleRecords
) -> tuple[pl.DataFrame, MergeCounts]:
    """Return a day's records, by time, and the counts of the `staged` ones."""
    old = scan(path, [had] if had else [], kind).collect()
    new = _read(kind, staged).collect()
    both = pl.concat([old.with_columns(_new=False), new.with_columns(_new=True)])
    merged = both
    if kind == "jobs":
        merged = _drop_stale(both, stale.rows)
        replaced = old.height - merged.filter(~pl.col("_new")).height
        keyed = _attempts(merged.lazy()).collect()
        merged = keyed.unique([*_ATTEMPT], keep="last", maintain_order=True)
        merged = merged.drop("_began", "_held")
    elif kind == "outages":
        # An ended outage supersedes an open one.
        order = both.sort(pl.col("until_ns").is_null(), maintain_order=True)
        merged = order.unique(_OUTAGE, keep="first", maintain_order=True)
        replaced = _count_open(old) - _count_open(merged.filter(~pl.col("_new")))
    else:
        merged = both.unique(list(schema(KIND_OF[kind])), keep="first", maintain_order=True)
        replaced = 0
    counted = MergeCounts(new.height, both.height - merged.height - replaced, replaced)
    return merged.drop("_new").sort("t_ns", maintain_order=True), counted


def describe_part(kind: Name, day: str, identity: str, rows: pl.DataFrame) -> LakePart:
    """Return the manifest entry of a file."""
    last = rows["t_ns"].max()
    unfinished = 0
    if kind == "jobs":
        unfinished = rows.filter(pl.col("state").is_in(UNFINISHED)).height
    if kind == "outages":
        unfinished = rows["until_ns"].null_count()
        last = rows.select(pl.max_horizontal("t_ns", "until_ns").max()).item()
    return LakePart(
        kind=kind,
        day=day,
        id=identity,
        rows=rows.height,
        unfinished=unfinished,
        first_ns=rows.select(pl.col("t_ns").min()).item(),
        last_ns=int(str(last)),
    )


def _attempts(jobs: pl.LazyFrame) -> pl.LazyFrame:
    """Add the key of an attempt."""
    return jobs.with_columns(
        _began=pl.coalesce("start_ns", "submit_ns", "t_ns"), _held=pl.col("start_ns").is_not_null()
    )


def _drop_stale(jobs: pl.DataFrame, stale: pl.DataFrame) -> pl.DataFrame:
    if not stale.height:
        return jobs
    marked = stale.with_columns(_gone=True)
    found = _attempts(jobs.lazy()).join(
        marked.lazy(), on=[*_ATTEMPT, "t_ns"], how="left", nulls_equal=True, maintain_order="left"
    )
    current = found.filter(pl.col("_gone").is_null() | ~pl.col("state").is_in(UNFINISHED))
    return current.drop("_began", "_held", "_gone").collect()


def _count_open(outages: pl.DataFrame) -> int:
    return outages["until_ns"].null_count()


def _days(path: Path, running: list[LakePart], dead: pl.DataFrame) -> tuple[str, ...]:
    """Return the days of the parts that have stale records."""
    return tuple(
        part.day
        for part in running
        if _attempts(scan(path, [part], "jobs"))
        .filter(pl.col("state").is_in(UNFINISHED))
        .join(dead.lazy(), on=[*_ATTEMPT, "t_ns"], how="semi", nulls_equal=True)
        .head(1)
        .collect()
        .height
    )


def _read(kind: Name, files: Iterable[Path]) -> pl.LazyFrame:
    found = list(files)
    return pl.scan_ipc(found) if found else pl.LazyFrame(schema=schema(KIND_OF[kind]))
