"""Job records, rejects and counts from accounting rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set

import polars as pl

from outlast.errors import SourceError
from outlast.fleet import host_lists
from outlast.fleet.formats.log_reading import (
    VANISHED,
    ZONE_ASSUMED,
    ReadTotals,
    RecordBatch,
    make_reject,
    number_attempts,
)
from outlast.fleet.formats.sacct import sacct_values
from outlast.fleet.formats.sacct.sacct_columns import COLUMNS, SacctOptions, convert_rows
from outlast.fleet.formats.sacct.sacct_values import NAIVE, SECOND_NS
from outlast.fleet.record_tables import Name, schema
from outlast.log_records import JobEnded

REQUEUED_STATES = ("NODE_FAIL", "PREEMPTED", "REQUEUED")  # earlier ends of a requeued job
ENOUGH = 1000  # jobs of which at least one is normally requeued


class HiddenAttempts:
    """Detector of earlier attempts that a log omits. Keeps only records of requeued jobs."""

    def __init__(self) -> None:
        self.jobs = 0
        self._has_later_attempts = False
        self._counts = False
        self._requeued: list[pl.DataFrame] = []

    def add(self, jobs: pl.DataFrame, restarts_known: bool) -> None:
        """Add records of jobs. `restarts_known`: the log has a column of restarts."""
        self.jobs += jobs.height
        self._counts |= restarts_known
        self._has_later_attempts = self._has_later_attempts or bool((jobs["attempt"] > 0).any())
        requeued = (pl.col("restarts") > 0) | pl.col("state").cast(pl.String).is_in(REQUEUED_STATES)
        job = pl.struct("cluster", "job").hash().alias("job")
        self._requeued.append(jobs.lazy().filter(requeued).select(job, "restarts").collect())

    def notes(self) -> list[str]:
        """Return a note on omitted attempts; none without evidence."""
        if not self._requeued:
            return []
        by_job = (
            pl.concat(self._requeued)
            .group_by("job")
            .agg(pl.len().alias("n"), pl.col("restarts").max())
        )
        missing = (
            by_job.filter(pl.col("restarts") > 0)
            .select((pl.col("restarts") + 1 - pl.col("n")).clip(lower_bound=0).sum())
            .item()
        )
        if missing and not self._has_later_attempts:
            return [
                f"sacct ran without --duplicates: {missing:,} earlier attempts of jobs that were"
                " requeued are hidden, and with them every NODE_FAIL that was requeued"
            ]
        if missing:
            return [
                f"{missing:,} earlier attempts of jobs that were requeued are not in this log"
                " (Restarts counts them): they ended before it begins, or it was cut"
            ]
        if self.jobs >= ENOUGH and not self._has_later_attempts and not self._counts:
            return [
                f"none of {self.jobs:,} jobs has two records: sacct ran without --duplicates, it"
                " seems, and then every NODE_FAIL that was requeued is hidden"
            ]
        return []


SCHEMA = schema(JobEnded)
UNFINISHED = ("RUNNING", "SUSPENDED")
HOUR_NS = 3600 * SECOND_NS
SLACK_NS = 60 * SECOND_NS  # tolerance between elapsed time and end less start

STEP = "step of a job"
QUEUED = "job that has not been allocated any node"
HEADER = "header again"

NO_JOB = "no job id"
NO_TASK = "a range of array tasks with a start: sacct gives each task that ran a row of its own"
NO_STATE = "no job state that Slurm has"
NO_TIME = "a time that cannot be read"
NO_END = "no end, and no elapsed time"
NO_START = "a job that runs and did not start"
ENDS_FIRST = "a job that ends before it starts"

MISMATCH = "end minus start differs from elapsed: suspended, or clocks disagree"
HOUR_OFF = "end minus start differs from elapsed by an hour: times may be of another zone"
BACKWARDS = "a job that started before it was submitted: clocks disagree"
NEGATIVE = "a negative elapsed time: not used"
UNNAMED = "a job that ran on nodes that it does not name"

_JOB = r"^\d+(_\d+|\+\d+)?$"
_RANGE = r"^\d+_\["
_STEP = r"^\d[^.]*\.."


class JobConverter:
    """Converter of one log's rows into job tables, part by part.

    A running job is known up to the log's latest time, which is only known at the end of the log:
    without an elapsed time it comes in the last part.
    """

    def __init__(
        self, source: str, known: Set[str], options: SacctOptions, totals: ReadTotals
    ) -> None:
        """Create the converter of one log. `known`: columns of `COLUMNS` that the log has."""
        self._source = source
        self._known = known
        self._options = options
        self._totals = totals
        self._hidden = HiddenAttempts()
        self._forms: set[str] = set()
        self._open: list[pl.DataFrame] = []
        self._last_ns = 0

    def part(
        self, texts: pl.DataFrame, lines: pl.Series, text_of: Callable[[int], str]
    ) -> RecordBatch:
        """Convert rows with some columns of `COLUMNS`, as texts.

        `lines`: line of each row; `text_of`: the whole row at an index.
        """
        self._totals.rows += texts.height
        lost = [
            pl.lit(None, pl.String).alias(name) for name in COLUMNS if name not in texts.columns
        ]
        rows = self._job_rows(texts.with_columns(lines.alias("at"), *lost).with_row_index("index"))
        if rows.is_empty():
            return RecordBatch({}, [])
        rows, odd, forms = convert_rows(
            rows, self._known, self._options.zone, self._options.cluster
        )
        self._forms |= forms
        rows = _accept_rows(_add_end(rows, self._known, self._options.taken_ns))
        bad = rows.filter(pl.col("reason").is_not_null()).select("index", "at", "reason")
        rejects = [
            make_reject(self._source, line, reason, text_of(index))
            for index, line, reason in bad.iter_rows()
        ]
        good = rows.filter(pl.col("reason").is_null()) if rejects else rows
        self._totals.odd += odd + _oddities(good, "hosts" in self._known)
        return RecordBatch(self._tables(good), rejects)

    def last(self) -> RecordBatch:
        """Return the jobs that were running when the log ended, and add the notes about the log."""
        if len(self._forms) > 1:
            self._totals.notes.append(f"times are written {' and '.join(sorted(self._forms))}")
        if NAIVE in self._forms and not self._options.is_zone_given:
            self._totals.notes.append(ZONE_ASSUMED)
        tables = []
        if self._open:
            running = pl.concat(self._open)
            self._open.clear()
            self._totals.notes.append(
                f"{running.height:,} running jobs have no elapsed time: taken as"
                " running until the last time in the log"
            )
            until = pl.max_horizontal(pl.lit(self._last_ns, pl.Int64), "start_ns")
            tables.append(self._numbered_jobs(running.with_columns(t_ns=until)))
        self._totals.notes += self._hidden.notes()
        if self._totals.skipped[STEP] and not self._hidden.jobs:
            self._totals.notes.append("all rows are of steps, none of a job: its jobs are unknown")
        return RecordBatch({"jobs": tables[0]} if tables else {}, [])

    def _tables(self, good: pl.DataFrame) -> dict[Name, pl.DataFrame]:
        """Return the job table; records that need the end of the log are postponed."""
        moments = ("submit_ns", "eligible_ns", "start_ns", "t_ns")
        latest = good.select(pl.max_horizontal(pl.col(moments).max())).item()
        self._last_ns = max(self._last_ns, latest or 0)
        waiting = good["t_ns"].is_null()
        if waiting.any():
            self._open.append(good.filter(waiting))
            good = good.filter(~waiting)
        return {"jobs": self._numbered_jobs(good)} if good.height else {}

    def _numbered_jobs(self, jobs: pl.DataFrame) -> pl.DataFrame:
        jobs = number_attempts(jobs.with_columns(attempt=pl.lit(0, pl.Int64)))
        jobs = jobs.select(pl.col(name).cast(kind) for name, kind in SCHEMA.items())
        self._hidden.add(jobs, "restarts" in self._known)
        return jobs

    def _job_rows(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of jobs that held nodes, with `state` in our terms; count the others."""
        job = pl.col("job")
        state = pl.col("state")
        odd = rows["job"].cast(pl.Int64, strict=False).null_count()
        if odd:
            named = job.str.to_lowercase().is_in(COLUMNS["job"])
            again = named & (state.str.to_lowercase() == "state")
            self._refuse_other_header(rows.filter(again.fill_null(value=False)))
            rows = self._drop_rows(rows, again, HEADER)
            rows = self._drop_rows(rows, job.str.contains(_STEP), STEP)
        rows = rows.with_columns(
            sacct_values.map_texts(rows["state"], sacct_values.parse_state, pl.String())
        )
        idle = pl.col("start").is_null() | pl.col("start").is_in(sacct_values.NOTHING)
        rows = self._drop_rows(rows, (state == sacct_values.PENDING), QUEUED)
        return self._drop_rows(rows, job.str.contains(_RANGE) & idle, QUEUED) if odd else rows

    def _refuse_other_header(self, rows: pl.DataFrame) -> None:
        """Raise SourceError for a second header with its columns in other places.

        The rows after it would be misread.
        """
        for ours in sorted(self._known):
            other = rows.filter(~pl.col(ours).str.to_lowercase().is_in(COLUMNS[ours]))
            if other.height:
                line, name = other.select("at", ours).row(0)
                raise SourceError(
                    f"{self._source} has a second header in line {line} with other columns ({name}"
                    f" where the first has {COLUMNS[ours][0]}): read the two parts as logs of their"
                    " own; nothing was changed"
                )

    def _drop_rows(self, rows: pl.DataFrame, which: pl.Expr, what: str) -> pl.DataFrame:
        mask = rows.select(which.fill_null(value=False).alias("which"))["which"]
        count = int(mask.sum())
        if not count:
            return rows
        self._totals.skipped[what] += count
        return rows.filter(~mask)


