"""Commands with one answer: `outlast plan interval`, `ettr`, `replicas`, `spares`, `advise`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outlast import quantities
from outlast.atomic_files import write_new
from outlast.cli.output_stream import echo, print_json
from outlast.cli.plan.scenario_command import (
    ExtraFlags,
    Fields,
    File,
    Json,
    check_fields,
    check_picture,
    quantity_table,
    remarks,
    show,
)
from outlast.errors import EXIT_DONE, UsageError
from outlast.plan.answers import formula_answers
from outlast.plan.answers.copy_counts import CopiesRow, memory_copies
from outlast.plan.answers.formula_answers import best_interval
from outlast.plan.answers.spare_nodes import SparesRow, spare_nodes
from outlast.plan.model.answer_values import format_quantity
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.scenario import scenario_of, span
from outlast.terminal_tables import number_column, table, text_column

if TYPE_CHECKING:
    from outlast.plan.answers.advice import Advice, InputSensitivity
    from outlast.plan.answers.extra_costs import ExtraCost

HARDLY = 1e-6  # of time: a minute in two years; far below, figures underflow to 0


def interval(
    file: File = None,
    /,
    *,
    strategy: Strategy = "checkpoint-restart",
    json: Json = False,
    figure: Path | None = None,
    **fields: Fields,
) -> int:
    """Compute the best checkpoint interval and the cost of others.

    Parameters
    ----------
    strategy
        Recovery strategy after a failure.
    figure
        Draw goodput by checkpoint interval into this file (.svg, .png, .pdf).
    """
    path = check_picture(figure, "numba")  # it shows runs beside theory
    scenario = scenario_of(check_fields(fields, interval), file)
    show(best_interval(scenario, strategy), json=json)
    if path:
        from outlast.plan.figures.interval_figures import draw_goodput

        draw_goodput(scenario, strategy, path)
    return EXIT_DONE


def ettr(
    file: File = None,
    /,
    *,
    target: str | None = None,
    queue: str = "0",
    json: Json = False,
    figure: Path | None = None,
    **fields: Fields,
) -> int:
    """Compute ETTR, the share of time spent training.

    Effective training time ratio of checkpoint-restart, by each published formula.

    Parameters
    ----------
    target
        ETTR to reach, for example 0.9: prints the interval, restart time and failure rate that it
        needs.
    queue
        Queue time after each failure, for example 10min.
    figure
        Draw ETTR by interval and failure rate into this file (.svg, .png, .pdf).
    """
    path = check_picture(figure)
    scenario = scenario_of(check_fields(fields, ettr), file)
    queue_s = span(f"--queue {queue}", queue)
    goal = None if target is None else quantities.share(f"--target {target}", target)
    show(formula_answers.ettr(scenario, goal, queue_s), json=json)
    if path:
        from outlast.plan.figures.interval_figures import draw_ettr

        draw_ettr(scenario, queue_s, path)
    return EXIT_DONE


def replicas(file: File = None, /, *, json: Json = False, **fields: Fields) -> int:
    """Compare numbers of in-memory copies: losses, memory, network.

    Also prints how often all copies are lost, and the limits of scaling.
    """
    answer = memory_copies(scenario_of(check_fields(fields, replicas), file))
    if json:
        print_json(answer)
        return EXIT_DONE
    echo(Text(answer.question, "bold"))
    echo(Text(f"failures: {answer.failures}", "dim"))
    echo(_copies_table(answer.rows))
    echo(quantity_table(answer.quantities))
    remarks(answer)
    return EXIT_DONE


def _copies_table(rows: Sequence[CopiesRow]) -> Table:
    figures = ("copies", "all lost every", "in a run", "by Epoch AI")
    costs = ("memory a GPU", "network a GPU", "goodput")
    grid = table(*map(number_column, (*figures, *costs)))
    for row in rows:
        grid.add_row(
            str(row.copies),
            format_quantity(row.lost_every_s, "s"),
            format_quantity(row.losses, "times"),
            format_quantity(row.epoch_losses, "times"),
            format_quantity(row.memory_per_gpu_bytes, "bytes"),
            format_quantity(row.network_per_gpu_bytes_per_s, "bytes/s"),
            format_quantity(row.goodput, "share"),
        )
    return grid


def spares(
    file: File = None, /, *, json: Json = False, figure: Path | None = None, **fields: Fields
) -> int:
    """Compute the number of spare nodes with the lowest cost.

    For a job that waits without spares, and for one that continues with fewer
    nodes.

    Parameters
    ----------
    figure
        Draw waiting time and cost by number of spares into this file (.svg, .png, .pdf).
    """
    path = check_picture(figure)
    scenario = scenario_of(check_fields(fields, spares), file)
    answer = spare_nodes(scenario)
    if json:
        print_json(answer)
    else:
        echo(Text(answer.question, "bold"))
        echo(Text(f"failures: {answer.failures}", "dim"))
        echo(quantity_table(answer.quantities))
        echo(_spares_table(answer.rows))
        for sentence in answer.conclusions:
            echo(Text(sentence))
        remarks(answer)
    if path:
        from outlast.plan.figures.cost_figures import draw_spares

        draw_spares(scenario, path)
    return EXIT_DONE


def _spares_table(rows: Sequence[SparesRow]) -> Table:
    figures = ("spares", "short", "job\nwaits", "at a\ncost", "continues\nat", "at a\ncost")
    grid = table(*(number_column(name, wrap=False) for name in figures), text_column())
    for row in rows:
        grid.add_row(
            f"{row.spares:,}",
            _share(row.short),
            _share(row.stalled),
            format_quantity(row.stalling_usd, "USD"),
            _share(row.up),
            format_quantity(row.dropping_usd, "USD"),
            Text("\n".join(row.names)),
        )
    return grid


def _share(value: float) -> str:
    return "hardly" if value < HARDLY else format_quantity(value, "share")


BUYS, DOUBTS = 6, 4
TELLING = 1e-4  # of the price
POINTS_MIN = 0.005


def advise(
    file: File = None,
    /,
    *,
    strategy: Strategy | None = None,
    json: Json = False,
    figure: Path | None = None,
    policy_out: Path | None = None,
    extra: ExtraFlags | None = None,
    **fields: Fields,
) -> int:
    """Recommend settings and hardware purchases, with prices.

    Also prints which inputs to measure first, because other values would change the
    recommended settings.

    Parameters
    ----------
    strategy
        Current recovery strategy of the run. With it, the answer has the current cost and the
        savings. --interval adds the current checkpoint interval.
    figure
        Draw the price with each input halved and doubled into this file (.svg, .png, .pdf).
    policy_out
        Write the recommended recovery policy into this new TOML file, for `outlast run --policy`.
    """
    from outlast.plan.answers import advisor

    path = check_picture(figure)
    if policy_out:
        if policy_out.suffix != ".toml":
            raise UsageError(f"--policy-out {policy_out}: give the name of a new .toml file")
        write_new(policy_out, None, "--policy-out")
    scenario = scenario_of(check_fields(fields, advise), file)
    advice = advisor.advise(scenario, strategy, extra.extra_inputs() if extra else None)
    if policy_out and not advice.policy_file:
        raise UsageError("--policy-out: this run never ends at any settings; nothing was written")
    if policy_out:
        write_new(policy_out, advice.policy_file, "--policy-out")
    if json:
        print_json(advice)
    else:
        _show_advice(advice)
    if policy_out and not json:
        echo(
            f"written to {policy_out}; next: outlast policy explain --policy"
            f" {shlex.quote(str(policy_out))}"
        )
    if path:
        from outlast.plan.figures.cost_figures import draw_tornado

        draw_tornado(scenario, advice, path)
    return EXIT_DONE


def _show_advice(advice: Advice) -> None:
    echo(Text(advice.question, "bold"))
    echo(Text(f"failures: {advice.failures}", "dim"))
    _print_part("Now", {"": advice.now.text} if advice.now else {})
    _print_part("Set", {f"{item.what}: {item.set_to}": item.why for item in advice.items})
    _print_heading("What that costs")
    echo(quantity_table(advice.quantities))
    echo(_strategies_table(advice))
    least_usd = TELLING * advice.bill.total if advice.finishes else 0.0
    worth = [lever for lever in advice.levers if lever.saves_usd > least_usd]
    worth = sorted(worth, key=lambda one: -one.saves_usd)[:BUYS]
    _print_heading("Best purchases, with all settings adapted")
    little = "saves 0.01 %" if advice.finishes else "makes the run end"
    echo(_purchases_table(worth) if worth else f"  nothing: no input halved or doubled {little}")
    _print_part("Besides failures", {_priced_cost(extra): extra.text for extra in advice.extras})
    _print_part("What it depends on", {"": advice.matters_most})
    _print_part(
        "With other inputs", [*(doubt.text for doubt in advice.doubts[:DOUBTS]), advice.sure]
    )
    _print_part("Measure first", [one.why for one in advice.measure])
    echo("")
    remarks(advice)


def _priced_cost(cost: ExtraCost) -> str:
    more = "+" if cost.usd >= 0 else ""
    return f"{cost.what}: {more}{format_quantity(cost.usd, 'USD')}"


def _print_heading(title: str) -> None:
    echo(Text(f"\n{title}", "bold"))


def _print_part(title: str, sentences: Mapping[str, str] | Sequence[str]) -> None:
    """Print a heading, and sentences beside their subjects; nothing without sentences."""
    rows = (
        list(sentences.items())
        if isinstance(sentences, Mapping)
        else [("-", text) for text in sentences]
    )
    rows = [row for row in rows if row[1]]
    if not rows:
        return
    _print_heading(title)
    grid = Table.grid(padding=(0, 2 if rows[0][0] != "-" else 1, 0, 0))
    for about, text in rows:
        grid.add_row(*([about] if about else []), text)
    echo(Padding(grid, (0, 0, 0, 2)))


def _strategies_table(advice: Advice) -> Table:
    figures = ("cost", "90 % band", "more", "goodput")
    grid = table(
        text_column("strategy", wrap=False), *(number_column(name, wrap=False) for name in figures)
    )
    for strategy in advice.strategies:
        if strategy.usd is None or strategy.goodput is None:
            continue
        ends = ""
        if strategy.low_usd is not None and strategy.high_usd is not None:
            low, high = (
                format_quantity(usd, "USD") for usd in (strategy.low_usd, strategy.high_usd)
            )
            ends = f"{low} to {high}"
        more = "-"
        if strategy.more_usd and abs(strategy.more_usd) > TELLING * advice.bill.total:
            more = format_quantity(strategy.more_usd, "USD")
        rough = "" if strategy.how == advice.quantities[0].how else f", {strategy.how}"
        grid.add_row(
            f"{strategy.strategy}{rough}",
            format_quantity(strategy.usd, "USD"),
            ends,
            more,
            format_quantity(strategy.goodput, "share"),
        )
    return grid


def _purchases_table(worth: list[InputSensitivity]) -> Table:
    grid = table(text_column(), *map(number_column, ("from", "to", "saves", "goodput")))
    for lever in worth:
        turn = lever.half if lever.buy == "half" else lever.double
        if turn is None:
            continue
        saves = format_quantity(lever.saves_usd, "USD")
        if math.isinf(lever.saves_usd):
            saves = f"it ends: {format_quantity(turn.usd, 'USD')}"
        points = 100 * lever.adds_goodput
        grid.add_row(
            lever.label,
            format_quantity(lever.value, lever.unit),
            format_quantity(turn.value, lever.unit),
            saves,
            f"{points:+.2g} points" if abs(points) >= POINTS_MIN else "",
        )
    return grid
