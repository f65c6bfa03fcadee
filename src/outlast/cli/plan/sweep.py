"""`outlast plan sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.text import Text

from outlast import quantities
from outlast.cli.output_stream import echo, print_json
from outlast.cli.plan.scenario_command import (
    Dask,
    Fields,
    File,
    Json,
    Seed,
    Workers,
    check_fields,
    check_picture,
    execution_place,
    remarks,
)
from outlast.cli.progress_bars import count_progress
from outlast.controller.save_schedule.save_intervals import span
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER_ERROR
from outlast.plan.answers.parameter_sweep import (
    PointResult,
    Sweep,
    SweepPoint,
    strategies_of,
    sweep_points,
)
from outlast.plan.answers.parameter_sweep import sweep as swept
from outlast.plan.model.answer_values import format_count
from outlast.plan.model.answer_values import format_quantity as said
from outlast.plan.simulate import result_tables
from outlast.terminal_tables import number_column, table, text_column


def sweep(
    file: File = None,
    /,
    *,
    over: Annotated[tuple[str, ...], Parameter(negative=())],
    strategy: str = "checkpoint-restart",
    replications: str = "100",
    seed: Seed = 0,
    out: Path | None = None,
    workers: Workers = None,
    dask: Dask = None,
    json: Json = False,
    figure: Path | None = None,
    measure: Literal["goodput", "dollars"] = "goodput",
    **fields: Fields,
) -> int:
    """Vary one or two fields of a scenario.

    Prints the formulas' results at each point, and simulated runs.

    Parameters
    ----------
    over
        Field with its values, for example gpus=1k,4k,16k, or gpus=1k..1M/7 for seven values with
        logarithmic steps. Give it twice for two fields.
    strategy
        One strategy, several (outlast,migrate), or all.
    replications
        Number of simulated runs per point, for example 100 or 1k. 0: formulas only.
    out
        Write one row per point into this new file (.parquet, .arrow, .csv, .json).
    figure
        Draw lines (one field) or a map (two fields) into this file (.svg, .png, .pdf).
    measure
        Quantity of the figure.
    """
    path, picture = result_tables.check_target(out), check_picture(figure)
    runs = quantities.count(f"--replications {replications}", replications)
    points = sweep_points(check_fields(fields, sweep), file, over, strategies_of(strategy))
    with (
        execution_place(workers, dask, _failures(points, runs)) as where,
        count_progress("runs") as advance,
    ):
        result = swept(
            points,
            runs,
            seed=seed,
            executor=where.executor,
            in_flight=where.in_flight,
            on_progress=advance,
        )
    _show(result, json=json)
    if path:
        from outlast.plan.simulate import result_rows  # numpy takes a while to import

        result_rows.write_points(path, points, result)
    if picture:
        from outlast.plan.figures.sweep_figure import draw

        draw(points, result, measure, picture)
    if any(point.failed for point in result.points):
        return EXIT_USER_ERROR
    return EXIT_INTERRUPTED if result.interrupted else EXIT_DONE


def _failures(wanted: list[SweepPoint], runs: int) -> float:
    """Estimate the failures to simulate, before theory has computed them."""
    each = (
        2 * point.scenario.failures.per_gpu_s * point.scenario.gpus * point.scenario.work_s
        for point in wanted
    )
    return runs * sum(each)


def _show(result: Sweep, *, json: bool) -> None:
    if json:
        print_json(result)
        return
    alone = result.strategies[0] if len(result.strategies) == 1 else None
    runs = f"{format_count(result.requested, 'run')} each, seed {result.seed}"
    how = runs if result.requested else "by formulas only"
    echo(Text(result.question, "bold"))
    echo(Text(f"failures: {result.failures}", "dim"))
    echo(f"{f'{alone}: ' if alone else ''}{format_count(len(result.points), 'point')}, {how}")
    figures = ("saves\nevery", "goodput", *["90 % of runs"] * bool(result.requested), "costs")
    strategy = [text_column("strategy", wrap=False)] * (not alone)
    grid = table(*map(number_column, result.over), *strategy, *map(number_column, figures))
    for point in result.points:
        named = (*point.values.values(), *[point.strategy] * (not alone))
        grid.add_row(*named, *_cells(point, runs=bool(result.requested)))
    echo(grid)
    remarks(result)


def _cells(point: PointResult, *, runs: bool) -> list[str]:
    if point.theory is None:
        return ["-"]
    costs = point.runs.costs.middle if point.runs else point.theory.usd
    band = ""
    if point.runs:
        low, high = (
            said(each, "share") for each in (point.runs.goodput.low, point.runs.goodput.high)
        )
        band = f"{low.removesuffix(' %')} to {high}"
    goodput = said(point.theory.outcome.goodput, "share")
    return [span(point.theory.interval_s), goodput, *[band] * runs, said(costs, "USD")]
