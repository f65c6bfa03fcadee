"""`outlast plan interval`."""

from __future__ import annotations

from pathlib import Path

from outlast.cli.plan.flags import Fields, File, Json
from outlast.cli.plan.saying import drawn, known, show
from outlast.errors import EXIT_DONE
from outlast.plan.interval import interval as answered
from outlast.plan.ladders import Strategy
from outlast.plan.scenario import scenario_of


def interval(
    file: File = None,
    /,
    *,
    strategy: Strategy = "checkpoint-restart",
    json: Json = False,
    figure: Path | None = None,
    **fields: Fields,
) -> int:
    """How often to save, and how much it matters.

    Parameters
    ----------
    strategy
        What happens after a failure.
    figure
        Draw goodput against the interval into this file (.svg, .png, .pdf).
    """
    path = drawn(figure, "numba")  # it shows runs beside theory
    scenario = scenario_of(known(fields, interval), file)
    show(answered(scenario, strategy), json=json)
    if path:
        from outlast.plan.figures.interval import draw

        draw(scenario, strategy, path)
    return EXIT_DONE
