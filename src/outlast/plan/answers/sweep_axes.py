"""Axes of a sweep: values of one field, listed or as a range."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from outlast import quantities
from outlast.errors import ConfigError
from outlast.plan.model.scenario import KEYS

VALUES_MAX = 1000
_BITS = 5  # a node count of a range is 16 to 31 times a power of two: divisors, within 3 %
_MANY = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_SCALES = (_MANY, quantities.SECONDS, quantities.BYTES)
_SHORT_S = (("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86400.0))


class SweepAxis(NamedTuple):
    """A field, and the texts of its values."""

    key: str
    texts: tuple[str, ...]


def parse_axis(text: str, fields: Mapping[str, str]) -> SweepAxis:
    """Parse `gpus=1k,4k,16k`, or a logarithmic range of seven values as `gpus=1k..1M/7`.

    `fields`: the other fields of the scenario. Raises ConfigError.
    """
    name, _, values = text.partition("=")
    key = name.strip().replace("_", "-")
    values = values.strip()
    if not values:
        raise ConfigError(
            f"--over {text}: give a field and its values, as in gpus=1k,4k or 1k..1M/7"
        )
    if match := re.fullmatch(r"(.+?)\.\.(.+)/\s*(\d{1,6})", values):
        texts = _range(
            f"--over {text}", key, match[1].strip(), match[2].strip(), int(match[3]), fields
        )
    elif ".." in values:
        raise ConfigError(f"--over {text}: give the number of values, as in 1k..1M/7")
    else:
        texts = [value.strip() for value in values.split(",")]
    if len(texts) > VALUES_MAX:
        raise ConfigError(f"--over {text}: {len(texts):,} values; at most {VALUES_MAX:,}")
    if twice := next((value for at, value in enumerate(texts) if value in texts[:at]), None):
        raise ConfigError(f"--over {text}: {twice} is given twice")
    return SweepAxis(key, tuple(texts))


def _range(
    what: str, key: str, low: str, high: str, count: int, fields: Mapping[str, str]
) -> list[str]:
    ends = [_split(what, low), _split(what, high)]
    (first, unit), (last, other) = ends
    if not 2 <= count <= VALUES_MAX:
        raise ConfigError(f"{what}: a range has 2 to {VALUES_MAX:,} values")
    if unit != other:
        scale = next((units for units in _SCALES if unit in units and other in units), None)
        if scale is None:
            raise ConfigError(f"{what}: {low} and {high} have different units")
        first = first * scale[unit]
        last = last * scale[other]
        unit = "B" if scale is quantities.BYTES else "s" if scale is quantities.SECONDS else ""
    if not 0 < first < last:
        raise ConfigError(f"{what}: a range is logarithmic: it needs 0 < first < last")
    step = math.log(last / first) / (count - 1)
    between = [first * math.exp(step * at) for at in range(1, count - 1)]
    if _is_whole_number(key):
        unit_size = _MANY.get(unit, 1.0)
        size = _per_node(fields) if key == "gpus" else 1
        texts = [str(_rounded(value * unit_size, size)) for value in between]
    else:
        texts = [_text(value, unit) for value in between]
    return list(dict.fromkeys([low, *texts, high]))


def _split(what: str, text: str) -> tuple[float, str]:
    match = re.fullmatch(r"(\$?)\s*([0-9]+(?:\.[0-9]+)?)\s*(.*)", text)
    if match is None:
        raise ConfigError(f"{what}: {text!r} is not an end of a range; give a number")
    return float(match[2]), match[3]


def _is_whole_number(key: str) -> bool:
    """Return whether the field takes whole numbers only."""
    return key in KEYS and _reads(key, "2") and not _reads(key, "2.5")


def _reads(key: str, text: str) -> bool:
    try:
        KEYS[key].read(key, text)
    except ConfigError:
        return False
    return True


def _per_node(fields: Mapping[str, str]) -> int:
    text = fields.get("gpus-per-node", KEYS["gpus-per-node"].default)
    return quantities.count(f"--gpus-per-node {text}", text) or 1


def _rounded(value: float, size: int) -> int:
    """Round to a multiple of `size`; to one with many divisors for numbers of nodes."""
    units = max(1, round(value / size))
    if size > 1:
        step = 2 ** max(0, units.bit_length() - _BITS)
        units = round(units / step) * step
    return units * size


def _text(value: float, unit: str) -> str:
    """Format with four digits, in a unit that needs no exponent."""
    if unit == "s":
        unit, size = next((entry for entry in reversed(_SHORT_S) if value >= entry[1]), _SHORT_S[0])
        value /= size
    short = f"{float(f'{value:.4g}'):.9f}".rstrip("0").rstrip(".")
    return f"{short}{unit}"
