"""Inputs of the planner's page: sliders with round stops, and all other fields as texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from outlast.errors import ConfigError
from outlast.plan.model.rates import parse_failures
from outlast.plan.model.scenario import KEYS
from outlast.web.planner_query import GPUS, PLANNER_FIELDS

_SECONDS = ("0", "1s", "2s", "5s", "10s", "20s", "30s", "1min", "2min", "5min", "10min", "20min")
_HOURS = ("30min", "1h", "2h", "4h", "8h", "12h", "24h")
_SLIDERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gpus": ("GPUs", ()),
    "failures": (
        "Time between failures of a GPU",
        tuple(f"{count}kh" for count in (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500)),
    ),
    "interval": ("Interval of durable saves", ("best", *_SECONDS[5:], *_HOURS)),
    "cost": ("Cost of a save", ("0", "500ms", *_SECONDS[1:])),
    "restart": ("Restart from storage", (*_SECONDS[3:], *_HOURS[:3])),
    "pause": ("Pause of a migration", _SECONDS),
    "detect": ("Detection of a failure", (*_SECONDS, "30min")),
    "spares": ("Spare nodes", ("enough", "0", *(str(2**power) for power in range(13)))),
    "work": ("Work", ("1d", "3d", "7d", "14d", "30d", "60d", "90d", "180d", "365d")),
    "gpu-hour": ("Price of a GPU-hour", tuple(f"${x:.2f}" for x in (0.5, 1, 1.5, 2, 2.5, 3, 4, 6))),
}
_NODES = (
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    *(2**power * part // 4 for power in range(4, 18) for part in (4, 5, 6, 7)),
)


class PlannerInput(NamedTuple):
    """A field of the form. `stops`: values of its slider, () without one; `at`: its position."""

    key: str
    label: str
    text: str
    default: str
    description: str
    stops: tuple[str, ...]
    at: int


def sliders(texts: Mapping[str, str]) -> list[PlannerInput]:
    """Return the inputs with sliders, at what a query gives."""
    return [_input(key, label, texts, stops) for key, (label, stops) in _SLIDERS.items()]


def other_inputs(texts: Mapping[str, str]) -> list[PlannerInput]:
    """Return the inputs without sliders."""
    keys = (field.key for field in PLANNER_FIELDS if field.key not in _SLIDERS)
    return [_input(key, key, texts, ()) for key in keys]


def _input(key: str, label: str, texts: Mapping[str, str], stops: tuple[str, ...]) -> PlannerInput:
    field = KEYS[key]
    default = field.default or GPUS
    text = texts.get(key, default if key in _SLIDERS else "")
    if key == "gpus":
        stops = tuple(str(count * _per_node(texts)) for count in _NODES)
    return PlannerInput(
        key, label, text, default, field.description, stops, _nearest(key, stops, text)
    )


def _per_node(texts: Mapping[str, str]) -> int:
    key = "gpus-per-node"
    try:
        return max(1, KEYS[key].read(key, texts.get(key, KEYS[key].default)))
    except ConfigError:
        return 1


def _nearest(key: str, stops: tuple[str, ...], text: str) -> int:
    """Return the stop of a text, or the one whose value is nearest."""
    if text in stops or not stops:
        return stops.index(text) if stops else 0
    value = _value(key, text)
    if value is None:
        return 0
    values = [_value(key, stop) for stop in stops]
    return min(
        (at for at, each in enumerate(values) if each is not None),
        key=lambda at: abs(math.log((values[at] or 1e-9) / (value or 1e-9))),
    )


def _value(key: str, text: str) -> float | None:
    try:
        if key == "failures":
            return 1 / parse_failures(key, text, 8, None).per_gpu_s
        found = KEYS[key].read(key, text)
    except ConfigError:
        return None
    return float(found) if isinstance(found, int | float) else None
