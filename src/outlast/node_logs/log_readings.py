"""Readings of node logs: findings, unread text, folded storms, timestamps, device addresses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import cache, lru_cache
from itertools import islice
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from outlast.log_records import Finding

SECOND_NS = 10**9
DAY_NS = 86_400 * SECOND_NS
T_NS_MAX = 2**63 - 1
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
SECONDS_DIGITS_MAX = 12
NO_BOOT = "seconds since boot, and the time of boot was not given"
LEFT_OUT = "a time that the zone's clocks skip: pass the zone of this log with --zone"
YEARS_BACK = 8  # to the last 29 February, also across 1900 or 2100


class UnplacedError(Exception):
    """Unknown time of a line; the message names the missing information."""


class LogClock(NamedTuple):
    """Context of a log's times.

    `boot_ns`: the machine's boot, for times in seconds since boot; `read_ns`: when the log was
    read, for times without a year; `bare_ns`: for lines without a time; `zone`: for times without
    a zone; `on_twice` is called for each time that is ambiguous in `zone`; the first one is used.
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
    """Convert a date without a year to the latest such date up to one day after the reading.

    The day allows for clock differences. Raises UnplacedError.
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


TEXT_MAX = 400  # characters of a line that are kept


class UnreadText(msgspec.Struct, frozen=True):
    """Text that could not be interpreted. `line` counts from 1; 0 is the whole text."""

    line: int
    reason: str
    text: str


Reading = Finding | UnreadText


def cut_text(text: str) -> str:
    """Return a text cut to TEXT_MAX characters."""
    text = text.strip()
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


OPEN_MAX = 100_000  # kinds of findings at once; the oldest are yielded first

Key = tuple[str, str, str, str, str, str, str]


@cache
def _count_pattern() -> re.Pattern[str]:
    return re.compile(r" \{(\d{1,18}) times in (\d{1,10}(?:\.\d{1,9})?) s\}$", re.ASCII)


def finding_count(finding: Finding) -> int:
    """Return the number of findings that a folded one stands for."""
    found = _count_pattern().search(finding.detail)
    return int(found[1]) if found else 1


def last_ns(finding: Finding) -> int:
    """Return the time of a finding's last occurrence; `t_ns` is that of the first.

    Of two contradictory findings (link down, link up) the later one holds.
    """
    found = _count_pattern().search(finding.detail)
    return finding.t_ns + (decimal_ns(found[2]) if found else 0)


def fold_storms(readings: Iterable[Reading], window_s: float) -> Iterator[Reading]:
    """Fold repeated findings within `window_s` seconds of the first into one.

    Findings with equal node, check, symptom, severity, code and device are folded. The result has
    the time and detail of the first, with a count, as in `GPU has fallen off the bus {27586 times
    in 3600 s}`.

    Counts of previously folded findings are added. Findings are yielded when their windows end, not
    in order of time; UnreadText immediately. Memory is bounded by the number of distinct findings.
    """
    window_ns = round(window_s * SECOND_NS)
    open_: dict[Key, list[int]] = {}  # first, last, count
    firsts: dict[Key, Finding] = {}
    for one in readings:
        if not isinstance(one, Finding):
            yield one
            continue
        key = (one.cluster, one.node, one.check, one.symptom, one.severity, one.code, one.device)
        found = open_.get(key)
        if found and abs(one.t_ns - found[0]) <= window_ns:
            found[0], found[1] = min(found[0], one.t_ns), max(found[1], last_ns(one))
            found[2] += finding_count(one)
            continue
        if found:
            yield _fold(firsts.pop(key), open_.pop(key))
        elif len(open_) >= OPEN_MAX:
            for old in list(islice(open_, OPEN_MAX // 10)):
                yield _fold(firsts.pop(old), open_.pop(old))
        open_[key] = [one.t_ns, last_ns(one), finding_count(one)]
        firsts[key] = one
    for key, found in open_.items():
        yield _fold(firsts[key], found)


def _fold(first: Finding, found: list[int]) -> Finding:
    since_ns, until_ns, many = found
    if many == 1:
        return first
    detail = _count_pattern().sub("", first.detail)
    whole_s, rest_ns = divmod(until_ns - since_ns, SECOND_NS)
    seconds = f"{whole_s}.{rest_ns:09d}".rstrip("0").rstrip(".")
    return replace(first, t_ns=since_ns, detail=f"{detail} {{{many} times in {seconds} s}}")


@cache
def _address() -> re.Pattern[str]:
    parts = r"(?:PCI:)?(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?"
    return re.compile(parts, re.IGNORECASE)


@lru_cache(4096)  # a storm has few devices
def device_address(text: str) -> str:
    """Return a PCI address as 0000:3b:00.0; any other text unchanged.

    Accepts PCI:0000:3b:00, 00000000:3B:00.0 and 3b:00.0.
    """
    found = _address().fullmatch(text.strip())
    if not found:
        return text.strip()
    domain, bus, slot, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus.lower()}:{slot.lower()}.{function or '0'}"
