"""`outlast plan interval`."""

from __future__ import annotations

from pathlib import Path

from outlast.cli.plan.answer_output import check_fields, check_picture, show
from outlast.cli.plan.scenario_flags import Fields, File, Json
from outlast.errors import EXIT_DONE
from outlast.plan.answers.best_interval import best_interval as answered
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.scenario import scenario_of


def interval(
    file: File = None,
    /,
    *,
    strategy: Strategy = "checkpoint-restart",
    json: Json = False,
    figure: Path | None = None,
    **fields: Fields,
) -> int:
    """Compute the best save interval and the cost of missing it.

    Parameters
    ----------
    strategy
        What happens after a failure.
    figure
        Draw goodput against the interval into this file (.svg, .png, .pdf).
    """
    path = check_picture(figure, "numba")  # it shows runs beside theory
    scenario = scenario_of(check_fields(fields, interval), file)
    show(answered(scenario, strategy), json=json)
    if path:
        from outlast.plan.figures.interval_figures import draw_goodput

        draw_goodput(scenario, strategy, path)
    return EXIT_DONE
