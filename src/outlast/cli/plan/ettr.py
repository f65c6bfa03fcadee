"""`outlast plan ettr`."""

from __future__ import annotations

from pathlib import Path

from outlast import quantities
from outlast.cli.plan.answer_output import check_fields, check_picture, show
from outlast.cli.plan.scenario_flags import Fields, File, Json
from outlast.errors import EXIT_DONE
from outlast.plan.answers.ettr_formulas import ettr as answered
from outlast.plan.model.scenario import scenario_of, span


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

    Effective training time ratio of checkpoint-restart, by every published
    formula.

    Parameters
    ----------
    target
        An ETTR, as in 0.9: which interval, which start, which failure rate gives it?
    queue
        What the job waits after each failure before it starts, as in 10min.
    figure
        Draw ETTR over interval and failure rate into this file (.svg, .png, .pdf).
    """
    path = check_picture(figure)
    scenario = scenario_of(check_fields(fields, ettr), file)
    queue_s = span(f"--queue {queue}", queue)
    goal = None if target is None else quantities.share(f"--target {target}", target)
    show(answered(scenario, goal, queue_s), json=json)
    if path:
        from outlast.plan.figures.interval_figures import draw_ettr

        draw_ettr(scenario, queue_s, path)
    return EXIT_DONE
