"""`outlast plan interval`."""

from __future__ import annotations

from pathlib import Path

from outlast.cli.plan.saying import Said, drawn, known, show
from outlast.errors import EXIT_DONE
from outlast.plan.interval import interval as answered
from outlast.plan.ladders import Strategy
from outlast.plan.scenario import scenario_of


def interval(
    file: Path | None = None,
    /,
    *,
    strategy: Strategy = "checkpoint-restart",
    json: bool = False,
    figure: Path | None = None,
    **fields: Said,
) -> int:
    """How often to save: the best interval, and how much it matters.

    Parameters
    ----------
    file
        A scenario in TOML.
    strategy
        What happens after a failure.
    json
        One JSON object instead of a table.
    figure
        Draw goodput against the interval into this file (.svg, .png, .pdf).
    fields
        The scenario, as in --gpus 16384 --cost 30s; `outlast plan fields` lists all.
    """
    path = drawn(figure, "numba")  # it shows runs beside theory
    scenario = scenario_of(known(fields, interval), file)
    show(answered(scenario, strategy), json=json)
    if path:
        from outlast.plan.figures.interval import draw

        draw(scenario, strategy, path)
    return EXIT_DONE
