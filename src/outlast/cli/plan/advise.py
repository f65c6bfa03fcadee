"""`outlast plan advise`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

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
)
from outlast.errors import EXIT_DONE
from outlast.plan.answers.advice import Advice
from outlast.plan.answers.advisor import advise as advised
from outlast.plan.answers.extra_costs import ExtraCost
from outlast.plan.answers.input_sensitivity import InputSensitivity
from outlast.plan.model.answer_values import format_quantity as said
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.scenario import scenario_of
from outlast.terminal_tables import number_column, table, text_column

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
    """
    path = check_picture(figure)
    scenario = scenario_of(check_fields(fields, advise), file)
    advice = advised(scenario, strategy, extra.extra_inputs() if extra else None)
    if json:
        print_json(advice)
    else:
        _show(advice)
    if path:
        from outlast.plan.figures.cost_figures import draw_tornado

        draw_tornado(scenario, advice, path)
    return EXIT_DONE


def _show(advice: Advice) -> None:
    echo(Text(advice.question, "bold"))
    echo(Text(f"failures: {advice.failures}", "dim"))
    _part("Now", {"": advice.now.text} if advice.now else {})
    _part("Set", {f"{item.what}: {item.set_to}": item.why for item in advice.items})
    _head("What that costs")
    echo(quantity_table(advice.quantities))
    echo(_ways(advice))
    least_usd = TELLING * advice.bill.total if advice.finishes else 0.0
    worth = [lever for lever in advice.levers if lever.saves_usd > least_usd]
    worth = sorted(worth, key=lambda one: -one.saves_usd)[:BUYS]
    _head("Best purchases, with all settings adapted")
    little = "saves 0.01 %" if advice.finishes else "makes the run end"
    echo(_buys(worth) if worth else f"  nothing: no input halved or doubled {little}")
    _part("Besides failures", {_priced(extra): extra.text for extra in advice.extras})
    _part("What it depends on", {"": advice.matters_most})
    _part("With other inputs", [*(doubt.text for doubt in advice.doubts[:DOUBTS]), advice.sure])
    _part("Measure first", [one.why for one in advice.measure])
    echo("")
    remarks(advice)


def _priced(cost: ExtraCost) -> str:
    more = "+" if cost.usd >= 0 else ""
    return f"{cost.what}: {more}{said(cost.usd, 'USD')}"


def _head(title: str) -> None:
    echo(Text(f"\n{title}", "bold"))


def _part(title: str, sentences: Mapping[str, str] | Sequence[str]) -> None:
    """Print a heading, and sentences beside their subjects; nothing without sentences."""
    rows = (
        list(sentences.items())
        if isinstance(sentences, Mapping)
        else [("-", text) for text in sentences]
    )
    rows = [row for row in rows if row[1]]
    if not rows:
        return
    _head(title)
    grid = Table.grid(padding=(0, 2 if rows[0][0] != "-" else 1, 0, 0))
    for about, text in rows:
        grid.add_row(*([about] if about else []), text)
    echo(Padding(grid, (0, 0, 0, 2)))


def _ways(advice: Advice) -> Table:
    figures = ("cost", "90 % band", "more", "goodput")
    grid = table(
        text_column("strategy", wrap=False), *(number_column(name, wrap=False) for name in figures)
    )
    for strategy in advice.strategies:
        if strategy.usd is None or strategy.goodput is None:
            continue
        ends = ""
        if strategy.low_usd is not None and strategy.high_usd is not None:
            ends = f"{said(strategy.low_usd, 'USD')} to {said(strategy.high_usd, 'USD')}"
        more = "-"
        if strategy.more_usd and abs(strategy.more_usd) > TELLING * advice.bill.total:
            more = said(strategy.more_usd, "USD")
        rough = "" if strategy.how == advice.quantities[0].how else f", {strategy.how}"
        grid.add_row(
            f"{strategy.strategy}{rough}",
            said(strategy.usd, "USD"),
            ends,
            more,
            said(strategy.goodput, "share"),
        )
    return grid


def _buys(worth: list[InputSensitivity]) -> Table:
    grid = table(text_column(), *map(number_column, ("from", "to", "saves", "goodput")))
    for lever in worth:
        turn = lever.half if lever.buy == "half" else lever.double
        if turn is None:
            continue
        saves = said(lever.saves_usd, "USD")
        if math.isinf(lever.saves_usd):
            saves = f"it ends: {said(turn.usd, 'USD')}"
        points = 100 * lever.adds_goodput
        grid.add_row(
            lever.label,
            said(lever.value, lever.unit),
            said(turn.value, lever.unit),
            saves,
            f"{points:+.2g} points" if abs(points) >= POINTS_MIN else "",
        )
    return grid
