"""Tables of simulated runs and of sweeps, as Parquet, Arrow, CSV or JSON by their suffix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from outlast import __version__
from outlast.atomic_files import open_draft, refuse_existing
from outlast.errors import StorageError, UsageError
from outlast.plan.answers.parameter_sweep import PointResult, Sweep, SweepPoint
from outlast.plan.answers.run_distribution import Tally
from outlast.plan.model.scenario import KEYS, Scenario
from outlast.plan.simulate.simulated_job import TALLIES

SUFFIXES = (".parquet", ".arrow", ".csv", ".json")
BATCH_ROWS = 32_768
Kind = Literal["number", "count", "text", "yes or no"]


class TableColumn(NamedTuple):
    """Column of a table; its `name` carries the unit. Any value may be missing (None)."""

    name: str
    kind: Kind


class ResultTable:
    """Buffer of rows that are written in batches."""

    def __init__(self, sink: _Sink, schema: Any) -> None:
        self._sink = sink
        self._schema = schema
        self._waiting: list[Any] = []
        self.rows = 0

    def write(self, values: Mapping[str, Any]) -> None:
        """Add rows by column: a list or a numpy array each."""
        import pyarrow as pa

        arrays = [pa.array(values[field.name], field.type) for field in self._schema]
        self._waiting.append(pa.table(arrays, schema=self._schema))
        self.rows += self._waiting[-1].num_rows
        if sum(each.num_rows for each in self._waiting) >= BATCH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the waiting rows to the sink."""
        import pyarrow as pa

        if self._waiting:
            self._sink.write_table(pa.concat_tables(self._waiting).combine_chunks())
            self._waiting = []


def provenance(scenario: Scenario, **extra: Any) -> dict[str, Any]:
    """Return a table's metadata: the origin of its rows. Infinity becomes null."""
    fields = msgspec.to_builtins(scenario)
    fields["assumed"] = sorted(scenario.assumed)
    return {"outlast_version": __version__, **extra, "scenario": fields}


