"""Curves of the planner: goodput of every strategy over GPUs, or over the failure rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from outlast.errors import ConfigError
from outlast.plan.model.answer_values import format_quantity
from outlast.plan.model.ladder_costs import STRATEGIES, Strategy
from outlast.plan.model.scenario import Scenario, resize
from outlast.plan.model.strategy_prediction import Prediction
from outlast.web.page_figures import X
from outlast.web.planner_answer import strategy_line
from outlast.web.planner_band import PlannerBand
from outlast.web.planner_query import PlannerQuery

HEIGHT = 220
_HOUR_S = 3600.0
_NODES = tuple(2 * 4**power for power in range(9))
_BETWEEN_KH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class CurvePoint(NamedTuple):
    """Predictions at one value of the axis, by strategy where it is possible."""

    value: float
    text: str
    predicted: dict[Strategy, Prediction]


class PlannerCurves(NamedTuple):
    """The curves of all strategies, and the scenario's own place on their axis."""

    axis: str
    points: list[CurvePoint]
    here: CurvePoint


class CurvePlace(NamedTuple):
    """A place of the axis with its scenario; None where the scenario is impossible."""

    value: float
    text: str
    scenario: Scenario | None


def planner_curves(query: PlannerQuery) -> PlannerCurves:
    """Compute the curves. Raises UsageError naming the invalid field."""
    *points, here = map(_point, curve_places(query))
    name = "GPUs" if query.over == "gpus" else "time between failures of a GPU"
    return PlannerCurves(name, points, here)


def curve_places(query: PlannerQuery) -> list[CurvePlace]:
    """Return the places of the axis, and at last the scenario's own."""
    scenario = query.scenario
    if query.over == "gpus":
        sizes = [*(count * scenario.gpus_per_node for count in _NODES), scenario.gpus]
        return [_place(scenario, gpus, f"{gpus:,}", gpus=gpus) for gpus in sizes]
    between_s = 1 / scenario.failures.per_gpu_s
    count = between_s / 1000 / _HOUR_S
    return [
        *(
            _place(scenario, count, f"{count:,} kh", between_s=1000 * count * _HOUR_S)
            for count in _BETWEEN_KH
        ),
        _place(scenario, count, f"{count:.3g} kh", between_s=between_s),
    ]


def _place(
    scenario: Scenario, value: float, text: str, *, gpus: int = 0, between_s: float = 0.0
) -> CurvePlace:
    if between_s:
        scenario = replace(scenario, failures=replace(scenario.failures, per_gpu_s=1 / between_s))
    try:
        return CurvePlace(value, text, resize(scenario, gpus or scenario.gpus))
    except ConfigError:  # this size is impossible with what is given: the curves have a gap
        return CurvePlace(value, text, None)


def _point(place: CurvePlace) -> CurvePoint:
    if place.scenario is None:
        return CurvePoint(place.value, place.text, {})
    lines = [strategy_line(place.scenario, strategy) for strategy in STRATEGIES]
    return CurvePoint(
        place.value,
        place.text,
        {line.strategy: line.predicted for line in lines if line.predicted is not None},
    )


class CurveScale(NamedTuple):
    """Scale of the values of curves. `share`: of the height; None where a value is infinite.

    `rows`: shares of the height, and their labels.
    """

    name: str
    text: Callable[[Prediction], str]
    share: Callable[[Prediction], float | None]
    rows: list[tuple[float, str]]


def goodput_scale() -> CurveScale:
    """Return the scale of goodput, from 0 to 100 %."""
    return CurveScale(
        "goodput",
        lambda of: format_quantity(of.outcome.goodput, "share"),
        lambda of: of.outcome.goodput,
        [(part / 100, f"{part} %") for part in range(0, 101, 25)],
    )


def dollars_scale(curves: PlannerCurves) -> CurveScale:
    """Return the logarithmic scale of dollars, in whole powers of ten."""
    every = [of.usd for point in (*curves.points, curves.here) for of in point.predicted.values()]
    known = [usd for usd in every if 0 < usd < math.inf] or [1.0]
    low = math.floor(math.log10(min(known)))
    high = max(low + 1, math.ceil(math.log10(max(known))))

    def share(of: Prediction) -> float | None:
        if math.isinf(of.usd):
            return None
        power = math.log10(of.usd) if of.usd > 0 else low
        return min(1.0, max(0.0, (power - low) / (high - low)))

    rows = [
        ((power - low) / (high - low), format_quantity(10.0**power, "USD"))
        for power in range(low, high + 1, math.ceil((high - low) / 5))
    ]
    return CurveScale("dollars", lambda of: format_quantity(of.usd, "USD"), share, rows)


