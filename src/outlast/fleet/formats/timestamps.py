"""Timestamps of any written form, parsed by columns into Unix nanoseconds."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

EARLIEST_S = 946_684_800  # 2000-01-01: older than any current cluster
LATEST_S = 4_102_444_800  # 2100-01-01
NUMBER = r"^\d{1,19}(\.\d*)?$"
_OFFSET = r"([T\s]\d\d:\d\d.*?)\s?(Z|UTC|[+-]\d\d(?::?\d\d)?)$"  # after a time, not a date
_NEVER = pl.lit(None, pl.Datetime("us"))
_SHAPES = ("%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M", "%Y-%m-%d")
# Decimal digits of a second in one unit.
UNITS = {"unix": 9, "unix-ms": 6, "unix-us": 3, "unix-ns": 0}


class ParsedTimestamps(NamedTuple):
    """Times of a column.

    `ns`: null for an empty or invalid text. `wrong`: invalid, not empty. `skipped`: of these, times
    that the zone skips. `twice`: number of ambiguous times, of which the first was taken. `naive`:
    number without an offset.
    """

    ns: pl.Series
    wrong: pl.Series
    skipped: pl.Series
    twice: int
    naive: int


def parse_timestamps(
    texts: pl.Series,
    zone: str,
    format_: str | None = None,
    *,
    epoch_ns: int | None = None,
    earliest_ns: int = EARLIEST_S * 10**9,
) -> ParsedTimestamps:
    """Read times from texts.

    `format_`: of strftime, or one of UNITS; None: ISO 8601, or a number since 1970 in the unit
    that puts it between 2000 and 2100. `zone`: of times without an offset. With `epoch_ns` numbers
    count from then, in seconds unless `format_` names another unit. Times before `earliest_ns` are
    invalid.
    """
    frame = pl.DataFrame({"text": texts.str.strip_chars()})
    if epoch_ns is not None:
        format_ = format_ or "unix"
    text = pl.col("text")
    if format_ in UNITS:
        parsed = frame.select(
            ns=_number(text, UNITS[format_]), local=pl.lit(None, pl.Datetime("us"))
        )
    elif format_ is not None:
        parsed = _parse_formatted(frame, format_)
    else:
        parsed = _guess_format(frame)
    ns, twice = _localise(parsed["ns"], parsed["local"], zone)
    skipped = ns.is_null() & parsed["local"].is_not_null()
    if epoch_ns is not None:
        ns = ns + epoch_ns
    inside = (ns >= earliest_ns) & (ns < LATEST_S * 10**9)
    ns = ns.set(~inside.fill_null(value=True), None)
    return ParsedTimestamps(
        ns,
        ns.is_null() & (frame["text"] != "").fill_null(value=False),
        skipped,
        twice,
        parsed["local"].count(),
    )


def _number(text: pl.Expr, digits: int) -> pl.Expr:
    """Parse a decimal number exactly."""
    integer = text.str.extract(r"^(\d{1,19})", 1).cast(pl.Int64, strict=False)
    behind = text.str.extract(r"\.(\d+)$", 1).fill_null("").str.pad_end(9, "0").str.slice(0, digits)
    fraction = behind.cast(pl.Int64, strict=False).fill_null(0)
    fits = integer <= (2**63 - 10**9) // 10**digits
    return pl.when(text.str.contains(NUMBER) & fits).then(integer * 10**digits + fraction)


def _guess_format(frame: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    length = text.str.extract(r"^(\d+)", 1).str.len_chars()
    number = (
        pl.when(length <= 11)
        .then(_number(text, 9))
        .when(length <= 14)
        .then(_number(text, 6))
        .when(length <= 17)
        .then(_number(text, 3))
        .otherwise(_number(text, 0))
    )
    plain = text.str.replace(_OFFSET, "$1").str.replace(r"^(\S+) +", "${1}T").str.replace(",", ".")
    local = pl.coalesce(
        plain.str.to_datetime(shape, strict=False, time_unit="us") for shape in _SHAPES
    )
    offset = text.str.extract(_OFFSET, 2)
    zoned = local.dt.timestamp("us") * 1000 - _offset_ns(offset)
    return frame.select(
        ns=pl.when(text.str.contains(NUMBER)).then(number).when(offset.is_not_null()).then(zoned),
        local=pl.when(offset.is_null()).then(local),
    )


def _offset_ns(offset: pl.Expr) -> pl.Expr:
    """Return the nanoseconds of +01:00, -0730, +05 or Z."""
    hours = offset.str.extract(r"^[+-](\d\d)", 1).cast(pl.Int64).fill_null(0)
    minutes = offset.str.extract(r"^[+-]\d\d:?(\d\d)$", 1).cast(pl.Int64).fill_null(0)
    sign = pl.when(offset.str.starts_with("-")).then(-1).otherwise(1)
    return sign * (hours * 3600 + minutes * 60) * 10**9


def _parse_formatted(frame: pl.DataFrame, format_: str) -> pl.DataFrame:
    text = pl.col("text")
    if "%z" in format_ or "%:z" in format_:
        aware = text.str.to_datetime(format_, strict=False, time_unit="us", time_zone="UTC")
        return frame.select(ns=aware.dt.timestamp("us") * 1000, local=_NEVER)
    return frame.select(
        ns=pl.lit(None, pl.Int64), local=text.str.to_datetime(format_, strict=False, time_unit="us")
    )


def _localise(ns: pl.Series, local: pl.Series, zone: str) -> tuple[pl.Series, int]:
    """Return local times in the zone, null for skipped ones, and the number of ambiguous ones."""
    first, last = (
        local.dt.replace_time_zone(zone, ambiguous=which, non_existent="null").dt.timestamp("us")
        * 1000
        for which in ("earliest", "latest")
    )
    return ns.zip_with(ns.is_not_null(), first), int((first != last).sum())
