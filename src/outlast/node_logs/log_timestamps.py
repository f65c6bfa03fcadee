"""Parsers of the timestamps in log lines."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import NamedTuple

SECOND_NS = 10**9
DAY_NS = 86_400 * SECOND_NS
T_NS_MAX = 2**63 - 1
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
SECONDS_DIGITS_MAX = 12
NO_BOOT = "seconds since boot, and the time of boot was not given"
LEFT_OUT = "a time that the zone's clocks skip: pass the zone of this log with --zone"
YEARS_BACK = 8  # to the last 29 February, also across 1900 or 2100


class UnplacedError(Exception):
    """The time of a line is unknown; the message names what is missing."""


class LogClock(NamedTuple):
    """Context of a log's times.

    `boot_ns`: the machine's boot; `read_ns`: when the log was read; `bare_ns`: for lines without a
    time; `on_twice` is called for each time that is ambiguous in `zone`, of which the first is
    taken.
    """

    boot_ns: int | None = None
    read_ns: int | None = None
    bare_ns: int | None = None
    zone: tzinfo = UTC
    on_twice: Callable[[], None] = lambda: None


def checked_ns(t_ns: int) -> int:
    """Return a time if a record can hold it. Raises UnplacedError."""
    if not 0 <= t_ns <= T_NS_MAX:
        raise UnplacedError("a time out of any range")
    return t_ns


def decimal_ns(text: str) -> int:
    """Convert seconds such as 12345.678901 exactly. Raises UnplacedError."""
    whole_s, _, fraction = text.partition(".")
    if len(whole_s) > SECONDS_DIGITS_MAX:
        raise UnplacedError("a time out of any range")
    return int(whole_s) * SECOND_NS + int((fraction + "0" * 9)[:9])


def since_boot_ns(after_ns: int, clock: LogClock) -> int:
    """Convert a time since boot. Raises UnplacedError if the time of boot is unknown."""
    if clock.boot_ns is None:
        raise UnplacedError(NO_BOOT)
    return checked_ns(clock.boot_ns + after_ns)


def zoned_ns(day: tuple[int, int, int], time: str, zone: tzinfo, *, fold: int = 0) -> int:
    """Convert a local time.

    `day`: year, month, day; `time`: 16:24:18 or 16:24:18.123456; `fold`: 1 for the second of two
    ambiguous times. Raises UnplacedError.
    """
    clock_time, _, fraction = time.partition(".")
    try:
        hour, minute, second = (int(part) for part in clock_time.split(":"))
        local = datetime(*day, hour, minute, min(second, 59), tzinfo=zone, fold=fold)
        since = local - datetime(1970, 1, 1, tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise UnplacedError(f"no such date or time: {error}") from error
    seconds = since.days * 86_400 + since.seconds + (second == 60)  # a leap second
    return checked_ns(seconds * SECOND_NS + int((fraction + "0" * 9)[:9]))


def local_ns(day: tuple[int, int, int], time: str, clock: LogClock) -> int:
    """Convert a time in the clock's zone.

    Raises UnplacedError, also for a time that the zone skips in spring.
    """
    first, second = (zoned_ns(day, time, clock.zone, fold=fold) for fold in (0, 1))
    if second < first:
        raise UnplacedError(LEFT_OUT)
    if second > first:
        clock.on_twice()
    return first


def month_number(name: str) -> int:
    """Return 1 to 12 for Jan to Dec. Raises UnplacedError."""
    if name not in MONTHS:
        raise UnplacedError(f"no such month: {name}")
    return MONTHS.index(name) + 1


def iso_ns(day: str, time: str, zone: str | None, clock: LogClock) -> int:
    """Convert an ISO date and time.

    `zone`: Z, +0100, +01:00, a name, or None for the clock's zone. Raises UnplacedError.
    """
    year, month_, day_ = (int(part) for part in day.split("-"))
    here = (year, month_, day_)
    time = time.replace(",", ".")
    if zone is None:
        return local_ns(here, time, clock)
    if zone in {"Z", "UTC", "GMT"}:
        return zoned_ns(here, time, UTC)
    if zone[0] in "+-":
        digits = zone[1:].replace(":", "").ljust(4, "0")
        if not (digits.isascii() and digits.isdecimal()):
            raise UnplacedError(f"no such zone: {zone}")
        offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:4]))
        if offset >= timedelta(days=1):
            raise UnplacedError(f"no such zone: {zone}")
        return zoned_ns(here, time, timezone(offset if zone[0] == "+" else -offset))
    known = ""
    for fold in (1, 0):
        t_ns = zoned_ns(here, time, clock.zone, fold=fold)
        known = datetime.fromtimestamp(t_ns // SECOND_NS, clock.zone).tzname()
        if known == zone:
            return t_ns
    raise UnplacedError(f"a time in the zone {zone}, and the zone given is {known}")


def yearless_ns(month_: str, day: str, time: str, clock: LogClock) -> int:
    """Convert a date without a year to the latest one up to a day after the reading.

    The day allows for differing clocks. Raises UnplacedError.
    """
    if clock.read_ns is None:
        raise UnplacedError("a time without a year, and when the log was read was not given")
    newest = checked_ns(clock.read_ns) + DAY_NS
    try:
        last = datetime.fromtimestamp(newest // SECOND_NS, clock.zone).year
    except (ValueError, OverflowError) as error:
        raise UnplacedError(f"no such time of reading: {error}") from error
    for year in range(last, last - YEARS_BACK - 1, -1):
        here = (year, month_number(month_), int(day))
        try:
            t_ns = zoned_ns(here, time, clock.zone)
        except UnplacedError:
            continue
        if t_ns <= newest:
            return local_ns(here, time, clock)
    raise UnplacedError(f"no such date: {month_} {day} {time}")
