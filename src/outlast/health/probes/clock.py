"""The clock's source from sysfs, and how far off it is from chrony, else from adjtimex(2)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

from outlast.health.checks.clock import Clock
from outlast.health.contract import AbsentError
from outlast.health.probes.asking import ToolError, said, text

PLACE = "sys/devices/system/clocksource/clocksource0"
STA_NANO, STA_UNSYNC = 0x2000, 0x0040
TIME_ERROR = 5
LONGS_AFTER = 64


class Timex(ctypes.Structure):
    """The first fields of struct timex, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long), ("esterror", ctypes.c_long), ("status", ctypes.c_int),
        ("rest", ctypes.c_long * LONGS_AFTER),
    )  # fmt: skip


class Told(NamedTuple):
    synchronized: bool | None
    off_s: float | None
    error_s: float | None
    by: str


def take(root: Path = Path("/")) -> Clock:
    place = root / PLACE
    told = _chrony() or _kernel()
    return Clock(
        source=text(place / "current_clocksource") or "",
        available=tuple((text(place / "available_clocksource") or "").split()),
        synchronized=told.synchronized, off_s=told.off_s, error_s=told.error_s, told_by=told.by,
    )  # fmt: skip


def _chrony() -> Told | None:
    """None where it is not installed, or its daemon does not run: then the kernel is asked."""
    try:
        return of_chrony(said(["chronyc", "-c", "-n", "tracking"]))
    except (AbsentError, ToolError):
        return None


def of_chrony(line: str) -> Told | None:
    """Fields of `chronyc -c tracking`: ..., 4: how far the clock is off, 10, 11: root delay and
    dispersion, 13: the leap status."""
    fields = line.strip().split(",")
    try:
        error_s = float(fields[10]) / 2 + float(fields[11])
        return Told(fields[13] != "Not synchronised", float(fields[4]), error_s, "chrony")
    except (IndexError, ValueError):
        return None


def _kernel() -> Told:
    timex = Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        return Told(None, None, None, "adjtimex")
    synchronized = state != TIME_ERROR and not timex.status & STA_UNSYNC
    unit = 1e-9 if timex.status & STA_NANO else 1e-6
    return Told(synchronized, timex.offset * unit, timex.esterror * 1e-6, "the kernel")
