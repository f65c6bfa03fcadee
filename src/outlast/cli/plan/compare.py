"""`outlast plan compare`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.table import Table
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
    band,
    check_fields,
    check_picture,
    execution_place,
    remarks,
)
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from outlast.plan.answers.run_comparison import RunComparison, Verdict
from outlast.plan.answers.strategy_comparison import StrategyComparison
from outlast.plan.model.answer_values import CAUSES, Quantity, format_count, format_quantity
from outlast.plan.model.rates import read_rates
from outlast.plan.model.scenario import Scenario, scenario_of, span
from outlast.terminal_tables import number_column, table, text_column

if TYPE_CHECKING:
    from outlast.plan.answers.strategy_comparison import ComparisonRequest
    from outlast.plan.model.measured_run import MeasuredRun

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
        comparison = compared(
            scenario, request, measured=measured, place=where, on_progress=advance
        )
    show_comparison(comparison, json=json)
    if path and comparison.contenders:
        _draw(picture, path, scenario, comparison, request, measured)
    return EXIT_INTERRUPTED if comparison.interrupted else EXIT_DONE


def _draw(
    picture: Picture,
    path: Path,
    scenario: Scenario,
    comparison: StrategyComparison,
    request: ComparisonRequest,
    measured: MeasuredRun | None,
) -> None:
    from outlast.plan.figures import comparison_figures, scale_figures

    if picture == "scale":
        scale_figures.draw_scale(scenario, path, request.seed)
    elif picture == "phases":
        scale_figures.draw_phases(scenario, path)
    elif picture == "fan":
        comparison_figures.draw_fan(
            scenario, comparison, path, start=request.start, measured=measured
        )
    else:
        comparison_figures.draw_waterfall(scenario, comparison, path)


def _several(replications: str | None) -> int | None:
    if replications is None:
        return None
    runs = quantities.count(f"--replications {replications}", replications)
    if not 1 <= runs <= REPLICATIONS_MAX:
        raise UsageError(f"--replications {replications}: from 1 to {REPLICATIONS_MAX:,}")
    return runs


def _measured_run(run_dir: Path) -> MeasuredRun:
    from outlast.plan.model.measured_run import read_measured_run

    return read_measured_run(run_dir)


def _with(fields: dict[str, str], measured: MeasuredRun) -> dict[str, str]:
    """Merge the given fields with those measured on the run; a file of rates overrides the run."""
    from outlast.plan.model.measured_run import scenario_texts

    given = {name.replace("_", "-") for name in fields}
    rates = fields.get("rates", "none").strip()
    if rates not in ("", "none"):
        given |= set(read_rates(Path(rates)).fields) - {"gpus-per-node"}
    if "gpus" in given:
        given |= {"gpus-per-node", "replica-gpus"}
    if given & {"transient", "fatal"}:
        given |= {"transient", "fatal"}
    own = scenario_texts(measured)
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


def show_comparison(comparison: StrategyComparison, *, json: bool) -> None:
    """Print the whole comparison, as one JSON object or for people."""
    if json:
        print_json(comparison)
        return
    echo(Text(comparison.question, "bold"))
    echo(Text(f"failures: {comparison.failures}", "dim"))
    if comparison.contenders:
        echo(_outcomes(comparison))
        echo(_ends(comparison))
        echo(_shares(comparison))
        echo(_settings(comparison))
    if comparison.observed:
        _observed(comparison.observed)
    for strategy in comparison.impossible:
        echo(Text(f"{strategy.strategy} {strategy.why}"))
    cut = "interrupted: " if comparison.interrupted else ""
    if comparison.contenders:
        rates = format_count(comparison.rates, "failure rate")
        echo(
            f"{cut}{format_count(comparison.runs, 'run')} of each strategy at {rates}, seed"
            f" {comparison.seed};"
        )
        echo("figures are medians, with P5 .. P95 below; costs more: paired, on the same failures")
    else:
        echo(f"{cut}too few failure rates were simulated for a comparison")
    remarks(comparison)


def _outcomes(comparison: StrategyComparison) -> Table:
    best = comparison.contenders[0]
    grid = _table("", "goodput", "takes", "costs")
    for contender in comparison.contenders:
        cells = (_banded(contender.goodput), _banded(contender.takes), _banded(contender.costs))
        grid.add_row(contender.strategy, *cells, style="bold" if contender is best else "")
    return grid


def _ends(comparison: StrategyComparison) -> Table:
    """Return rows: costs of the other strategies, number of failures, finish dates."""
    best = comparison.contenders[0]
    dated = ["ends"] if best.finish else []
    limit = [f"in {format_quantity(comparison.within_s, 's')}"] if comparison.within_s else []
    grid = _table("", "costs more", "failures", *dated, *limit)
    for contender in comparison.contenders:
        row = [
            Text("") if contender is best else _banded(contender.dearer),
            _banded(contender.failures),
        ]
        if contender.finish:
            days = [f"{day:%Y-%m-%d}" if day else "never" for day in contender.finish]
            row.append(_two_lines(days[1], f"{days[0]} .. {days[2]}"))
        if contender.in_time is not None:
            row.append(Text(format_quantity(contender.in_time, "share")))
        grid.add_row(contender.strategy, *row)
    return grid


def _banded(quantity: Quantity) -> Text:
    if quantity.low is None or quantity.high is None:
        return Text(format_quantity(quantity.value, quantity.unit))
    low, high = (
        format_quantity(quantity.low, quantity.unit),
        format_quantity(quantity.high, quantity.unit),
    )
    number, _, unit = low.rpartition(" ")
    if number and unit == high.rpartition(" ")[2]:
        low = number
    return _two_lines(format_quantity(quantity.value, quantity.unit), f"{low} .. {high}")


def _two_lines(middle: str, ends: str) -> Text:
    return Text.assemble(middle, "\n", (ends, "dim"))


def _shares(comparison: StrategyComparison) -> Table:
    grid = _table("% of wall time, mean", *CAUSES)
    for contender in comparison.contenders:
        grid.add_row(
            contender.strategy,
            *(f"{round(100 * contender.shares[cause], 2) + 0.0:.2f}" for cause in CAUSES),
        )
    return grid


def _settings(comparison: StrategyComparison) -> Table:
    grid = _table("set", "save", "memory", "spares", "theory", "simulated", "z")
    for contender in comparison.contenders:
        theory = contender.theory
        memory = (
            format_quantity(contender.memory_interval_s, "s")
            if contender.memory_interval_s
            else "-"
        )
        grid.add_row(
            contender.strategy,
            format_quantity(contender.interval_s, "s"),
            memory,
            format_quantity(contender.spares, "nodes"),
            format_quantity(theory.takes_s, "s"),
            "" if theory.differs is None else f"{theory.differs:+.2%}",
            "" if theory.z is None else f"{theory.z:+.1f}",
        )
    return grid


def _observed(comparison: RunComparison) -> None:
    causes = (
        ", ".join(f"{count} {kind}" for kind, count in comparison.incidents.items()) or "no failure"
    )
    measured = [
        f"{name} {format_quantity(value, 'share')}"
        for name, value in (("goodput", comparison.goodput), ("ETTR", comparison.ettr))
        if value is not None
    ]
    echo(Text(f"the run in {comparison.run_dir}", "bold"))
    echo(
        "; ".join(
            [
                f"{comparison.outcome}: {format_count(comparison.steps, 'step')} on"
                f" {format_count(comparison.devices, 'rank')} in"
                f" {format_quantity(comparison.wall_s, 's')}",
                causes,
                *measured,
            ]
        )
    )
    grid = _table(f"as {comparison.strategy}", "predicted", "observed", "", "at its rate", "")
    for row in comparison.rows:
        again = _banded(row.at_its_rate) if row.at_its_rate else Text("")
        grid.add_row(
            row.observed.name,
            _banded(row.predicted),
            _banded(row.observed),
            _verdict(row.verdict),
            again,
            _verdict(row.verdict_at_its_rate),
        )
    echo(grid)
    echo("shares of the time from the first step to the last; more, less: outside of the band;")
    echo("at its rate: predicted again with the failure rate of this run")
    if comparison.believed:
        one = comparison.believed
        text = f"{format_quantity(one.value, one.unit)} ({band(one)})"
        echo(f"{one.name}: {text} is the updated estimate, from {one.source}")
    for note in comparison.notes:
        echo(Text(f"the run's note: {note}", "dim"))


def _verdict(verdict: Verdict | None) -> Text:
    """Return one sentence that compares the run with its prediction."""
    return Text(verdict or "", "" if verdict == "within" else "yellow")


def _table(*columns: str) -> Table:
    first, *others = columns
    return table(text_column(first, wrap=False), *map(number_column, others))
