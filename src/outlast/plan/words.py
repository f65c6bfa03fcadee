"""Figures as people say them, in their unit."""

from __future__ import annotations

import math

from outlast.controller.save_schedule.save_intervals import NEVER_S
from outlast.controller.save_schedule.schedule_explanation import span
from outlast.plan.answers import Unit

_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_PLAIN_MAX = 1e5
YEAR_S = 365 * 86400.0
AGES_S = 1e6 * YEAR_S  # nobody waits so long
SHARE_MIN = 1e-5  # as near to nothing as people care for


def figure(value: float, unit: Unit) -> str:
    """With three digits, in the unit that people say."""
    if math.isinf(value):
        return "never" if unit == "s" else "infinite"
    if unit == "s":
        if value < NEVER_S:
            return span(value)
        return f"{_large(value / YEAR_S)} y" if value < AGES_S else "> 1M y"
    if unit == "share":
        return f"{100 * value:.3g} %" if not 0 < value < SHARE_MIN else "<0.001 %"
    if unit == "USD":
        sign = "-" if value < 0 else ""
        return f"{sign}${_large(abs(value)).replace('G', 'B')}"
    if unit in ("bytes", "bytes/s"):
        return f"{_large(value, ' ')}{'B' if unit == 'bytes' else 'B/s'}"
    whole = value == int(value) and abs(value) < _PLAIN_MAX
    return f"{int(value):,}" if whole else _large(value)


def many(count: int, one: str, more: str = "") -> str:
    """`1 node`, `2 nodes`, `no node`."""
    said = one if count in (0, 1) else more or f"{one}s"
    return f"{count:,} {said}" if count else f"no {said}"


def _large(value: float, gap: str = "") -> str:
    value = float(f"{value:.3g}")  # first, or 999.9 is written with an exponent
    for size, prefix in _LARGE:
        if abs(value) >= size:
            return f"{value / size:.3g}{gap}{prefix}"
    return f"{value:.3g}{gap}"
