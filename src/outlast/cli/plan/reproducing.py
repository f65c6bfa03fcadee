"""`outlast plan reproduce`: recomputed figures of five published documents."""

from __future__ import annotations

from collections import Counter

from rich.table import Table
from rich.text import Text

from outlast.cli.output_stream import echo, print_json
from outlast.errors import EXIT_DONE
from outlast.plan.reproduce import DOCUMENTS, rows
from outlast.plan.reproduce.reproduced_figure import ReproducedFigure
from outlast.terminal_tables import number_column, table, text_column

VERDICTS = {True: Text("yes", "green"), False: Text("no", "red"), None: Text("")}
SAYS_MAX, UNIT_MAX = 13, 11
WHOLE_MIN, WHOLE_MAX = 1e5, 1e10  # between them figures are printed to the last whole digit


def reproduce(*documents: str, json: bool = False) -> int:
    """Recompute published tables and figures.

    Prints the figures of five documents beside ours, with the reason for each
    difference.

    Parameters
    ----------
    documents
        Keys of documents, 000 to 004 (default: all).
    json
        Print one JSON list of rows (document, quantity, says, ours, unit, agrees, why) instead of
        tables.
    """
    figures = rows(documents)
    if json:
        print_json(figures)
        return EXIT_DONE
    for key, source in DOCUMENTS.items():
        of_it = [row for row in figures if row.document == key]
        if of_it:
            _show(f"{key}  {source.citation}", of_it)
    count = Counter(row.agrees for row in figures)
    echo(
        f"{len(figures)} figures: {count[True]} agree, {count[False]} do not,"
        f" {count[None]} have nothing to compare"
    )
    return EXIT_DONE


def _show(title: str, figures: list[ReproducedFigure]) -> None:
    """Print a document's rows, and each of its notes once below them."""
    notes = {why: number for number, why in enumerate(dict.fromkeys(_whys(figures)), 1)}
    grid = table(
        text_column("quantity", ratio=1),
        number_column("says", width_max=SAYS_MAX),
        number_column("ours", wrap=False),
        text_column("unit", width_max=UNIT_MAX),
        text_column("agrees", wrap=False),
        title=title,
        expand=True,
    )
    for row in figures:
        quantity = Text(row.quantity)
        if row.why:
            quantity.append(f" [{notes[row.why]}]", "dim")
        grid.add_row(
            quantity,
            _published(row.says),
            "no end" if row.ours is None else _number(row.ours),
            row.unit,
            VERDICTS[row.agrees],
        )
    echo(grid)
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(justify="right", min_width=6)
    for why, number in notes.items():
        grid.add_row(Text(f"[{number}]", "dim"), why)
    echo(grid)
    echo("")


def _whys(figures: list[ReproducedFigure]) -> list[str]:
    return [row.why for row in figures if row.why]


def _published(says: float | str | None) -> str:
    return "-" if says is None else says if isinstance(says, str) else _number(says)


def _number(value: float) -> str:
    """Format a number with five digits, or all digits of a whole one."""
    return f"{value:,.0f}" if WHOLE_MIN <= abs(value) < WHOLE_MAX else f"{value:,.5g}"
