"""Rows of result tables: one for each run, or for each point of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from outlast.plan.answers.parameter_sweep import PointResult, Sweep, SweepPoint
from outlast.plan.model.scenario import KEYS
from outlast.plan.simulate.replications import ROWS
from outlast.plan.simulate.result_tables import Kind, TableColumn, open_table, provenance
from outlast.plan.simulate.tallies import Tally

NAMES = ROWS.names or ()
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

    The file appears when all rows are written (result_tables.open_table).
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
    metadata is the first point's. Raises UsageError, StorageError (result_tables.open_table).
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
        | _row(one)
        for point, one in zip(wanted, found.points, strict=True)
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


def _row(one: PointResult) -> dict[str, Any]:
    row: dict[str, Any] = {
        "strategy": one.strategy,
        "why_not": one.why or None,
        "failed": one.failed or None,
    }
    if theory := one.theory:
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
    if runs := one.runs:
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
