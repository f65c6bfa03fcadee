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
from outlast.cli.plan.flags import Dask, Fields, File, Json, Seed, Workers
from outlast.cli.plan.running import place, progress
from outlast.cli.plan.saying import known, remarks
from outlast.cli.stream import as_json, say
from outlast.controller.save_schedule.schedule_explanation import span
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from outlast.plan import tables
from outlast.plan.ladders import Strategy
from outlast.plan.pools import Place
from outlast.plan.scenario import Scenario, scenario_of
from outlast.plan.words import figure, many

if TYPE_CHECKING:
    import numpy as np

    from outlast.plan.spread import Spread
    from outlast.plan.tallies import Tally

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
    """Many runs of one strategy, by quantiles.

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
    path = tables.checked(out)
    runs = quantities.count(f"--replications {replications}", replications)
    if not 1 <= runs <= REPLICATIONS_MAX:
        raise UsageError(f"--replications {replications}: from 1 to {REPLICATIONS_MAX:,}")
    scenario = scenario_of(known(fields, simulate), file)
    found = _simulated(scenario, strategy, runs, seed, path, partial(place, workers, dask))
    _show(found, json=json)
    return EXIT_INTERRUPTED if found.interrupted else EXIT_DONE


def _simulated(
    scenario: Scenario,
    strategy: Strategy,
    runs: int,
    seed: int,
    path: Path | None,
    place: Callable[[float], AbstractContextManager[Place]],
) -> Spread:
    from outlast.plan import rows  # the simulator takes a while to import
    from outlast.plan.parts import expected_failures
    from outlast.plan.simulated import job_of
    from outlast.plan.spread import spread

    failures = runs * expected_failures(job_of(scenario, strategy))
    said = tables.about(scenario, strategy=strategy, seed=seed, replications=runs)
    with (
        place(failures) as where,
        progress("replications") as tell,
        rows.runs(path, said) as write,
    ):
        done = 0

        def take(some: np.ndarray) -> None:
            nonlocal done
            write(some)
            done += len(some)
            tell(done, runs)

        return spread(
            scenario, strategy, runs, seed=seed, executor=where.executor,
            in_flight=where.in_flight, on_rows=take,
        )  # fmt: skip


def _show(found: Spread, *, json: bool) -> None:
    if json:
        as_json(found)
        return
    say(Text(found.question, "bold"))
    say(Text(f"failures: {found.failures}", "dim"))
    memory_s = found.memory_interval_s
    memory = "" if memory_s is None else f", in memory every {span(memory_s)}"
    cut = "interrupted after " if found.interrupted else ""
    say(
        f"{cut}{many(found.replications, 'run')}, seed {found.seed}; a save every"
        f" {span(found.interval_s)}{memory}; {many(found.spares, 'spare')}"
    )
    shown = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("", "mean", "error", "P5", "median", "P95", "theory", "z"):
        shown.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in found.tallies:
        if one.high or one.mean:
            shown.add_row(*_row(one))
    say(shown)
    remarks(found)


def _row(one: Tally) -> tuple[str, ...]:
    unit = one.unit
    return (
        one.name,
        figure(one.mean, unit),
        "" if not one.error else f"{100 * one.error / one.mean:.2f} %",
        *(figure(each, unit) for each in (one.low, one.middle, one.high)),
        "" if one.predicted is None else figure(one.predicted, unit),
        "" if one.z is None else f"{one.z:+.1f}",
    )
