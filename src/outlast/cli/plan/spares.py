"""`outlast plan spares`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from outlast.cli.output_stream import as_json, say
from outlast.cli.plan.answer_output import check_fields, check_picture, remarks, table
from outlast.cli.plan.scenario_flags import Fields, File, Json
from outlast.errors import EXIT_DONE
from outlast.plan.answers.spare_nodes import SparesRow
from outlast.plan.answers.spare_nodes import spare_nodes as answered
from outlast.plan.model.answer_values import format_quantity as in_words
from outlast.plan.model.scenario import scenario_of

HARDLY = 1e-6  # of time: a minute in two years; far below, figures underflow to 0


def spares(
    file: File = None,
    /,
    *,
    json: Json = False,
    figure: Path | None = None,
    **fields: Fields,
) -> int:
    """Compute the number of spare nodes that costs least.

    For a job that waits for them, and for one that goes on.

    Parameters
    ----------
    figure
        Draw waiting and cost against spares into this file (.svg, .png, .pdf).
    """
    path = check_picture(figure)
    scenario = scenario_of(check_fields(fields, spares), file)
    found = answered(scenario)
    if json:
        as_json(found)
    else:
        say(Text(found.question, "bold"))
        say(Text(f"failures: {found.failures}", "dim"))
        say(table(found.quantities))
        say(_rows(found.rows))
        for sentence in found.conclusions:
            say(Text(sentence))
        remarks(found)
    if path:
        from outlast.plan.figures.cost_figures import draw_spares

        draw_spares(scenario, path)
    return EXIT_DONE


def _rows(rows: Sequence[SparesRow]) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name in ("spares", "short", "job\nwaits", "at a\ncost", "goes on\nat", "at a\ncost"):
        grid.add_column(Text(name), justify="right", no_wrap=True)
    grid.add_column("")
    for one in rows:
        grid.add_row(
            f"{one.spares:,}", _share(one.short), _share(one.stalled),
            in_words(one.stalling_usd, "USD"), _share(one.up),
            in_words(one.dropping_usd, "USD"), Text("\n".join(one.names)),
        )  # fmt: skip
    return grid


def _share(value: float) -> str:
    return "hardly" if value < HARDLY else in_words(value, "share")