def check_target(path: Path | None) -> Path | None:
    """Check the path of a table before anything is computed. Raises UsageError."""
    if path is None:
        return None
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--out {path}: the suffix must be one of {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--out {path}: there is no directory {path.absolute().parent}")
    refuse_existing(path)
    return path


@contextmanager
def open_table(
    path: Path, columns: Sequence[TableColumn], metadata: Mapping[str, Any]
) -> Iterator[ResultTable]:
    """Yield a table to write into, which appears at `path` complete or not at all.

    `metadata` goes into the schema, JSON values by key; a JSON file has it beside its `rows`; CSV
    has no place for it. Raises UsageError where the file exists, StorageError where it cannot be
    written.
    """
    refuse_existing(path)
    try:
        with open_draft(path, new=True) as draft:
            schema = _schema(columns, metadata)
            sink = _open(draft, path.suffix, schema, metadata)
            try:
                table = ResultTable(sink, schema)
                yield table
                table.flush()
            finally:
                sink.close()
    except OSError as error:  # also raised by pyarrow
        raise StorageError(
            f"{path}: could not be written: {error.strerror or error}; nothing was kept of it"
        ) from error


class _Sink(Protocol):
    def write_table(self, table: Any) -> None: ...

    def close(self) -> None: ...


class _Json:
    """Sink of one JSON object, with a row a line."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._file = path.open("wb")
        self._between = b""
        self._file.write(msgspec.json.encode(metadata)[:-1] + b', "rows": [')

    def write_table(self, table: Any) -> None:
        for row in table.to_pylist():
            self._file.write(self._between + b"\n" + msgspec.json.encode(row))
            self._between = b","

    def close(self) -> None:
        with self._file:
            self._file.write(b"\n]}\n")


def _open(path: Path, suffix: str, schema: Any, metadata: Mapping[str, Any]) -> _Sink:
    if suffix == ".json":
        return _Json(path, metadata)
    if suffix == ".csv":
        from pyarrow.csv import CSVWriter

        return CSVWriter(str(path), schema)
    if suffix == ".arrow":
        from pyarrow.ipc import new_file

        return new_file(str(path), schema)
    from pyarrow.parquet import ParquetWriter

    return ParquetWriter(str(path), schema, compression="zstd")


def _schema(columns: Sequence[TableColumn], metadata: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    types = {
        "number": pa.float64(),
        "count": pa.int64(),
        "text": pa.string(),
        "yes or no": pa.bool_(),
    }
    return pa.schema(
        [(column.name, types[column.kind]) for column in columns],
        metadata={key: msgspec.json.encode(value) for key, value in metadata.items()},
    )


NAMES = tuple(TALLIES)
_THEORY: tuple[tuple[str, Kind], ...] = (
    ("save_every_s", "number"), ("memory_every_s", "number"), ("stand_by", "count"),
    ("exact", "yes or no"), ("theory_goodput", "number"), ("theory_wall_s", "number"),
    ("theory_usd", "number"),
)  # fmt: skip
_SPREAD = ("mean", "error", "p5", "p50", "p95")
_MEANS = tuple(name for name in NAMES if name != "wall_s")


@contextmanager
def write_runs(
    path: Path | None, metadata: Mapping[str, Any]
) -> Iterator[Callable[[np.ndarray], None]]:
    """Yield a function that appends rows of runs to the table at `path`, if there is one.

    The file appears when all rows are written (`open_table`).
    """
    if path is None:
        yield lambda _: None
        return
    with open_table(
        path, [TableColumn("replication", "count"), *map(_column, NAMES)], metadata
    ) as table:
        yield lambda rows: table.write(
            {"replication": np.arange(table.rows, table.rows + len(rows))}
            | {name: rows[name] for name in NAMES}
        )


def write_points(path: Path, wanted: Sequence[SweepPoint], found: Sweep) -> None:
    """Write a row for each point: its values, theory and runs.

    Values as text and, where the scenario has them as numbers, in their unit. The scenario in the
    metadata is the first point's. Raises UsageError, StorageError (`open_table`).
    """
    varied = [key for key in found.over if isinstance(point_value(wanted[0], key), int | float)]
    columns = [
        *(TableColumn(_text(key), "text") for key in found.over),
        *(TableColumn(KEYS[key].name, "number") for key in varied),
        TableColumn("strategy", "text"),
        TableColumn("why_not", "text"),
        TableColumn("failed", "text"),
        *(TableColumn(*each) for each in _THEORY),
        TableColumn("runs", "count"),
        TableColumn("unfinished", "count"),
        *(
            TableColumn(f"{at}_{name}", "number")
            for name in ("wall_s", "goodput", "usd", "failures")
            for at in _SPREAD
        ),
        TableColumn("z", "number"),
        *(TableColumn(f"mean_{name}", "number") for name in _MEANS if name != "failures"),
    ]
    rows = [
        {_text(key): text for key, text in point.values.items()}
        | {KEYS[key].name: point_value(point, key) for key in varied}
        | _row(result)
        for point, result in zip(wanted, found.points, strict=True)
    ]
    metadata = provenance(
        wanted[0].scenario, seed=found.seed, replications=found.requested, over=found.over
    )
    with open_table(path, columns, metadata) as table:
        table.write({each.name: [row.get(each.name) for row in rows] for each in columns})


def point_value(point: SweepPoint, key: str) -> float | None:
    """Return the value of a varied field in its unit; None where it is no number."""
    value = getattr(point.scenario, KEYS[key].name, None)
    return value if isinstance(value, int | float) else None


def _row(result: PointResult) -> dict[str, Any]:
    row: dict[str, Any] = {
        "strategy": result.strategy,
        "why_not": result.why or None,
        "failed": result.failed or None,
    }
    if theory := result.theory:
        values = (
            theory.interval_s,
            theory.memory_interval_s,
            theory.spares,
            theory.how == "exact",
            theory.outcome.goodput,
            theory.wall_s,
            theory.usd,
        )
        row |= dict(zip((name for name, _ in _THEORY), values, strict=True))
    if runs := result.runs:
        row |= {"runs": runs.replications, "unfinished": runs.unfinished, "z": runs.takes.z}
        row |= _spread("wall_s", runs.takes) | _spread("goodput", runs.goodput)
        row |= _spread("usd", runs.costs) | _spread("failures", runs.failures)
        row |= {f"mean_{name}": value for name, value in runs.means.items()}
    return row


def _spread(name: str, of: Tally) -> dict[str, float | None]:
    values = (of.mean, of.error, of.low, of.middle, of.high)
    return {f"{at}_{name}": value for at, value in zip(_SPREAD, values, strict=True)}


def _column(name: str) -> TableColumn:
    return TableColumn(name, "number" if name.endswith("_s") else "count")


def _text(key: str) -> str:
    return f"{key.replace('-', '_')}_text"
