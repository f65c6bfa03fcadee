"""`outlast plan fields`, `presets`, and `reproduce`: figures of five published documents."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from outlast.cli.output_stream import echo, print_json
from outlast.controller.save_schedule.save_intervals import span
from outlast.errors import EXIT_DONE
from outlast.plan.model.rates import JOBS_GPUS
from outlast.plan.model.rates import presets as found
from outlast.plan.model.scenario import FIELDS
from outlast.terminal_tables import number_column, table, text_column

if TYPE_CHECKING:
    from outlast.plan.reproduce import ReproducedFigure


def presets(*, json: bool = False) -> int:
    """List published failure rates.

    Prints the source of each, and the MTBF of jobs at that rate. --failures accepts
    their names.

    Parameters
    ----------
    json
        Print one JSON list instead of a table.
    """
    rates = found()
    if json:
        print_json(rates)
        return EXIT_DONE
    figures = ("a GPU and day", "of a GPU", *(f"{gpus:,}" for gpus in JOBS_GPUS))
    grid = table(
        text_column(ratio=1), *(number_column(name, wrap=False) for name in figures), expand=True
    )
    for rate in rates:
        job_mtbfs = (span(rate.job_mtbf_s[gpus]) for gpus in JOBS_GPUS)
        grid.add_row(
            rate.name, f"{100 * rate.per_gpu_day:.3g} %", span(rate.gpu_mtbf_s), *job_mtbfs
        )
    echo("Failures that stop a job: rate and MTBF of a GPU, MTBF of jobs by size")
    echo(grid)
    for one in rates:
        echo(Text(f"{one.name}: {one.source}", "dim"))
    times = max(rate.per_gpu_day for rate in rates) / min(rate.per_gpu_day for rate in rates)
    echo(
        Text(
            f"They differ {times:.0f}-fold: each is weighted like {rates[0].weight_failures:g}"
            " observed failures. Use your own count: --failures 50kh --failures-seen 40."
        )
    )
    return EXIT_DONE


def fields(*, json: bool = False) -> int:
    """List the fields of a scenario and their defaults.

    They are flags of the other commands, and keys of a TOML file.

    Parameters
    ----------
    json
        Print one JSON list instead of a table.
    """
    if json:
        print_json(
            [
                {
                    "key": f.key,
                    "assumed": f.default or None,
                    "group": f.group,
                    "said": f.description,
                }
                for f in FIELDS
            ]
        )
        return EXIT_DONE
    grid = table(*map(text_column, ("", "field", "assumed", "")))
    group = ""
    for field in FIELDS:
        heading = field.group if field.group != group else ""
        grid.add_row(heading, field.key, field.default or "(required)", field.description)
        group = field.group
    echo(grid)
    return EXIT_DONE


VERDICTS = {True: Text("yes", "green"), False: Text("no", "red"), None: Text("")}
SAYS_MAX, UNIT_MAX = 13, 11
WHOLE_MIN, WHOLE_MAX = 1e5, 1e10  # between them figures are printed to the last whole digit


def reproduce(*documents: str, json: bool = False) -> int:
    """Recompute published tables and figures.

    Prints the figures of five documents and the recomputed ones, with the reason
    for each difference.

    Parameters
    ----------
    documents
        Keys of documents, 000 to 004 (default: all).
    json
        Print one JSON list of rows (document, quantity, says, ours, unit, agrees, why) instead of
        tables.
    """
    from outlast.plan.reproduce import rows, source_documents

    figures = rows(documents)
    if json:
        print_json(figures)
        return EXIT_DONE
    for key, source in source_documents().items():
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
