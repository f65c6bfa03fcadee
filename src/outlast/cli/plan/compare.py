"""`outlast plan compare`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from outlast import quantities
from outlast.cli.output_stream import echo, print_json
from outlast.cli.plan.answer_output import band, check_fields, check_picture, remarks
from outlast.cli.plan.scenario_flags import Dask, Fields, File, Json, Seed, Workers, execution_place
from outlast.cli.progress_bars import count_progress
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from outlast.plan.answers.measured_run import RunComparison, Verdict
from outlast.plan.answers.strategy_comparison import StrategyComparison
from outlast.plan.model.answer_values import Quantity, format_count, format_quantity
from outlast.plan.model.rates import read_rates
from outlast.plan.model.scenario import Scenario, scenario_of, span
from outlast.plan.simulate.ensembles import CAUSES
from outlast.terminal_tables import number_column, table, text_column

if TYPE_CHECKING:
    from outlast.plan.answers.measured_run import MeasuredRun
    from outlast.plan.answers.strategy_comparison import ComparisonRequest

Picture = Literal["waterfall", "scale", "phases", "fan"]
REPLICATIONS_MAX = 200_000  # of each strategy: a quarter of a GB


def compare(
    file: File = None,
    /,
    *,
    start: str = "",
    by: str = "",
    within: str = "",
    run: Path | None = None,
    seed: Seed = 0,
    replications: str | None = None,
    workers: Workers = None,
    dask: Dask = None,
    json: Json = False,
    figure: Path | None = None,
    picture: Picture = "waterfall",
    **fields: Fields,
) -> int:
    """Compare the recovery strategies on one scenario.

    All strategies see the same simulated failures. Formulas are printed beside the
    simulation.

    Parameters
    ----------
    start
        Start date of the run, for example 2027-01-31. The answer then has finish dates.
    by
        Date for which to print the probability that the run is done. Needs --start.
    within
        Duration for which to print the same probability, for example 60d.
    run
        Directory of a real run, to compare with its prediction. Fields that are not given are taken
        from the run: GPUs (each a node and a replica), kinds of failures, times of recoveries,
        saves and steps.
    replications
        Number of simulated runs per strategy, for example 1000 or 10k (default: as many as take
        some seconds).
    figure
        Draw the figure into this file (.svg, .png, .pdf).
    picture
        Figure to draw. waterfall: time by category. scale: goodput by number of GPUs. phases: the
        cheapest strategy by GPUs and restart time. fan: progress over time with its uncertainty.
    """
    path = check_picture(figure)
    measured = _measured_run(run) if run else None
    check_fields(fields, compare)
    scenario = scenario_of(_with(fields, measured) if measured and not file else fields, file)
    from outlast.plan.answers.strategy_comparison import (
        ComparisonRequest,
        expected_simulated_failures,
    )
    from outlast.plan.answers.strategy_comparison import compare as compared

    begins, deadline_s = _dates(start, by, within)
    request = ComparisonRequest(
        seed=seed, replications=_several(replications), start=begins, within_s=deadline_s
    )
    failures = expected_simulated_failures(scenario, request.replications)
    with execution_place(workers, dask, failures) as where, count_progress("simulated") as advance:
        found = compared(scenario, request, measured=measured, place=where, on_progress=advance)
    show_comparison(found, json=json)
    if path and found.contenders:
        _draw(picture, path, scenario, found, request, measured)
    return EXIT_INTERRUPTED if found.interrupted else EXIT_DONE


def _draw(
    picture: Picture,
    path: Path,
    scenario: Scenario,
    found: StrategyComparison,
    request: ComparisonRequest,
    measured: MeasuredRun | None,
) -> None:
    from outlast.plan.figures import comparison_figures, scale_figures

    if picture == "scale":
        scale_figures.draw_scale(scenario, path, request.seed)
    elif picture == "phases":
        scale_figures.draw_phases(scenario, path)
    elif picture == "fan":
        comparison_figures.draw_fan(scenario, found, path, start=request.start, measured=measured)
    else:
        comparison_figures.draw_waterfall(scenario, found, path)


def _several(replications: str | None) -> int | None:
    if replications is None:
        return None
    runs = quantities.count(f"--replications {replications}", replications)
    if not 1 <= runs <= REPLICATIONS_MAX:
        raise UsageError(f"--replications {replications}: from 1 to {REPLICATIONS_MAX:,}")
    return runs


def _measured_run(run_dir: Path) -> MeasuredRun:
    from outlast.plan.answers.measured_run import read_measured_run

    return read_measured_run(run_dir)


def _with(fields: dict[str, str], measured: MeasuredRun) -> dict[str, str]:
    """Merge the given fields with those measured on the run; a file of rates overrides the run."""
    summary, given = measured.summary, {name.replace("_", "-") for name in fields}
    rates = fields.get("rates", "none").strip()
    if rates not in ("", "none"):
        given |= set(read_rates(Path(rates)).fields) - {"gpus-per-node"}
    own = dict(measured.fields)
    if "gpus" not in given:
        own |= {"gpus": f"{summary.world}", "gpus-per-node": "1", "replica-gpus": "1"}
    if measured.failures and not given & {"transient", "fatal"}:
        own |= {"transient": f"{measured.transient:.6f}", "fatal": f"{measured.fatal:.6f}"}
    return {**{key: text for key, text in own.items() if key not in given}, **fields}


def _dates(start: str, by: str, within: str) -> tuple[datetime | None, float | None]:
    """Return the start of the run and its time limit in seconds. Raises UsageError."""
    if by and within:
        raise UsageError("--by and --within exclude each other; give one of them")
    begins = _date("--start", start) if start else None
    if within:
        return begins, span(f"--within {within}", within)
    if not by:
        return begins, None
    if begins is None:
        raise UsageError(f"--by {by} needs --start, the date on which the run begins")
    try:
        deadline_s = (_date("--by", by) - begins).total_seconds()
    except TypeError as error:
        raise UsageError("--start and --by: give both a time zone, or neither") from error
    if deadline_s <= 0:
        raise UsageError(f"--by {by} is not after --start {start}")
    return begins, deadline_s


def _date(flag: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text} is not a date, as in 2027-01-31") from error


def show_comparison(found: StrategyComparison, *, json: bool) -> None:
    """Print the whole comparison, as one JSON object or for people."""
    if json:
        print_json(found)
        return
    echo(Text(found.question, "bold"))
    echo(Text(f"failures: {found.failures}", "dim"))
    if found.contenders:
        echo(_outcomes(found))
        echo(_ends(found))
        echo(_shares(found))
        echo(_settings(found))
    if found.observed:
        _observed(found.observed)
    for one in found.impossible:
        echo(Text(f"{one.strategy} {one.why}"))
    cut = "interrupted: " if found.interrupted else ""
    if found.contenders:
        rates = format_count(found.rates, "failure rate")
        echo(
            f"{cut}{format_count(found.runs, 'run')} of each strategy at {rates}, seed"
            f" {found.seed};"
        )
        echo("figures are medians, with P5 .. P95 below; costs more: paired, on the same failures")
    else:
        echo(f"{cut}too few failure rates were simulated for a comparison")
    remarks(found)


def _outcomes(found: StrategyComparison) -> Table:
    best = found.contenders[0]
    grid = _table("", "goodput", "takes", "costs")
    for one in found.contenders:
        cells = (_banded(one.goodput), _banded(one.takes), _banded(one.costs))
        grid.add_row(one.strategy, *cells, style="bold" if one is best else "")
    return grid


def _ends(found: StrategyComparison) -> Table:
    """Return rows: costs of the other strategies, number of failures, finish dates."""
    best = found.contenders[0]
    dated = ["ends"] if best.finish else []
    limit = [f"in {format_quantity(found.within_s, 's')}"] if found.within_s else []
    grid = _table("", "costs more", "failures", *dated, *limit)
    for one in found.contenders:
        row = [Text("") if one is best else _banded(one.dearer), _banded(one.failures)]
        if one.finish:
            days = [f"{day:%Y-%m-%d}" if day else "never" for day in one.finish]
            row.append(_two_lines(days[1], f"{days[0]} .. {days[2]}"))
        if one.in_time is not None:
            row.append(Text(format_quantity(one.in_time, "share")))
        grid.add_row(one.strategy, *row)
    return grid


def _banded(one: Quantity) -> Text:
    if one.low is None or one.high is None:
        return Text(format_quantity(one.value, one.unit))
    low, high = format_quantity(one.low, one.unit), format_quantity(one.high, one.unit)
    number, _, unit = low.rpartition(" ")
    if number and unit == high.rpartition(" ")[2]:
        low = number
    return _two_lines(format_quantity(one.value, one.unit), f"{low} .. {high}")


def _two_lines(middle: str, ends: str) -> Text:
    return Text.assemble(middle, "\n", (ends, "dim"))


def _shares(found: StrategyComparison) -> Table:
    grid = _table("% of wall time, mean", *CAUSES)
    for one in found.contenders:
        grid.add_row(
            one.strategy, *(f"{round(100 * one.shares[cause], 2) + 0.0:.2f}" for cause in CAUSES)
        )
    return grid


def _settings(found: StrategyComparison) -> Table:
    grid = _table("set", "save", "memory", "spares", "theory", "simulated", "z")
    for one in found.contenders:
        theory = one.theory
        memory = format_quantity(one.memory_interval_s, "s") if one.memory_interval_s else "-"
        grid.add_row(
            one.strategy,
            format_quantity(one.interval_s, "s"),
            memory,
            format_quantity(one.spares, "nodes"),
            format_quantity(theory.takes_s, "s"),
            "" if theory.differs is None else f"{theory.differs:+.2%}",
            "" if theory.z is None else f"{theory.z:+.1f}",
        )
    return grid


def _observed(found: RunComparison) -> None:
    causes = ", ".join(f"{count} {kind}" for kind, count in found.incidents.items()) or "no failure"
    measured = [
        f"{name} {format_quantity(value, 'share')}"
        for name, value in (("goodput", found.goodput), ("ETTR", found.ettr))
        if value is not None
    ]
    echo(Text(f"the run in {found.run_dir}", "bold"))
    echo(
        "; ".join(
            [
                f"{found.outcome}: {format_count(found.steps, 'step')} on"
                f" {format_count(found.devices, 'rank')} in"
                f" {format_quantity(found.wall_s, 's')}",
                causes,
                *measured,
            ]
        )
    )
    grid = _table(f"as {found.strategy}", "predicted", "observed", "", "at its rate", "")
    for one in found.rows:
        again = _banded(one.at_its_rate) if one.at_its_rate else Text("")
        grid.add_row(
            one.observed.name,
            _banded(one.predicted),
            _banded(one.observed),
            _verdict(one.verdict),
            again,
            _verdict(one.verdict_at_its_rate),
        )
    echo(grid)
    echo("shares of the time from the first step to the last; more, less: outside of the band;")
    echo("at its rate: predicted again with the failure rate of this run")
    if found.believed:
        one = found.believed
        text = f"{format_quantity(one.value, one.unit)} ({band(one)})"
        echo(f"{one.name}: {text} is the updated estimate, from {one.source}")
    for note in found.notes:
        echo(Text(f"the run's note: {note}", "dim"))


def _verdict(one: Verdict | None) -> Text:
    """Return one sentence that compares the run with its prediction."""
    return Text(one or "", "" if one == "within" else "yellow")


def _table(*columns: str) -> Table:
    first, *others = columns
    return table(text_column(first, wrap=False), *map(number_column, others))
