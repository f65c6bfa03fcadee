"""Mapping files: the columns of a log that hold each field of a record.

rows = "events"                # or jobs, outages, repairs, nodes, checks

items = "data.jobs"            # path of the rows in a JSON object; default "items", as of kubectl

delimiter = ","                # of CSV
quotes = true                  # of CSV; false: a " is an ordinary character

[columns]                      # ours = theirs; in JSON also a path (log_rows.py)
time = "timestamp"
until = ["fixed", "closed"]    # the first that is not empty
node = "host"
symptom = "kind"

[constants]                    # the same for all rows
check = "nightly"
severity = "warn"

[times]
zone = "Europe/Paris"
format = "%d/%m/%Y %H:%M:%S"   # else ISO 8601, or a number since 1970
epoch = "2020-03-01"           # origin of numbers (seconds, or in the unit of `format`)
earliest = "1993-01-01"        # earlier times are invalid; default 2000

[values.symptom]               # theirs = ours; /a pattern/; * for all others
"ECC" = "gpu-memory"
"/nv-?link.*/" = "nvlink"
"*" = "other"
"""

from __future__ import annotations

import datetime as dt
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
import polars as pl

from outlast.config import read_toml
from outlast.errors import UsageError
from outlast.fleet.formats.log_reading import refuse_special_file
from outlast.fleet.formats.timestamps import UNITS
from outlast.fleet.record_tables import KIND_OF, Name
from outlast.log_records import Record

Rows = Literal["events", "jobs", "outages", "repairs", "nodes", "checks"]
Duration = Literal["s", "ms", "min", "h"]
DURATIONS: dict[Duration, int] = {"ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}
# Required fields, as a column or as a constant.
_NEEDED: dict[Rows, tuple[str, ...]] = {
    "events": ("time", "node", "check", "symptom", "severity"),
    "jobs": ("job", "state"),
    "outages": ("time", "node"),
    "repairs": ("time", "node", "kind"),
    "nodes": ("time", "node"),
    "checks": ("time", "check", "symptom"),
}


class TimeColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Format of times.

    `zone`: of times without one; None takes that of the command line, else UTC. `epoch`: origin of
    numeric times; None: 1970. `earliest`: earlier times are invalid.
    """

    zone: str | None = None
    format: str | None = None
    epoch: str | None = None
    earliest: str | None = None
    duration: Duration = "s"


class ColumnMapping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a mapping file."""

    rows: Rows
    columns: dict[str, str | list[str]]
    items: str = "items"
    delimiter: str = ","
    quotes: bool = True
    constants: dict[str, str | int] = {}
    times: TimeColumns = TimeColumns()
    values: dict[str, dict[str, str]] = {}

    def sources(self, name: str) -> list[str]:
        """Return the columns of our field `name`, of which the first that is not empty counts."""
        columns = self.columns.get(name, [])
        return [columns] if isinstance(columns, str) else columns

    @property
    def names(self) -> list[str]:
        """All columns that are named, each once."""
        return list(dict.fromkeys(column for name in self.columns for column in self.sources(name)))

    @property
    def name(self) -> Name:
        """Name of the table that it fills."""
        return "findings" if self.rows == "events" else self.rows

    @property
    def kind(self) -> type[Record]:
        """Record type of the table."""
        return KIND_OF[self.name]


def field_names(kind: type[Record]) -> dict[str, str]:
    """Return the mapping's name of each field of a record, without computed fields."""
    jobs = "submit_ns" in kind.__struct_fields__
    named = {
        {"t_ns": "end" if jobs else "time"}.get(field, field.removesuffix("_ns")): field
        for field in kind.__struct_fields__
        if field != "attempt"
    }
    return {**named, "duration": "duration"} if jobs else named


def field_choices(kind: type[Record]) -> dict[str, tuple[str, ...]]:
    """Return the fields with a fixed set of words, and those words."""
    hints = get_type_hints(kind)
    return {field: get_args(hint) for field, hint in hints.items() if get_origin(hint) is Literal}


def load_mapping(path: Path) -> ColumnMapping:
    """Load and validate a mapping.

    Raises UsageError for invalid content, with a close match if there is one.
    """
    refuse_special_file(path)
    content = read_toml(path, "mapping", "nothing was read")
    try:
        _refuse_typos(path, "key", content, ColumnMapping.__struct_fields__)
        _refuse_typos(path, "value of rows", [str(content.get("rows", "events"))], _NEEDED)
        times = content.get("times")
        if isinstance(times, dict):
            _refuse_typos(path, "key in [times]", times, TimeColumns.__struct_fields__)
        mapping = msgspec.convert(content, ColumnMapping)
    except msgspec.ValidationError as error:
        raise UsageError(f"mapping {path}: {error}") from error
    _check_mapping(path, mapping)
    return mapping


def _check_mapping(path: Path, mapping: ColumnMapping) -> None:
    fields = field_names(mapping.kind)
    for where in ("columns", "constants"):
        _refuse_typos(path, f"name in [{where}]", getattr(mapping, where), fields)
    words = field_choices(mapping.kind)
    _refuse_typos(path, "table in [values]", mapping.values, words)
    for field, table in mapping.values.items():
        for theirs, word in table.items():
            _refuse_typos(path, f"value of {theirs!r} in [values.{field}]", [word], words[field])
            _check_pattern(path, theirs)
    for field, constant in mapping.constants.items():
        if field in words:
            _refuse_typos(path, f"{field} in [constants]", [str(constant)], words[field])
    if twice := sorted(mapping.columns.keys() & mapping.constants.keys()):
        raise UsageError(f"mapping {path}: {twice[0]} is in [columns] and in [constants]")
    given = mapping.columns.keys() | mapping.constants.keys()
    if missing := [field for field in _NEEDED[mapping.rows] if field not in given]:
        raise UsageError(
            f"mapping {path}: rows = {mapping.rows!r} needs {', '.join(missing)}, in [columns] or"
            " in [constants]"
        )
    if len(mapping.delimiter) != 1:
        raise UsageError(f"mapping {path}: delimiter {mapping.delimiter!r} is not one character")
    if mapping.times.format is not None and not (
        mapping.times.format in UNITS or "%" in mapping.times.format
    ):
        raise UsageError(
            f"mapping {path}: format {mapping.times.format!r} is unknown: use {', '.join(UNITS)}"
            " or a format as in %Y-%m-%d %H:%M:%S"
        )
    _check_zone(path, mapping.times.zone)
    for key in ("epoch", "earliest"):
        parse_moment(path, key, getattr(mapping.times, key))
    if mapping.times.epoch and mapping.times.format not in (None, *UNITS):
        raise UsageError(f"mapping {path}: epoch is of times that are numbers, not of a format")


def parse_moment(path: Path, key: str, text: str | None) -> int | None:
    """Return a moment of [times] in Unix ns, UTC where it has no zone. Raises UsageError."""
    if text is None:
        return None
    try:
        when = dt.datetime.fromisoformat(text)
        known = when if when.tzinfo else when.replace(tzinfo=dt.UTC)
        if not 1970 <= known.year < 2100:
            raise ValueError("not between 1970 and 2100")
        return round(known.timestamp()) * 10**9
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"mapping {path}: {key} {text!r} is not a date or time from 1970 on, as in 2020-03-01"
        ) from error


