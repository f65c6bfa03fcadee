"""Times of accounting, as Unix nanoseconds: without a zone, with one, or as seconds."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from outlast.fleet.sacct.values import NOTHING

SECOND_NS = 10**9
EARLIEST_S = 946_684_800  # 2000-01-01: before Slurm; 1970 is how some versions say "never"
LATEST_S = 4_102_444_800  # 2100-01-01: what lies behind it is no time

LOCAL = "%Y-%m-%dT%H:%M:%S"
NAIVE, ZONED, EPOCH = "without a zone", "with a zone", "as seconds"


class Times(NamedTuple):
    """`ns`: null where there is none, or none that can be. `late_ns`: the later reading of a time
    that the zone has twice, null for others. `wrong`: a text that is no time; `gone`: a time that
    the zone leaves out. `early`: how many were before any Slurm, and thus never; `forms`: how many
    were written how."""

    ns: pl.Series
    late_ns: pl.Series
    wrong: pl.Series
    gone: pl.Series
    early: pl.Series
    forms: dict[str, int]


def read(column: pl.Series, zone: str) -> Times:
    """Of a column of texts; words such as Unknown are no time."""
    local = column.str.to_datetime(LOCAL, strict=False, time_unit="us")
    others = column
    rest = local.is_null() & column.is_not_null()
    if rest.any():  # words, other forms, or blanks around a time
        others = column.set(~rest, None).str.strip_chars()
        others = others.set(others.is_in(NOTHING), None)
        stripped = others.str.to_datetime(LOCAL, strict=False, time_unit="us")
        local = local.zip_with(local.is_not_null(), stripped)
        rest = local.is_null() & others.is_not_null()
    s, late_ns, gone = _localised(local, zone)
    forms = {NAIVE: len(local) - local.null_count()}
    wrong = none = _none(column)
    if rest.any():
        others = others.filter(rest)
        epoch = others.cast(pl.Int64, strict=False)
        offsets = others.str.replace("Z$", "+00:00").str.replace(r"([+-]\d\d):?(\d\d)$", "$1:$2")
        zoned = offsets.str.to_datetime(
            LOCAL + "%:z", strict=False, time_unit="us", time_zone="UTC"
        )
        forms |= {EPOCH: len(epoch) - epoch.null_count(), ZONED: len(zoned) - zoned.null_count()}
        found = epoch.zip_with(epoch.is_not_null(), zoned.to_physical() // 1_000_000)
        s = s.scatter(rest.arg_true(), found)
        wrong = rest & s.is_null()
    early = none
    if not s.is_between(EARLIEST_S, LATEST_S).all():
        early = (s < EARLIEST_S).fill_null(value=False)
        late = (s > LATEST_S).fill_null(value=False)
        s, wrong = s.set(early | late, None), wrong | late
    used = {form: count for form, count in forms.items() if count}
    return Times(s * SECOND_NS, late_ns, wrong, gone, early, used)


def _localised(local: pl.Series, zone: str) -> tuple[pl.Series, pl.Series, pl.Series]:
    """Seconds, the later nanoseconds where there are two readings, and which times are none."""
    if zone == "UTC":
        never = pl.Series([None], dtype=pl.Int64).new_from_index(0, len(local))
        return local.to_physical() // 1_000_000, never, _none(local)
    first, last = (
        local.dt.replace_time_zone(zone, ambiguous=which, non_existent="null").to_physical()
        // 1_000_000
        for which in ("earliest", "latest")
    )
    last_ns = last.set(first == last, None) * SECOND_NS
    return first, last_ns, local.is_not_null() & first.is_null()


def _none(column: pl.Series) -> pl.Series:
    """False for each row."""
    return pl.Series([False]).new_from_index(0, len(column))
