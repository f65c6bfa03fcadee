"""`outlast plan simulate`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from outlast import quantities
from outlast.cli.output_stream import as_json, say
from outlast.cli.plan.answer_output import check_fields, remarks
from outlast.cli.plan.scenario_flags import Dask, Fields, File, Json, Seed, Workers
from outlast.cli.simulation_progress import execution_place, progress
from outlast.controller.save_schedule.schedule_explanation import span
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from outlast.plan.model.answer_values import format_count, format_quantity
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.scenario import Scenario, scenario_of
from outlast.plan.simulate import result_tables
from outlast.plan.simulate.part_executors import PartExecutor

if TYPE_CHECKING:
    import numpy as np

    from outlast.plan.answers.run_distribution import RunDistribution
    from outlast.plan.simulate.tallies import Tally

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

    How long, how dear, and what failures cost. All runs are at the failure rate
    as it is said; `outlast plan compare` is unsure of it, too.

    Parameters
    ----------
    strategy
        What happens after a failure.
    replications
        How many runs, as in 1000 or 100k. Memory does not grow with them.
    out
        Write a row for each run into this new file (.parquet, .arrow, .csv, .json).
    """
    path = result_tables.check_target(out)
    runs = quantities.count(f"--replications {replications}", replications)
    if not 1 <= runs <= REPLICATIONS_MAX:
        raise UsageError(f"--replications {replications}: from 1 to {REPLICATIONS_MAX:,}")
    scenario = scenario_of(check_fields(fields, simulate), file)
    found = _simulated(
        scenario, strategy, runs, seed, path, partial(execution_place, workers, dask)
    )
    _show(found, json=json)
    return EXIT_INTERRUPTED if found.interrupted else EXIT_DONE


def _simulated(
    scenario: Scenario,
    strategy: Strategy,
    runs: int,
    seed: int,
    path: Path | None,
    place: Callable[[float], AbstractContextManager[PartExecutor]],
) -> RunDistribution:
    from outlast.plan.answers.run_distribution import run_distribution
    from outlast.plan.simulate import result_rows  # the simulator takes a while to import
    from outlast.plan.simulate.replications import expected_failures
    from outlast.plan.simulate.simulated_job import job_of

    failures = runs * expected_failures(job_of(scenario, strategy))
    metadata = result_tables.provenance(scenario, strategy=strategy, seed=seed, replications=runs)
    with (
        place(failures) as where,
        progress("replications") as tell,
        result_rows.write_runs(path, metadata) as write,
    ):
        done = 0

        def take(some: np.ndarray) -> None:
            nonlocal done
            write(some)
            done += len(some)
            tell(done, runs)

        return run_distribution(
            scenario, strategy, runs, seed=seed, executor=where.executor,
            in_flight=where.in_flight, on_rows=take,
        )  # fmt: skip


def _show(found: RunDistribution, *, json: bool) -> None:
    if json:
        as_json(found)
        return
    say(Text(found.question, "bold"))
    say(Text(f"failures: {found.failures}", "dim"))
    memory_s = found.memory_interval_s
    memory = "" if memory_s is None else f", in memory every {span(memory_s)}"
    cut = "interrupted after " if found.interrupted else ""
    say(
        f"{cut}{format_count(found.replications, 'run')}, seed {found.seed}; a save every"
        f" {span(found.interval_s)}{memory}; {format_count(found.spares, 'spare')}"
    )
    grid = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("", "mean", "error", "P5", "median", "P95", "theory", "z"):
        grid.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in found.tallies:
        if one.high or one.mean:
            grid.add_row(*_row(one))
    say(grid)
    remarks(found)


def _row(one: Tally) -> tuple[str, ...]:
    unit = one.unit
    return (
        one.name,
        format_quantity(one.mean, unit),
        "" if not one.error else f"{100 * one.error / one.mean:.2f} %",
        *(format_quantity(each, unit) for each in (one.low, one.middle, one.high)),
        "" if one.predicted is None else format_quantity(one.predicted, unit),
        "" if one.z is None else f"{one.z:+.1f}",
    )
