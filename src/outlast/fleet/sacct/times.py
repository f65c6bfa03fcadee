"""Times of accounting, as Unix nanoseconds: without a zone, with one, or as seconds."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from outlast.fleet.sacct.values import NOTHING

SECOND_NS = 10**9
EARLIEST_US = 946_684_800_000_000  # 2000-01-01: before Slurm; 1970 is how some versions say "never"
LATEST_US = 4_102_444_800_000_000  # 2100-01-01: what lies behind it is no time

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
    rest = (local.is_null() & column.is_not_null()).arg_true()
    others = column.gather(rest).str.strip_chars()
    if len(rest):  # words, other forms, or blanks around a time
        others = others.set(others.is_in(NOTHING), None)
        stripped = others.str.to_datetime(LOCAL, strict=False, time_unit="us")
        local = local.scatter(rest, stripped)
        others = others.set(stripped.is_not_null(), None)
    us, late_us, gone = _localised(local, zone)
    forms = {NAIVE: len(local) - local.null_count()}
    wrong = none = _none(column)
    if others.null_count() < len(others):
        epoch_us = (
            others.cast(pl.Int64, strict=False).clip(-1, LATEST_US // 1_000_000 + 1) * 1_000_000
        )
        offsets = others.str.replace("Z$", "+00:00").str.replace(r"([+-]\d\d):?(\d\d)$", "$1:$2")
        zoned = offsets.str.to_datetime(
            LOCAL + "%:z", strict=False, time_unit="us", time_zone="UTC"
        )
        found = epoch_us.zip_with(epoch_us.is_not_null(), zoned.to_physical())
        for form, some in ((EPOCH, epoch_us), (ZONED, zoned)):
            forms[form] = len(some) - some.null_count()
        told = others.is_not_null()
        us = us.scatter(rest.filter(told), found.filter(told))
        wrong = none.scatter(rest.filter(told & found.is_null()), True)
    early = none
    if not us.is_between(EARLIEST_US, LATEST_US).all():
        early = (us < EARLIEST_US).fill_null(value=False)
        late = (us > LATEST_US).fill_null(value=False)
        us, wrong = us.set(early | late, None), wrong | late
    used = {form: count for form, count in forms.items() if count}
    return Times(us * 1000, late_us * 1000, wrong, gone, early, used)


def _localised(local: pl.Series, zone: str) -> tuple[pl.Series, pl.Series, pl.Series]:
    """Microseconds, the later ones where there are two readings, and which times are none."""
    if zone == "UTC":
        return local.to_physical(), _none(local).cast(pl.Int64).clear(len(local)), _none(local)
    first, last = (
        local.dt.replace_time_zone(zone, ambiguous=which, non_existent="null").to_physical()
        for which in ("earliest", "latest")
    )
    return first, last.set(first == last, None), local.is_not_null() & first.is_null()


def _none(column: pl.Series) -> pl.Series:
    """False for each row."""
    return pl.Series([False]).new_from_index(0, len(column))
