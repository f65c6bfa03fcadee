"""CSV and JSON logs of any shape, read into records by a column mapping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import polars as pl

from outlast.fleet import host_lists, lake
from outlast.fleet.formats.column_mapping import (
    DURATIONS,
    ColumnMapping,
    field_choices,
    field_names,
    full_match,
    parse_moment,
    pattern_of,
)
from outlast.fleet.formats.log_reading import (
    NO_UTF8,
    TWICE,
    VANISHED,
    ZONE_ASSUMED,
    LogReading,
    ReadTotals,
    RecordBatch,
    Reject,
    make_reject,
)
from outlast.fleet.formats.log_rows import NOT_TRUE, LogRows, read_rows
from outlast.fleet.formats.timestamps import EARLIEST_S, LATEST_S, parse_timestamps
from outlast.fleet.host_lists import to_slurm_list
from outlast.fleet.record_tables import DAY_NS, schema

# Other schedulers' names of Slurm's states.
STATES = {
    "SUCCEEDED": "COMPLETED", "SUCCESS": "COMPLETED", "DONE": "COMPLETED", "COMPLETE": "COMPLETED",
    "FINISHED": "COMPLETED", "EXIT": "FAILED", "ERROR": "FAILED", "EVICTED": "PREEMPTED",
    "OOMKILLED": "OUT_OF_MEMORY", "CANCELED": "CANCELLED", "KILLED": "CANCELLED",
    "ACTIVE": "RUNNING", "RUN": "RUNNING", "NODELOST": "NODE_FAIL", "NODESHUTDOWN": "NODE_FAIL",
    "DEADLINEEXCEEDED": "TIMEOUT", "BACKOFFLIMITEXCEEDED": "FAILED", "PREEMPTING": "PREEMPTED",
}  # fmt: skip
# Values for a missing time: words, and the zeros of Slurm, Go and Unix.
NEVER = (
    *host_lists.NOBODY, "0", "0.0", "null", "NULL", "none", "unknown", "NaT", "nan", "NaN", "-",
    "0001-01-01T00:00:00Z", "1970-01-01T00:00:00Z", "1970-01-01T00:00:00", "1970-01-01 00:00:00",
)  # fmt: skip
QUEUED = ("PENDING", "PEND", "QUEUED", "WAITING", "SUSPENDED_BY_QUEUE", "SUBMITTED", "CREATED")
QUEUED_REASON = "job that has not been allocated any node"
RAN = ("COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
OPEN = ("RUNNING", "SUSPENDED")
COUNTS, COUNT_MAX = ("nodes", "gpus", "restarts"), 100_000_000  # beyond any cluster
LONGEST_NS = 100 * 366 * DAY_NS
ENDS_FIRST = "outages that end before they begin: they took no time"
SEVERAL_NODES = "several nodes in one row: give each of them a row of its own"
UNCLEAR = (
    f"time of {NOT_TRUE}: name the status, as in [type=Ready,status=False] or"
    " [type=Ready,status=True]"
)
WORDS_SHOWN = 8
NO_GPUS = "jobs that say no number of GPUs, where others do: they count as on none"
GPUS_UNSAID = "the mapping names no `gpus`: all its jobs count as on none"
NO_DURATION = 'no duration: it is a number in the unit of [times] (duration = "min")'
OPEN_ENDS = "jobs that run and say an end: the end counts; is it the last time seen?"
NO_START = "a job that runs and did not start"
NEVER_BEGAN = "jobs that ended well or failed and say no start: they count for no time"
OTHER_SPAN = "end less start is not the duration: the end counts; is its unit right ([times])?"
SPAN_SLACK_NS = 60 * 10**9
BACKWARDS = "jobs that end before they start: their time counts as none"


class MappedLogContext(NamedTuple):
    """Context that neither the log nor its mapping contains.

    `taken_ns`: end so far of jobs that still run.
    """

    zone: str
    cluster: str
    taken_ns: int
    passed_over: tuple[str, str] | None = None  # rows without this column, and what they are


def read_mapped(path: Path, mapping: ColumnMapping, given: MappedLogContext) -> LogReading:
    """Read a CSV or JSON log by its mapping.

    Raises SourceError for any other file, or one without the columns.
    """
    source = str(path)

    def parts(totals: ReadTotals) -> Iterator[RecordBatch]:
        naive, sized, unsized = 0, 0, 0
        strange: dict[str, dict[str, None]] = {}
        for some in read_rows(path, mapping, totals.quoted):
            totals.rows += len(some.lines) + len(some.torn)
            frame = _frame(some)
            if mapping.rows == "jobs":
                some, frame = _drop_rows(some, frame, _is_queued(mapping), QUEUED_REASON, totals)
            if given.passed_over is not None:
                column, what = given.passed_over
                some, frame = _drop_rows(some, frame, pl.col(column) == "", what, totals)
            work = _Work(frame, mapping, given)
            yield _part(source, some, work, mapping, totals)
            naive += work.naive
            for field, words in work.strange.items():
                strange.setdefault(field, {}).update(dict.fromkeys(words))
            sized, unsized = sized + work.sized, unsized + work.unsized
        if naive and not (mapping.times.zone or given.zone):
            totals.notes.append(ZONE_ASSUMED)
        for field, words in strange.items():
            some = ", ".join(repr(word[:40]) for word in list(words)[:WORDS_SHOWN])
            totals.quoted.append(f"[values.{field}] lacks words of this log: {some}")
        if sized and unsized:
            totals.odd[NO_GPUS] += unsized
        if mapping.rows == "jobs" and not (mapping.sources("gpus") or "gpus" in mapping.constants):
            totals.notes.append(GPUS_UNSAID)

    return LogReading(source, mapping.rows, parts)


def _has_invalid_utf8(frame: pl.DataFrame) -> pl.Series:
    """Return which rows have invalid UTF-8 in a column that the mapping names."""
    some = (
        pl.any_horizontal(pl.all().str.contains("\ufffd")) if frame.width else pl.lit(value=False)
    )
    return frame.select(some.alias("garbled")).to_series()


def _is_queued(mapping: ColumnMapping) -> pl.Expr:
    """Return which rows are jobs that never held nodes.

    A state that the mapping translates does not count as queued.
    """
    states, starts = mapping.sources("state"), mapping.sources("start")
    table = {theirs.upper() for theirs in mapping.values.get("state", {})}
    words = [word for word in QUEUED if word not in table]
    if not states or "*" in table:
        return pl.lit(value=False)
    has_state = pl.any_horizontal(pl.col(column) != "" for column in states)
    return pl.all_horizontal(
        has_state,
        *(pl.col(column).str.to_uppercase().is_in([*words, ""]) for column in states),
        *(pl.col(column).is_in(NEVER) for column in starts),
    )


def _drop_rows(
    some: LogRows, frame: pl.DataFrame, without: pl.Expr, what: str, totals: ReadTotals
) -> tuple[LogRows, pl.DataFrame]:
    """Drop rows and count them as skipped."""
    if not frame.height:
        return some, frame
    out = frame.select(without.alias("out")).get_column("out")
    if len(out) == 1 < frame.height:
        out = out.new_from_index(0, frame.height)
    if not out.any():
        return some, frame
    totals.skipped[what] += int(out.sum())
    at = (~out).arg_true().to_list()
    lines, texts = [some.lines[i] for i in at], [some.texts[i] for i in at]
    return some._replace(columns={}, lines=lines, texts=texts), frame.filter(~out)


def _frame(some: LogRows) -> pl.DataFrame:
    frame = pl.DataFrame(some.columns, schema=dict.fromkeys(some.columns, pl.String))
    return frame.with_columns(pl.all().str.strip_chars())


def _part(
    source: str, some: LogRows, work: _Work, mapping: ColumnMapping, totals: ReadTotals
) -> RecordBatch:
    columns = {field: work.column(name) for name, field in field_names(mapping.kind).items()}
    if mapping.rows == "jobs":
        columns = work.whole_jobs(columns)
    if some.lines and work.frame.width:
        work.mark_odd(NO_UTF8, _has_invalid_utf8(work.frame))
    records = pl.DataFrame(
        {
            field: columns.get(field, pl.zeros(len(some.lines), pl.Int64, eager=True))
            for field in mapping.kind.__struct_fields__
        }
    )
    reasons = work.reasons()
    if work.twice:
        totals.odd[TWICE] += work.twice
    bad = reasons.is_not_null()
    for what, where in work.odd:
        if kept_odd := int((where.fill_null(value=False) & ~bad).sum()):
            totals.odd[what] += kept_odd
    if mapping.rows == "jobs" and mapping.sources("gpus"):
        blank = (work.texts("gpus") == "") & ~bad
        work.unsized = int(blank.sum())
        work.sized = int((~bad).sum()) - work.unsized
    rejects = [Reject(source, line, reason, text) for line, reason, text in some.torn]
    rejects += [
        make_reject(source, some.lines[at], reasons[at], some.texts[at]) for at in bad.arg_true()
    ]
    if mapping.rows == "outages":
        backwards = records.filter(~bad, pl.col("until_ns") < pl.col("t_ns")).height
        if backwards:
            totals.odd[ENDS_FIRST] += backwards
    accepted = records.filter(~bad).cast(schema(mapping.kind))  # type: ignore[arg-type]
    return RecordBatch({mapping.name: accepted}, rejects)


class _Work:
    """Some rows, converted column by column, and the first error of each."""

    def __init__(
        self, frame: pl.DataFrame, mapping: ColumnMapping, given: MappedLogContext
    ) -> None:
        self.frame = frame
        self._mapping = mapping
        self._given = given
        self._types = schema(mapping.kind)
        self._words = field_choices(mapping.kind)
        times = mapping.times
        self._epoch_ns = parse_moment(Path("times"), "epoch", times.epoch)
        earliest_ns = parse_moment(Path("times"), "earliest", times.earliest)
        default_ns = min(EARLIEST_S * 10**9, self._epoch_ns or LATEST_S * 10**9)
        self._earliest_ns = default_ns if earliest_ns is None else earliest_ns
        self._wrong: list[tuple[str, pl.Series]] = []
        self.strange: dict[str, list[str]] = {}  # words of each field without a translation
        self.odd: list[tuple[str, pl.Series]] = []  # anomalies and their rows
        self.sized = self.unsized = 0  # accepted jobs with and without a number of GPUs
        self.twice = 0
        self.naive = 0

    def column(self, name: str) -> pl.Series:
        """Return a field's values, converted for the record."""
        field = field_names(self._mapping.kind)[name]
        texts = self.texts(name)
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
        if field == "node":
            self._note(SEVERAL_NODES, texts.str.contains(r"[,\[\]]"))
        if field in ("node", "job", "check"):
            self._note(f"no {name}", texts == "")
        return texts

    def whole_jobs(self, columns: dict[str, pl.Series]) -> dict[str, pl.Series]:
        """Complete jobs: an end from a start and a duration, or the time taken if still running."""
        going_on = columns["state"].is_in(OPEN)
        span, end = columns.pop("duration"), columns["t_ns"]
        begin = columns["start_ns"].zip_with(columns["start_ns"].is_not_null(), end - span)
        columns["start_ns"] = begin
        self.mark_odd(OTHER_SPAN, (end - begin - span).abs() > SPAN_SLACK_NS)
        self.mark_odd(OPEN_ENDS, going_on & end.is_not_null())
        end = end.zip_with(end.is_not_null(), begin + span)
        self._note(NO_START, going_on & begin.is_null())
        self.mark_odd(NEVER_BEGAN, begin.is_null() & columns["state"].is_in(RAN))
        now = pl.Series([self._given.taken_ns], dtype=pl.Int64).new_from_index(0, len(end))
        end = end.zip_with(end.is_not_null() | ~going_on, now)
        self._note("no end, nor a start and a duration", end.is_null())
        self.mark_odd(BACKWARDS, end < columns["start_ns"])
        named = host_lists.count_hosts(columns["hosts"]).fill_null(0)
        stated = columns["nodes"]
        wrong = (stated > 0) & (named > host_lists.FAR_MORE_TIMES * stated)
        if wrong.any():
            self.mark_odd(host_lists.FAR_MORE, wrong)
            columns["hosts"] = columns["hosts"].set(wrong, "")
            named = named.set(wrong, 0)
        differ = (columns["nodes"] != named) & (columns["nodes"] > 0) & (named > 0)
        self.mark_odd(host_lists.OTHER_NODES, differ)
        nodes = named.zip_with(named > 0, stated)
        sizes = pl.DataFrame({"nodes": nodes, "gpus": columns["gpus"]})
        large = sizes.select(host_lists.too_large(pl.col("nodes"), pl.col("gpus")).alias("large"))
        self._note(host_lists.TOO_LARGE, large["large"])
        return {**columns, "t_ns": end, "nodes": nodes}

    def reasons(self) -> pl.Series:
        """Return each row's reject reason; null for a valid row."""
        none = pl.Series([None], dtype=pl.String).new_from_index(0, self.frame.height)
        for reason, where in reversed(self._wrong):
            none = none.set(where.fill_null(value=False), reason)
        return none

    def mark_odd(self, what: str, where: pl.Series) -> None:
        """Remember anomalous rows; only those that become records are counted."""
        if where.any():
            self.odd.append((what, where))

    def _note(self, reason: str, where: pl.Series) -> None:
        if where.any():
            self._wrong.append((reason, where))

    def texts(self, name: str) -> pl.Series:
        """Return the raw texts of a field: the first column that is not empty, or the constant."""
        columns = self._mapping.sources(name)
        if columns:
            first_given = (
                pl.coalesce(
                    pl.when(~pl.col(column).is_in(host_lists.NOBODY)).then(pl.col(column))
                    for column in columns[:-1]
                )
                if columns[1:]
                else pl.lit(None, pl.String)
            )
            return self.frame.select(
                first_given.fill_null(pl.col(columns[-1])).alias(name)
            ).to_series()
        default = self._given.cluster if name == "cluster" else ""
        constant = self._mapping.constants.get(name, default)
        return pl.Series(name, [str(constant)]).new_from_index(0, self.frame.height)

    def _time(self, name: str, texts: pl.Series) -> pl.Series:
        times = self._mapping.times
        self._note(f"{UNCLEAR}: {name}", texts == NOT_TRUE)
        unset = NEVER if times.epoch is None else host_lists.NOBODY
        texts = texts.set(texts.is_in(unset), "")
        found = parse_timestamps(
            texts,
            times.zone or self._given.zone or "UTC",
            times.format,
            epoch_ns=self._epoch_ns,
            earliest_ns=self._earliest_ns,
        )
        self.twice += found.twice
        self.naive += found.naive
        self._note(f"{VANISHED}: {name}", found.skipped)
        first = lake.format_time(self._earliest_ns)[:4]
        self._note(f"no time between {first} and 2100: {name}", found.wrong)
        if name == "time":
            self._note("no time", texts == "")
        return found.ns

    def _duration(self, texts: pl.Series) -> pl.Series:
        each = DURATIONS[self._mapping.times.duration]
        values = texts.cast(pl.Float64, strict=False)
        known = (values >= 0) & (values * each <= LONGEST_NS)
        self._note(NO_DURATION, ~known.fill_null(value=False) & (texts != ""))
        return (values.set(~known.fill_null(value=False), None) * each).cast(pl.Int64)

    def _number(self, name: str, texts: pl.Series) -> pl.Series:
        counts = texts.str.strip_suffix(".0").cast(pl.Int64, strict=False)
        wrong = counts.is_null() & (texts != "")
        if name in COUNTS:
            wrong |= ~counts.is_between(0, COUNT_MAX).fill_null(value=True)
        self._note(f"no number: {name}", wrong)
        return counts.fill_null(0)

    def _hosts(self, name: str, texts: pl.Series) -> pl.Series:
        lists = texts.str.replace_all(r"[\s;]+|,\s+", ",")
        lists = lists.set(lists.is_in(host_lists.NOBODY), "")
        distinct = lists.unique()
        known = pl.Series([to_slurm_list(text) for text in distinct], dtype=pl.String)
        lists = lists.replace_strict(distinct, known, return_dtype=pl.String)
        self._note(
            f"no host list: {name}", lists.is_null() | host_lists.count_hosts(lists).is_null()
        )
        return lists.fill_null("")

    def _word(self, field: str, texts: pl.Series) -> pl.Series:
        """Translate every distinct text once."""
        table = self._mapping.values.get(field, {})
        distinct = texts.unique()
        known = _translate_words(distinct, table, field, self._words[field])
        words = texts.replace_strict(distinct, known, return_dtype=pl.String)
        unknown = texts.filter(words.is_null()).unique().sort()
        if len(unknown):
            self.strange[field] = unknown.head(WORDS_SHOWN).to_list()
        self._note(f"no {field} that is known: [values.{field}] can translate it", words.is_null())
        return words.cast(pl.Enum(self._words[field]))


def _translate_words(
    texts: pl.Series, table: dict[str, str], field: str, words: Iterable[str]
) -> list[str | None]:
    """Translate by the table's words, its patterns in order, our words, or its default."""
    by_pattern: dict[str, str] = {}
    for theirs, word in table.items():
        pattern = pattern_of(theirs)
        if pattern is not None:
            for text in texts.filter(texts.str.contains(full_match(pattern))):
                by_pattern.setdefault(text, word)
    folded = {word.lower(): word for word in words}
    if field == "state":
        folded |= {theirs.lower(): word for theirs, word in STATES.items()}
    if field == "symptom" and "*" not in table:
        folded[""] = "other"
    default = table.get("*")
    return [
        table.get(text) or by_pattern.get(text) or folded.get(text.lower(), default)
        for text in texts
    ]
