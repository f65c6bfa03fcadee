"""Logs of any shape, as CSV or JSON, read into records as a mapping says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import polars as pl

from outlast.fleet import hosts
from outlast.fleet.mapping import DURATIONS, Mapping, choices, ours, pattern_of, whole
from outlast.fleet.moments import moments
from outlast.fleet.readings import ZONE_ASSUMED, Part, Reading, Reject, Totals, reject
from outlast.fleet.rows import Rows, rows
from outlast.fleet.tables import DAY_NS, schema

# How other schedulers call what Slurm calls so.
STATES = {
    "SUCCEEDED": "COMPLETED", "SUCCESS": "COMPLETED", "DONE": "COMPLETED", "COMPLETE": "COMPLETED",
    "FINISHED": "COMPLETED", "EXIT": "FAILED", "ERROR": "FAILED", "EVICTED": "PREEMPTED",
    "OOMKILLED": "OUT_OF_MEMORY", "CANCELED": "CANCELLED", "KILLED": "CANCELLED",
    "ACTIVE": "RUNNING", "RUN": "RUNNING",
}  # fmt: skip
OPEN = ("RUNNING", "SUSPENDED")
COUNTS, COUNT_MAX = ("nodes", "gpus", "restarts"), 100_000_000  # more than anybody has
LONGEST_NS = 100 * 366 * DAY_NS
BACKWARDS = "jobs that end before they start: their time counts as none"


class Given(NamedTuple):
    """What neither the log nor its mapping says. `taken_ns`: up to when what still runs has run."""

    zone: str
    cluster: str
    taken_ns: int


def read(path: Path, mapping: Mapping, given: Given) -> Reading:
    """Raises SourceError for a file that is neither CSV nor JSON, or has not the columns."""
    source = str(path)

    def parts(totals: Totals) -> Iterator[Part]:
        naive = 0
        for some in rows(path, mapping, totals.quoted):
            totals.rows += len(some.lines) + len(some.torn)
            work = _Work(_frame(some), mapping, given)
            yield _part(source, some, work, mapping, totals)
            naive += work.naive
        if naive and not (mapping.times.zone or given.zone):
            totals.notes.append(ZONE_ASSUMED)

    return Reading(source, mapping.rows, parts)


def _frame(some: Rows) -> pl.DataFrame:
    frame = pl.DataFrame(some.columns, schema=dict.fromkeys(some.columns, pl.String))
    return frame.with_columns(pl.all().str.strip_chars())


def _part(source: str, some: Rows, work: _Work, mapping: Mapping, totals: Totals) -> Part:
    found = {field: work.column(name) for name, field in ours(mapping.kind).items()}
    if mapping.rows == "jobs":
        found = work.whole_jobs(found, totals)
    records = pl.DataFrame({
        field: found.get(field, pl.zeros(len(some.lines), pl.Int64, eager=True))
        for field in mapping.kind.__struct_fields__
    })  # fmt: skip
    reasons = work.reasons()
    if work.twice:
        totals.odd["times that the zone's clocks showed twice: the first was taken"] += work.twice
    bad = reasons.is_not_null()
    rejects = [Reject(source, line, reason, text) for line, reason, text in some.torn]
    rejects += [
        reject(source, some.lines[at], reasons[at], some.texts[at]) for at in bad.arg_true()
    ]
    kept = records.filter(~bad).cast(schema(mapping.kind))  # type: ignore[arg-type]
    return Part({mapping.name: kept}, rejects)


class _Work:
    """Some rows, column by column, and what was wrong with each of them first."""

    def __init__(self, frame: pl.DataFrame, mapping: Mapping, given: Given) -> None:
        self._frame = frame
        self._mapping = mapping
        self._given = given
        self._types = schema(mapping.kind)
        self._words = choices(mapping.kind)
        self._wrong: list[tuple[str, pl.Series]] = []
        self.twice = 0
        self.naive = 0

    def column(self, name: str) -> pl.Series:
        """What a mapping calls so, as the record has it."""
        field = ours(self._mapping.kind)[name]
        texts = self._texts(name)
        if field == "duration":
            return self._duration(texts)
        if field.endswith("_ns"):
            return self._time(name, texts)
        if field in self._words:
            return self._word(field, texts)
        if self._types[field] == pl.Int64:
            return self._number(name, texts)
        if field in ("hosts", "excluded", "failed_node"):
            return self._hosts(name, texts)
        if field in ("node", "job", "check"):
            self._note(f"no {name}", texts == "")
        return texts

    def whole_jobs(self, found: dict[str, pl.Series], totals: Totals) -> dict[str, pl.Series]:
        """An end from a start and a duration, or from now for what still runs."""
        going_on = found["state"].is_in(OPEN)
        until = found["start_ns"] + found.pop("duration")
        end = found["t_ns"].zip_with(found["t_ns"].is_not_null(), until)
        now = pl.Series([self._given.taken_ns], dtype=pl.Int64).new_from_index(0, len(end))
        end = end.zip_with(end.is_not_null() | ~going_on, now)
        self._note("no end, nor a start and a duration", end.is_null())
        backwards = int((end < found["start_ns"]).sum())
        if backwards:
            totals.odd[BACKWARDS] += backwards
        named = hosts.sizes(found["hosts"]).fill_null(0)
        other = int(((found["nodes"] != named) & (found["nodes"] > 0) & (named > 0)).sum())
        if other:
            totals.odd[hosts.OTHER_NODES] += other
        return {**found, "t_ns": end, "nodes": named.zip_with(named > 0, found["nodes"])}

    def reasons(self) -> pl.Series:
        """Null for rows that are well."""
        none = pl.Series([None], dtype=pl.String).new_from_index(0, self._frame.height)
        for reason, where in reversed(self._wrong):
            none = none.set(where.fill_null(value=False), reason)
        return none

    def _note(self, reason: str, where: pl.Series) -> None:
        if where.any():
            self._wrong.append((reason, where))

    def _texts(self, name: str) -> pl.Series:
        column = self._mapping.columns.get(name)
        if column is not None:
            return self._frame[column].alias(name)
        default = self._given.cluster if name == "cluster" else ""
        constant = self._mapping.constants.get(name, default)
        return pl.Series(name, [str(constant)]).new_from_index(0, self._frame.height)

    def _time(self, name: str, texts: pl.Series) -> pl.Series:
        times = self._mapping.times
        found = moments(texts, times.zone or self._given.zone or "UTC", times.format)
        self.twice += found.twice
        self.naive += found.naive
        self._note(f"no time between 2000 and 2100: {name}", found.wrong)
        if name == "time":
            self._note("no time", texts == "")
        return found.ns

    def _duration(self, texts: pl.Series) -> pl.Series:
        each = DURATIONS[self._mapping.times.duration]
        found = texts.cast(pl.Float64, strict=False)
        known = (found >= 0) & (found * each <= LONGEST_NS)
        self._note("no duration", ~known.fill_null(value=False) & (texts != ""))
        return (found.set(~known.fill_null(value=False), None) * each).cast(pl.Int64)

    def _number(self, name: str, texts: pl.Series) -> pl.Series:
        found = texts.str.strip_suffix(".0").cast(pl.Int64, strict=False)
        wrong = found.is_null() & (texts != "")
        if name in COUNTS:
            wrong |= ~found.is_between(0, COUNT_MAX).fill_null(value=True)
        self._note(f"no number: {name}", wrong)
        return found.fill_null(0)

    def _hosts(self, name: str, texts: pl.Series) -> pl.Series:
        lists = texts.str.replace_all(r"[\s;]+|,\s+", ",")
        lists = lists.set(lists.is_in(hosts.NOBODY), "")
        self._note(f"no host list: {name}", hosts.sizes(lists).is_null())
        return lists

    def _word(self, field: str, texts: pl.Series) -> pl.Series:
        """Every distinct text is translated once."""
        table = self._mapping.values.get(field, {})
        distinct = texts.unique()
        known = _translated(distinct, table, field, self._words[field])
        found = texts.replace_strict(distinct, known, return_dtype=pl.String)
        self._note(f"no {field} that is known: [values.{field}] can translate it", found.is_null())
        return found.cast(pl.Enum(self._words[field]))


def _translated(
    texts: pl.Series, table: dict[str, str], field: str, words: Iterable[str]
) -> list[str | None]:
    """By the table's own words, its patterns in their order, our words, or for all others."""
    by_pattern: dict[str, str] = {}
    for theirs, word in table.items():
        pattern = pattern_of(theirs)
        if pattern is not None:
            for text in texts.filter(texts.str.contains(whole(pattern))):
                by_pattern.setdefault(text, word)
    folded = {word.lower(): word for word in words}
    if field == "state":
        folded |= {theirs.lower(): word for theirs, word in STATES.items()}
    if field == "symptom" and "*" not in table:
        folded[""] = "other"
    others = table.get("*")
    return [
        table.get(text) or by_pattern.get(text) or folded.get(text.lower(), others)
        for text in texts
    ]
