"""Check of the clock: its source, and its offset by chrony or adjtimex(2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from outlast.health.check_contract import (
    AbsentError,
    Check,
    JudgeContext,
    Observation,
    Probe,
    Sample,
    ToolError,
    read_text,
    run_tool,
)
from outlast.health.check_settings import CheckSettings


class ClockSample(Sample, frozen=True):
    """State of the clock.

    `available`: clock sources, the kernel's preferred first. `synchronized`: as the kernel reports
    it. `off_s`: offset reported by the time service, else by the kernel.
    """

    source: str
    available: tuple[str, ...]
    synchronized: bool | None = None
    off_s: float | None = None
    error_s: float | None = None
    told_by: str = ""


def judge(sample: ClockSample, about: JudgeContext) -> Iterator[Observation]:
    """Judge the clock source, the synchronisation and the offset."""
    wanted = about.settings.clock
    found = [*_source(sample, wanted.source)]
    if sample.synchronized is None:
        found.append(Observation("unknown", "its synchronization state is unknown"))
    elif not sample.synchronized and wanted.synchronized is not False:
        detail = f"{sample.told_by} reports the clock as unsynchronized"
        known = wanted.synchronized is True
        detail += "" if known else ": its offset is unknown"
        found.append(Observation("drain" if known else "unknown", detail))
    elif sample.off_s is not None and abs(sample.off_s) > wanted.skew_s:
        text = f"{sample.off_s:+.3f} s off by {sample.told_by}; limit {wanted.skew_s:g} s"
        found.append(Observation("drain", text))
    yield from found
    if not found:
        off = "" if sample.off_s is None else f", {sample.off_s * 1e3:+.3f} ms off"
        yield Observation("healthy", f"{sample.source or 'a source without a name'}{off}")


def _source(sample: ClockSample, wanted: str) -> Iterator[Observation]:
    if not sample.source:
        yield Observation("unknown", "the kernel reports no clock source")
    elif wanted and sample.source != wanted:
        yield Observation("drain", f"the source is {sample.source}; {wanted} is expected")
    elif not wanted and sample.available and sample.source != sample.available[0]:
        best = sample.available[0]
        yield Observation("warn", f"the source is {sample.source}, although {best} is available")


def _probes(_: CheckSettings) -> Iterable[Probe[ClockSample]]:

    yield Probe("", take)


CHECK = Check("clock", "clock", ClockSample, _probes, judge)


PLACE = "sys/devices/system/clocksource/clocksource0"
STA_NANO = 0x2000
STA_UNSYNC = 0x0040
TIME_ERROR = 5
LONGS_AFTER = 64


class ClockOffset(NamedTuple):
    """Synchronisation state and offset, and its source `by`; None: not reported."""

    synchronized: bool | None
    off_s: float | None
    error_s: float | None
    by: str


def take(root: Path = Path("/")) -> ClockSample:
    """Read the clock source from sysfs, and the offset from chrony or else adjtimex(2)."""
    place = root / PLACE
    offset = _chrony() or _kernel()
    return ClockSample(
        source=read_text(place / "current_clocksource") or "",
        available=tuple((read_text(place / "available_clocksource") or "").split()),
        synchronized=offset.synchronized,
        off_s=offset.off_s,
        error_s=offset.error_s,
        told_by=offset.by,
    )


def _chrony() -> ClockOffset | None:
    """Return the offset by chrony; None if it is not installed or its daemon does not run."""
    try:
        return of_chrony(run_tool(["chronyc", "-c", "-n", "tracking"]))
    except (AbsentError, ToolError):
        return None


def of_chrony(line: str) -> ClockOffset | None:
    """Parse `chronyc -c tracking`; None if it is malformed.

    Fields: 4 offset, 10 and 11 root delay and dispersion, 13 leap status.
    """
    fields = line.strip().split(",")
    try:
        error_s = float(fields[10]) / 2 + float(fields[11])
        return ClockOffset(fields[13] != "Not synchronised", float(fields[4]), error_s, "chrony")
    except (IndexError, ValueError):
        return None


def _kernel() -> ClockOffset:
    import ctypes  # only here: it takes a while to import

    class Timex(ctypes.Structure):
        """The first fields of struct timex, and room for the rest."""

        _fields_ = (
            ("modes", ctypes.c_uint),
            ("offset", ctypes.c_long),
            ("freq", ctypes.c_long),
            ("maxerror", ctypes.c_long),
            ("esterror", ctypes.c_long),
            ("status", ctypes.c_int),
            ("rest", ctypes.c_long * LONGS_AFTER),
        )

    timex = Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        return ClockOffset(None, None, None, "adjtimex")
    synchronized = state != TIME_ERROR and not timex.status & STA_UNSYNC
    unit = 1e-9 if timex.status & STA_NANO else 1e-6
    return ClockOffset(synchronized, timex.offset * unit, timex.esterror * 1e-6, "the kernel")
