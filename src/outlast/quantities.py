"""Quantities as people write them: 10TB, 200MB/s, 30min, 7d, 50kh, 16k, 0.5%, $2.50."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from datetime import time as clock_time

from outlast.errors import ConfigError

SECONDS = {
    "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "kh": 3_600_000,
    "d": 86400, "w": 7 * 86400, "y": 365 * 86400,
}  # fmt: skip
BYTES = {
    "B": 1,
    **{f"{unit}B": 1000**power for power, unit in enumerate("kMGTP", 1)},
    "KB": 1000,
    **{f"{unit}iB": 1024**power for power, unit in enumerate("KMGTP", 1)},
}
_TIMES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}
_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,20})?)"
_SCALED = rf"({_NUMBER}(?:[eE][+-]?[0-9]{{1,2}})?)"


def measured(units: dict[str, float], what: str, text: str, like: str) -> float:
    """Parse a number with its unit.

    `units`: SECONDS or BYTES, the unit of the result. Raises ConfigError, which names `what` and
    shows an example (`like`).
    """
    match = re.fullmatch(rf"{_NUMBER}\s*([A-Za-z]+)", text.strip())
    if match is None or match[2] not in units:
        raise ConfigError(f"{what!r} needs a number and one of {', '.join(units)}, as in {like}")
    return float(match[1]) * units[match[2]]


def size(what: str, text: str, like: str = "5GB") -> int:
    """Parse bytes, at least 1. Raises ConfigError as `measured`."""
    found = int(measured(BYTES, what, text, like))
    if found < 1:
        raise ConfigError(f"{what!r} is less than one byte; give more, as in {like}")
    return found


def rate(what: str, text: str) -> int:
    """Parse bytes a second, as in `200MB/s` or `200MB`. Raises ConfigError as `size`."""
    return size(what, text.strip().removesuffix("/s"), "200MB/s")


def count(what: str, text: str) -> int:
    """Parse a whole number, as in `16384`, `16,384`, `100k` or `1.5M`. Raises ConfigError."""
    text = text.strip()
    if re.fullmatch(r"[0-9]{1,3}(,[0-9]{3}){1,4}", text):  # 1,5k is no 15k
        text = text.replace(",", "")
    match = re.fullmatch(rf"{_NUMBER}\s*([kMG]?)", text)
    found = float(match[1]) * _TIMES[match[2]] if match else 0.5
    if found != int(found):
        raise ConfigError(f"{what!r} needs a whole number, as in 16384, 100k or 1M")
    return int(found)


def share(what: str, text: str) -> float:
    """Parse a share from 0 to 1: `0.5%`, `0.005`, `5e-3`.

    Raises ConfigError, also for a bare `1`.
    """
    if text.strip() == "1":
        raise ConfigError(f"{what!r} can be 1 % or all: give 1% or 100%")
    match = re.fullmatch(rf"{_SCALED}\s*(%?)", text.strip())
    found = float(match[1]) / (100 if match[3] else 1) if match else 2.0
    if found > 1:
        raise ConfigError(f"{what!r} needs a share from 0 to 1, as in 5% or 0.05")
    return found


def number(what: str, text: str) -> float:
    """Parse a number of 0 or above, as in `2.5` or `2.5e3`. Raises ConfigError."""
    match = re.fullmatch(_SCALED, text.strip())
    if match is None:
        raise ConfigError(f"{what!r} needs a number, as in 2.5")
    return float(match[1])


def price(what: str, text: str) -> float:
    """Parse dollars, as in `$2.50` or `2.5`. Raises ConfigError."""
    return number(what, text.strip().removeprefix("$").lstrip())


def seconds_until(text: str, what: str) -> float:
    """Parse a duration or a time to come; return the seconds until then. Raises ConfigError, which
    names `what`."""
    like = "90s, 17:30 or 2026-11-28T17:30:00+01:00"
    if re.fullmatch(r"[0-9]{2}:[0-9]{2}(:[0-9]{2})?", text):
        try:
            clock = clock_time.fromisoformat(text)
        except ValueError as error:
            raise ConfigError(f"{what} {text}: no time of a day; give {like}") from error
        now = datetime.now().astimezone()
        at = now.replace(hour=clock.hour, minute=clock.minute, second=clock.second, microsecond=0)
        if at <= now:
            at += timedelta(days=1)
        return (at - now).total_seconds()
    try:
        at = datetime.fromisoformat(text).astimezone()
    except ValueError:
        found = measured(SECONDS, f"{what} {text}", text, like)
    else:
        found = (at - datetime.now().astimezone()).total_seconds()
    if not found > 0:
        raise ConfigError(f"{what} {text}: this time is past")
    return found
