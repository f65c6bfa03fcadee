"""Commands that simulate: `outlast plan simulate`, `story`, `sweep`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from rich.text import Text

from outlast import quantities
from outlast.cli.output_stream import count_progress, echo, print_json
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
from outlast.controller.save_schedule.save_intervals import span
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER_ERROR, UsageError
from outlast.plan.model.answer_values import answer, format_count, format_quantity
from outlast.plan.model.ladder_costs import Strategy, matters
from outlast.plan.model.scenario import Scenario, scenario_of
from outlast.plan.model.strategy_prediction import predict
from outlast.process_pool import PartExecutor, interruption
from outlast.terminal_tables import number_column, table, text_column

if TYPE_CHECKING:
    import numpy as np

    from outlast.plan.answers.parameter_sweep import PointResult, Sweep, SweepPoint
    from outlast.plan.answers.run_distribution import RunDistribution, Tally
    from outlast.plan.simulate.narrator import NarratedRun

REPLICATIONS_MAX = 1_000_000_000


def simulate(
    file: File = None,
    /,
    *,
    strategy: Strategy = "checkpoint-restart",
    replications: str = "1000",
    seed: Seed = 0,
    out: Path | None = None,
    workers: Workers = None,
    dask: Dask = None,
    json: Json = False,
    **fields: Fields,
) -> int:
    """Simulate many runs of one strategy, and print quantiles.

    Prints duration, price and the cost of failures. All runs have the given failure
    rate; `outlast plan compare` also varies the rate within its uncertainty.

    Parameters
    ----------
    strategy
        Recovery strategy after a failure.
    replications
        Number of runs, for example 1000 or 100k. Memory use does not depend on it.
    out
        Write one row per run into this new file (.parquet, .arrow, .csv, .json).
    """
    from outlast.plan.simulate import result_tables

    path = result_tables.check_target(out)
    runs = quantities.count(f"--replications {replications}", replications)
    if not 1 <= runs <= REPLICATIONS_MAX:
        raise UsageError(f"--replications {replications}: from 1 to {REPLICATIONS_MAX:,}")
    scenario = scenario_of(check_fields(fields, simulate), file)
    distribution = _simulated(
        scenario, strategy, runs, seed, path, partial(execution_place, workers, dask)
    )
    _show_runs(distribution, json=json)
    return EXIT_INTERRUPTED if distribution.interrupted else EXIT_DONE


def _simulated(
    scenario: Scenario,
    strategy: Strategy,
    runs: int,
    seed: int,
    path: Path | None,
    place: Callable[[float], AbstractContextManager[PartExecutor]],
) -> RunDistribution:
    from outlast.plan.answers.run_distribution import run_distribution
    from outlast.plan.simulate import result_tables
    from outlast.plan.simulate.replications import expected_failures
    from outlast.plan.simulate.simulated_job import job_of

    failures = runs * expected_failures(job_of(scenario, strategy))
    metadata = result_tables.provenance(scenario, strategy=strategy, seed=seed, replications=runs)
    with (
        place(failures) as where,
        count_progress("replications") as advance,
        result_tables.write_runs(path, metadata) as write,
    ):
        done = 0

        def take(rows: np.ndarray) -> None:
            nonlocal done
            write(rows)
            done += len(rows)
            advance(done, runs)

        return run_distribution(
            scenario,
            strategy,
            runs,
            seed=seed,
            executor=where.executor,
            in_flight=where.in_flight,
            on_rows=take,
        )


def _show_runs(distribution: RunDistribution, *, json: bool) -> None:
    if json:
        print_json(distribution)
        return
    echo(Text(distribution.question, "bold"))
    echo(Text(f"failures: {distribution.failures}", "dim"))
    memory_s = distribution.memory_interval_s
    memory = "" if memory_s is None else f", in memory every {span(memory_s)}"
    cut = "interrupted after " if distribution.interrupted else ""
    echo(
        f"{cut}{format_count(distribution.replications, 'run')}, seed {distribution.seed};"
        f" a save every {span(distribution.interval_s)}{memory};"
        f" {format_count(distribution.spares, 'spare')}"
    )
    figures = ("mean", "error", "P5", "median", "P95", "theory", "z")
    grid = table(text_column(wrap=False), *(number_column(name, wrap=False) for name in figures))
    for tally in distribution.tallies:
        if tally.high or tally.mean:
            grid.add_row(*_tally_row(tally))
    echo(grid)
    remarks(distribution)


def _tally_row(tally: Tally) -> tuple[str, ...]:
    unit = tally.unit
    return (
        tally.name,
        format_quantity(tally.mean, unit),
        "" if not tally.error else f"{100 * tally.error / tally.mean:.2f} %",
        *(format_quantity(each, unit) for each in (tally.low, tally.middle, tally.high)),
        "" if tally.predicted is None else format_quantity(tally.predicted, unit),
        "" if tally.z is None else f"{tally.z:+.1f}",
    )


_OUTCOME = {"done": "done after", "gave_up": "gave up, after", "interrupted": "not done, after"}


def story(
    file: File = None,
    /,
    *,
    to: Path,
    strategy: Strategy = "outlast",
    seed: int = 0,
    replication: int = 0,
    json: Json = False,
    **fields: Fields,
) -> int:
    """Simulate one run as a run directory for `outlast explain`.

    `outlast explain`, `summary` and `events` read the directory. Decisions are made
    by the controller of `outlast run`. The run is one of those of `outlast plan
    simulate` with the same seed.

    Parameters
    ----------
    to
        New run directory to write.
    strategy
        Recovery strategy after a failure; all but drop are possible.
    seed
        Random seed. The same seed and replication give the same run, byte for byte.
    replication
        Number of the run with that seed, counted from 0.
    """
    from outlast.plan.simulate.narrator import narrate  # NumPy, which no help text needs
    from outlast.plan.simulate.simulated_job import bound_failures, job_of

    if replication < 0:
        raise UsageError(f"--replication {replication}: must be 0 or more")
    if strategy == "drop":
        raise UsageError(
            "--strategy drop: the controller of `outlast run` cannot continue with fewer"
            " replicas; nothing was written; `outlast plan simulate` simulates such runs"
        )
    _must_be_new(to)
    scenario = scenario_of(check_fields(fields, story), file)
    job = bound_failures(job_of(scenario, strategy), predict(scenario, strategy))
    with interruption() as interrupted:
        narrated = narrate(job, seed=seed, replication=replication, run_dir=to, stopped=interrupted)
        code = EXIT_INTERRUPTED if interrupted() and narrated.outcome != "done" else EXIT_DONE
    if json:
        print_json({"run_dir": str(to), **narrated._asdict()})
        return code
    _show_story(narrated, to)
    remarks(answer("", scenario, [], [], matters(strategy) | {"step"}))
    return code


def _must_be_new(to: Path) -> None:
    try:
        if not to.exists() or (to.is_dir() and not any(to.iterdir())):
            return
    except OSError as error:
        raise UsageError(f"--to {to}: {error.strerror}; nothing was written") from error
    raise UsageError(f"--to {to} exists already; nothing was written; give a new directory")


def _show_story(narrated: NarratedRun, to: Path) -> None:
    tallies = narrated.tallies
    echo(Text(f"{_OUTCOME[narrated.outcome]} {format_quantity(narrated.ended_s, 's')}", "bold"))
    if narrated.reason:
        echo(narrated.reason)
    ways = ", ".join(f"{count} x {rung}" for rung, count in narrated.rungs.items())
    stops = format_count(int(tallies["incidents"]), "stop")
    echo(
        f"{format_count(int(tallies['failures']), 'failure')}, {stops}"
        + (f": {ways}" if ways else "")
    )
    echo(f"read it: outlast explain {to}; outlast summary {to}")


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
    from outlast.plan.answers import parameter_sweep
    from outlast.plan.simulate import result_tables

    path, picture = result_tables.check_target(out), check_picture(figure)
    runs = quantities.count(f"--replications {replications}", replications)
    strategies = parameter_sweep.strategies_of(strategy)
    points = parameter_sweep.sweep_points(check_fields(fields, sweep), file, over, strategies)
    with (
        execution_place(workers, dask, _failures(points, runs)) as where,
        count_progress("runs") as advance,
    ):
        result = parameter_sweep.sweep(
            points,
            runs,
            seed=seed,
            executor=where.executor,
            in_flight=where.in_flight,
            on_progress=advance,
        )
    _show_sweep(result, json=json)
    if path:
        result_tables.write_points(path, points, result)
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


def _show_sweep(result: Sweep, *, json: bool) -> None:
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
            format_quantity(each, "share")
            for each in (point.runs.goodput.low, point.runs.goodput.high)
        )
        band = f"{low.removesuffix(' %')} to {high}"
    goodput = format_quantity(point.theory.outcome.goodput, "share")
    return [span(point.theory.interval_s), goodput, *[band] * runs, format_quantity(costs, "USD")]