def draw_curves(curves: PlannerCurves, scale: CurveScale, band: PlannerBand | None = None) -> str:
    """Draw values of all strategies over the logarithm of the axis, and a band of goodput."""
    points = curves.points
    low, high = math.log(points[0].value), math.log(points[-1].value)

    def share(value: float) -> float:
        return min(1.0, max(0.0, (math.log(value) - low) / (high - low)))

    lines = _areas(band, points, share) if band else ""
    lines += "".join(
        f'<polyline class="curve {strategy}" points="{places}"/>'
        for strategy in reversed(STRATEGIES)  # dashes are on top where curves meet
        for places in _places(strategy, points, share, scale)
    )
    ticks = [(share(point.value), point.text) for point in points[:: math.ceil(len(points) / 6)]]
    here = 100 * share(curves.here.value)
    marks = "".join(
        f'<circle class="{strategy}" cx="{here:.2f}%" cy="{HEIGHT * (1 - up):.1f}"'
        f' r="4"><title>{strategy}: {scale.text(of)}</title></circle>'
        for strategy, of in curves.here.predicted.items()
        if (up := scale.share(of)) is not None
    )
    return (
        f'<svg class="figure" role="img" height="{HEIGHT + 34}" aria-label="{scale.name} of each'
        f' strategy over {curves.axis}; its values are in the table">'
        f'<svg class="plot" y="10">{_grid(ticks, scale.rows)}'
        f'<svg viewBox="0 0 {X} {HEIGHT}" preserveAspectRatio="none" width="100%"'
        f' height="{HEIGHT}">{lines}</svg>'
        f'<line class="mark" x1="{here:.2f}%" x2="{here:.2f}%" y1="0" y2="{HEIGHT}"/>{marks}'
        "</svg></svg>"
    )


def _grid(ticks: Sequence[tuple[float, str]], rows: Sequence[tuple[float, str]]) -> str:
    lines = "".join(
        f'<line class="tick" x1="0" x2="100%" y1="{y:g}" y2="{y:g}"/>'
        f'<text class="label end" x="-6" y="{y:g}">{text}</text>'
        for share, text in rows
        for y in [HEIGHT * (1 - share)]
    )
    return lines + "".join(
        f'<line class="tick" x1="{100 * at:.2f}%" x2="{100 * at:.2f}%" y1="0" y2="{HEIGHT}"/>'
        f'<text class="label{" end" if at > 0.95 else " middle" if at else ""}"'
        f' x="{100 * at:.2f}%" y="{HEIGHT + 15}">{text}</text>'
        for at, text in ticks
    )


def _places(
    strategy: Strategy,
    points: Sequence[CurvePoint],
    share: Callable[[float], float],
    scale: CurveScale,
) -> list[str]:
    """Return the places of a curve, divided where it is impossible or infinite."""
    places: list[str] = [""]
    for point in points:
        of = point.predicted.get(strategy)
        up = scale.share(of) if of else None
        if up is None:
            places.append("")
        else:
            places[-1] += f" {X * share(point.value):.1f},{HEIGHT * (1 - up):.1f}"
    return [part.strip() for part in places if part]


def _areas(band: PlannerBand, points: Sequence[CurvePoint], share: Callable[[float], float]) -> str:
    """Draw a band, divided where places are missing."""
    groups: list[list[CurvePoint]] = [[]]
    for point in points:
        if point.text in band.simulated:
            groups[-1].append(point)
        else:
            groups.append([])
    outlines = (
        " ".join(
            f"{X * share(point.value):.1f},{HEIGHT * (1 - end):.1f}"
            for side, which in ((group, "low"), (group[::-1], "high"))
            for point in side
            for end in [getattr(band.simulated[point.text], which)]
        )
        for group in groups
        if len(group) > 1
    )
    return "".join(
        f'<polygon class="band {band.strategy}" points="{outline}"/>' for outline in outlines
    )
