"""Times of accounting, as Unix nanoseconds: without a zone, with one, or as seconds."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from outlast.fleet.sacct.values import NOTHING

SECOND_NS = 10**9
EARLIEST_S = 946_684_800  # 2000-01-01: before Slurm; 1970 is how some versions say "never"
LATEST_S = 4_102_444_800  # 2100-01-01: what lies behind it is no time

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
    texts = column.str.strip_chars() if column.str.contains(r"^\s|\s$").any() else column
    texts = texts.set(texts.is_in(NOTHING), None) if texts.is_in(NOTHING).any() else texts
    size = len(texts)
    local = texts.str.to_datetime("%Y-%m-%dT%H:%M:%S", strict=False, time_unit="us")
    s, late_s, gone = _localised(local, zone)
    forms = {NAIVE: size - local.null_count()}
    rest = local.is_null() & texts.is_not_null()
    if rest.any():
        others = texts.filter(rest)
        epoch = others.cast(pl.Int64, strict=False)
        offsets = others.str.replace("Z$", "+00:00").str.replace(r"([+-]\d\d):?(\d\d)$", "$1:$2")
        zoned = offsets.str.to_datetime(
            "%Y-%m-%dT%H:%M:%S%:z", strict=False, time_unit="us", time_zone="UTC"
        )
        forms |= {EPOCH: len(epoch) - epoch.null_count(), ZONED: len(zoned) - zoned.null_count()}
        found = epoch.zip_with(epoch.is_not_null(), zoned.to_physical() // 1_000_000)
        s = s.scatter(rest.arg_true(), found)
    wrong = texts.is_not_null() & s.is_null() & ~gone
    early = (s < EARLIEST_S).fill_null(value=False)
    wrong |= (s > LATEST_S).fill_null(value=False)
    s = s.set(early | wrong, None)
    return Times(
        s * SECOND_NS, late_s * SECOND_NS, wrong, gone, early,
        {form: count for form, count in forms.items() if count},
    )  # fmt: skip


def _localised(local: pl.Series, zone: str) -> tuple[pl.Series, pl.Series, pl.Series]:
    """Seconds, the later seconds where there are two readings, and which times are none."""
    if zone == "UTC":
        none = pl.Series([None], dtype=pl.Int64).new_from_index(0, len(local))
        return local.to_physical() // 1_000_000, none, none.is_not_null()
    first, last = (
        local.dt.replace_time_zone(zone, ambiguous=which, non_existent="null").to_physical()
        // 1_000_000
        for which in ("earliest", "latest")
    )
    return first, last.set(first == last, None), local.is_not_null() & first.is_null()
