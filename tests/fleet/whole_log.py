"""All records of a small log."""

from __future__ import annotations

import polars as pl

from outlast.fleet.formats.log_reading import LogReading, RecordBatch, Reject
from outlast.fleet.record_tables import Name


def read_whole(reading: LogReading) -> RecordBatch:
    """Join the batches of a log; check that every row is accounted for."""
    frames: dict[Name, list[pl.DataFrame]] = {}
    rejects: list[Reject] = []
    for part in reading:
        for name, frame in part.tables.items():
            frames.setdefault(name, []).append(frame)
        rejects += part.rejects
    reading.totals.check()
    return RecordBatch({name: pl.concat(some) for name, some in frames.items()}, rejects)