def _check_zone(path: Path, zone: str | None) -> None:
    try:
        ZoneInfo(zone or "UTC")
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UsageError(f"mapping {path}: there is no time zone {zone!r}") from error


def _check_pattern(path: Path, theirs: str) -> None:
    pattern = pattern_of(theirs)
    if pattern is None:
        return
    try:
        for each in (pattern, full_match(pattern)):
            pl.Series([""]).str.contains(each)
    except pl.exceptions.ComputeError as error:
        why = str(error).strip().splitlines()[-1]
        raise UsageError(
            f"mapping {path}: pattern {theirs[:80]}: {why} (look-around and back-references are not"
            " supported: their time is not bounded)"
        ) from error


def pattern_of(theirs: str) -> str | None:
    """Return the pattern between the slashes of /.../; None for plain text."""
    return theirs[1:-1] if len(theirs) > 2 and theirs[0] == theirs[-1] == "/" else None


def full_match(pattern: str) -> str:
    """Return a case-insensitive pattern of a whole text for polars.

    polars matches in time linear in the text, for any pattern.
    """
    return f"(?i)^(?:{pattern})$"


def _refuse_typos(path: Path, what: str, names: Iterable[str], known: Iterable[str]) -> None:
    listed = list(known)
    for name in names:
        if name not in listed:
            close = difflib.get_close_matches(name, listed, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(listed)}"
            raise UsageError(f"mapping {path}: {what} is not known: {name}; {hint}")