def _add_end(rows: pl.DataFrame, known: Set[str], taken_ns: int | None) -> pl.DataFrame:
    """Add `t_ns`, null if unknown, and clear the nodes of jobs that never had any.

    Slurm writes the time of a cancellation as both start and end, and the requested nodes.
    """
    span_ns = pl.when(pl.col("span_s") >= 0).then(pl.col("span_s") * SECOND_NS)
    rows = rows.with_columns(span_ns=span_ns)
    start = pl.col("start_ns")
    end = pl.col("end_ns")
    span = pl.col("span_ns")
    ends = _has_ended()
    if "start" not in known:
        rows = rows.with_columns(start_ns=end - span)
    if "hosts" in known:
        never = ends & (pl.col("hosts") == "") & (pl.coalesce(span, end - start) == 0)
        rows = rows.with_columns(start_ns=pl.when(~never.fill_null(value=False)).then(start))
    taken = pl.lit(taken_ns, pl.Int64)
    started = start.is_not_null()
    return rows.with_columns(
        pl.when(started).then(pl.col("nodes", "gpus")).otherwise(0),
        pl.when(started).then("hosts").otherwise(pl.lit("")).alias("hosts"),
        t_ns=pl.coalesce(end, start + span, pl.when(~ends).then(taken)),
    )


