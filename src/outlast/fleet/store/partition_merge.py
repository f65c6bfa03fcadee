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
    """Records of jobs that were not finished when they were read, of which more is known now: by
    the key of the attempt and `t_ns`; and the days of the lake that have some."""

    rows: pl.DataFrame
    days: tuple[str, ...]


class MergeCounts(NamedTuple):
    records: int
    again: int
    replaced: int


def find_stale(
    path: Path, kind: Name, parts: list[LakePart], staged: dict[str, list[Path]]
) -> StaleRecords:
    """An attempt is a cluster's job that began (or, if it never did, was asked for) at one time.
    A finished record is better than an unfinished one, and of those the latest is best."""
    none = pl.DataFrame(schema={"cluster": pl.String, "job": pl.String, "_began": pl.Int64,
                                "_held": pl.Boolean, "t_ns": pl.Int64})  # fmt: skip
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
    path: Path, kind: Name, had: LakePart | None, staged: Iterable[Path], gone: StaleRecords
) -> tuple[pl.DataFrame, MergeCounts]:
    """A day's records, by time, and what came of those that were `staged`."""
    old = scan(path, [had] if had else [], kind).collect()
    new = _read(kind, staged).collect()
    both = pl.concat([old.with_columns(_new=False), new.with_columns(_new=True)])
    kept = both
    if kind == "jobs":
        kept = _without(both, gone.rows)
        replaced = old.height - kept.filter(~pl.col("_new")).height
        keyed = _attempts(kept.lazy()).collect()
        kept = keyed.unique([*_ATTEMPT], keep="last", maintain_order=True)
        kept = kept.drop("_began", "_held")
    elif kind == "outages":
        # An outage that has ended is known better than one that lasts.
        order = both.sort(pl.col("until_ns").is_null(), maintain_order=True)
        kept = order.unique(_OUTAGE, keep="first", maintain_order=True)
        replaced = _opened(old) - _opened(kept.filter(~pl.col("_new")))
    else:
        kept = both.unique(list(schema(KIND_OF[kind])), keep="first", maintain_order=True)
        replaced = 0
    counted = MergeCounts(new.height, both.height - kept.height - replaced, replaced)
    return kept.drop("_new").sort("t_ns", maintain_order=True), counted


def describe_part(kind: Name, day: str, identity: str, rows: pl.DataFrame) -> LakePart:
    """What lake.json says of a file."""
    last = rows["t_ns"].max()
    unfinished = 0
    if kind == "jobs":
        unfinished = rows.filter(pl.col("state").is_in(UNFINISHED)).height
    if kind == "outages":
        unfinished = rows["until_ns"].null_count()
        last = rows.select(pl.max_horizontal("t_ns", "until_ns").max()).item()
    return LakePart(
        kind=kind, day=day, id=identity, rows=rows.height, unfinished=unfinished,
        first_ns=rows.select(pl.col("t_ns").min()).item(), last_ns=int(str(last)),
    )  # fmt: skip


def _attempts(jobs: pl.LazyFrame) -> pl.LazyFrame:
    """With the key of an attempt."""
    return jobs.with_columns(
        _began=pl.coalesce("start_ns", "submit_ns", "t_ns"), _held=pl.col("start_ns").is_not_null()
    )


def _without(jobs: pl.DataFrame, gone: pl.DataFrame) -> pl.DataFrame:
    if not gone.height:
        return jobs
    marked = gone.with_columns(_gone=True)
    found = _attempts(jobs.lazy()).join(
        marked.lazy(), on=[*_ATTEMPT, "t_ns"], how="left", nulls_equal=True, maintain_order="left"
    )
    kept = found.filter(pl.col("_gone").is_null() | ~pl.col("state").is_in(UNFINISHED))
    return kept.drop("_began", "_held", "_gone").collect()


def _opened(outages: pl.DataFrame) -> int:
    return outages["until_ns"].null_count()


def _days(path: Path, running: list[LakePart], dead: pl.DataFrame) -> tuple[str, ...]:
    """Of the parts that have records which go."""
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
