"""The planner's page as HTML: whole, and the parts that a slider's move replaces."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlencode

from outlast import __version__
from outlast.plan.model.answer_values import format_quantity
from outlast.plan.model.ladder_costs import STRATEGIES
from outlast.plan.model.rates import presets
from outlast.web import page_figures
from outlast.web.page_templates import asset, content_policy, environment
from outlast.web.planner_answer import PlannerAnswer
from outlast.web.planner_band import PlannerBand
from outlast.web.planner_curves import (
    PlannerCurves,
    dollars_scale,
    draw_curves,
    goodput_scale,
)
from outlast.web.planner_form import other_inputs, sliders
from outlast.web.planner_query import STRATEGY, PlannerQuery

AXES = {"gpus": "GPUs", "failures": "time between failures of a GPU"}


class PresetLink(NamedTuple):
    """A published failure rate, and the query with it."""

    name: str
    source: str
    query: str


def render_planner(
    texts: Mapping[str, str],
    found: PlannerAnswer | None,
    curves: PlannerCurves | None,
    refusal: str,
    *,
    is_exported: bool = False,
) -> str:
    """Return the page. `texts`: what its address gives; `refusal`: why there is no answer;
    `is_exported`: without a server, and so without controls."""
    template = environment().get_template("planner.html.j2", globals=_globals())
    return template.render(
        answer=render_answer(found, refusal),
        curves=render_curves(curves),
        is_exported=is_exported,
        sliders=sliders(texts),
        others=other_inputs(texts),
        strategies=STRATEGIES,
        strategy=texts.get("strategy", STRATEGY),
        axes=AXES,
        over=texts.get("over", "gpus"),
        presets=[
            PresetLink(one.name, one.source, urlencode({**texts, "failures": one.name}))
            for one in presets()
        ],
        policy=content_policy(),
        version=__version__,
    )


def render_answer(found: PlannerAnswer | None, refusal: str) -> str:
    """Return the part of the page that holds the answer or the refusal."""
    template = environment().get_template("planner_answer.html.j2", globals=_globals())
    return template.render(found=found, refusal=refusal)


def render_curves(
    found: PlannerCurves | None, band: PlannerBand | None = None, note: str = ""
) -> str:
    """Return the part of the page that holds the curves; "" without an answer.

    `note`: on the simulation of the band.
    """
    template = environment().get_template("planner_curves.html.j2", globals=_globals())
    if found is None:
        return ""
    return template.render(found=found, strategies=STRATEGIES, band=band, note=note)


def _command(query: PlannerQuery) -> str:
    """Return the command that gives the same answer, with simulated runs."""
    flags = {"gpus": str(query.scenario.gpus), **query.texts}
    words = (word for key, text in flags.items() for word in (f"--{key}", text))
    return shlex.join(["outlast", "plan", "compare", *words])


def _globals() -> dict[str, object]:
    return {
        "amount": format_quantity,
        "asset": asset,
        "bar": page_figures.bar,
        "command": _command,
        "draw": draw_curves,
        "dollars": dollars_scale,
        "goodput": goodput_scale,
        "infinity": math.inf,
        "now_ns": time.time_ns,
    }