def _accept_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the `reason` that a row is no record; null for a record."""
    job = pl.col("job")
    start = pl.col("start_ns")
    no_time = pl.col("t_ns").is_null()
    odd_names = {
        NO_TASK: job.str.contains(_RANGE),
        NO_JOB: ~job.str.contains(_JOB).fill_null(value=False),
    }
    number = rows["job"].cast(pl.Int64, strict=False)
    all_plain = not number.null_count() and not (number < 0).any()
    reasons = ({} if all_plain else odd_names) | {
        NO_STATE: pl.col("state").is_null(),
        NO_TIME: pl.col("wrong"),
        VANISHED: pl.col("skipped"),
        NO_START: ~_has_ended() & start.is_null(),
        NO_END: _has_ended() & no_time,
        ENDS_FIRST: pl.col("t_ns") < start,
        host_lists.TOO_LARGE: host_lists.too_large(pl.col("nodes"), pl.col("gpus")),
    }
    return rows.with_columns(
        reason=pl.coalesce(pl.when(which).then(pl.lit(reason)) for reason, which in reasons.items())
    )


def _oddities(rows: pl.DataFrame, named: bool) -> Counter[str]:
    """Count the records that are kept despite an anomaly."""
    start = pl.col("start_ns")
    end = pl.col("end_ns")
    span = pl.col("span_ns")
    off = (end - start - span).abs()
    hour = (off - HOUR_NS).abs() <= 2 * SECOND_NS
    odd = rows.select(
        ((off > SLACK_NS) & ~hour).sum().alias(MISMATCH),
        hour.sum().alias(HOUR_OFF),
        (start < pl.col("submit_ns")).sum().alias(BACKWARDS),
        (pl.col("span_s") < 0).sum().alias(NEGATIVE),
        (pl.lit(named) & (pl.col("hosts") == "") & (pl.col("nodes") > 0)).sum().alias(UNNAMED),
    )
    return Counter({name: count for name, count in odd.row(0, named=True).items() if count})


def _has_ended() -> pl.Expr:
    return ~pl.col("state").is_in(UNFINISHED)
