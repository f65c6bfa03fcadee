"""`sacct --json`, of Slurm 21.08 and of later versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from outlast.errors import SourceError
from outlast.fleet.formats.log_reading import ReadTotals, RecordBatch, make_reject, read_bounded
from outlast.fleet.formats.sacct.sacct_columns import COLUMNS, SacctOptions
from outlast.fleet.formats.sacct.sacct_jobs import STEP, JobConverter

JOBS_AT_ONCE = 50_000
BYTES_MAX = 2 << 30  # of a document, which is read at once
NO_VALUE = 0xFFFF_FF00  # from here on 32 bit numbers mean "none" or "without end"
MALFORMED = "a job that has not the shape of sacct --json"
KNOWN = COLUMNS.keys() - {"elapsed", "gres", "asked_tres", "asked_gres"}


class SacctNumber(msgspec.Struct, frozen=True):
    """A number that may be unset or infinite."""

    set: bool = True
    infinite: bool = False
    number: float = 0


Maybe = int | float | SacctNumber | None


class SacctArray(msgspec.Struct, frozen=True):
    """Array job and task; `task` is the range of pending tasks."""

    job_id: Maybe = 0
    task_id: Maybe = None
    task: str | None = None


class SacctHetJob(msgspec.Struct, frozen=True):
    """Heterogeneous job and the offset of its component."""

    job_id: Maybe = 0
    job_offset: Maybe = None


class SacctSignal(msgspec.Struct, frozen=True):
    """Signal that ended a job, by either version's key."""

    id: Maybe = None
    signal_id: Maybe = None


class SacctExit(msgspec.Struct, frozen=True):
    """Exit code and signal."""

    return_code: Maybe = None
    signal: SacctSignal | None = None


class SacctTime(msgspec.Struct, frozen=True):
    """Times of a job in Unix seconds."""

    start: Maybe
    end: Maybe
    submission: Maybe
    eligible: Maybe = None
    elapsed: Maybe = None


class SacctState(msgspec.Struct, frozen=True):
    """State of a job, a text before Slurm 23.02."""

    current: str | list[str]


class SacctResource(msgspec.Struct, frozen=True):
    """Trackable resource (TRES) and its count."""

    type: str
    count: Maybe = 0
    name: str | None = None


class SacctResources(msgspec.Struct, frozen=True):
    """Allocated resources of a job."""

    allocated: list[SacctResource] = []


class SacctJob(msgspec.Struct, frozen=True):
    """The fields of a job that are used."""

    job_id: Maybe
    state: SacctState
    time: SacctTime
    array: SacctArray = SacctArray()
    het: SacctHetJob = SacctHetJob()
    exit_code: SacctExit = SacctExit()
    tres: SacctResources = SacctResources()
    cluster: str | None = None
    name: str | None = None
    user: str | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    nodes: str | None = None
    allocation_nodes: Maybe = None
    failed_node: str | None = None
    priority: Maybe = None
    restart_cnt: Maybe = None
    submit_line: str | None = None
    steps: list[msgspec.Raw] = []


class SacctDocument(msgspec.Struct, frozen=True):
    """Document of `sacct --json`, with undecoded jobs."""

    jobs: list[msgspec.Raw]
    errors: list[Any] = []


def refuse_other_commands(source: str, head: bytes) -> None:
    """Refuse JSON of other commands of Slurm. Raises SourceError."""
    for key, command in ((b'"job_state"', "squeue or scontrol"), (b'"sinfo"', "sinfo")):
        if key in head:
            raise SourceError(
                f"{source} is of {command}, which shows the current state: run sacct --json"
            )


def json_batches(path: Path, options: SacctOptions, totals: ReadTotals) -> Iterator[RecordBatch]:
    """Yield the records of a document. Raises SourceError if it is no output of sacct."""
    source = str(path)
    document = _document(path, source)
    if not document.jobs:
        totals.notes.append("sacct found no jobs")
    if document.errors:
        totals.quoted.append(f"sacct itself reports errors: {str(document.errors)[:200]}")
    converter = JobConverter(source, KNOWN, options, totals)
    for begin in range(0, len(document.jobs), JOBS_AT_ONCE):
        yield _part(
            document.jobs[begin : begin + JOBS_AT_ONCE], begin + 1, source, converter, totals
        )
    yield converter.last()


def _part(
    raws: list[msgspec.Raw], first: int, source: str, converter: JobConverter, totals: ReadTotals
) -> RecordBatch:
    decoder = msgspec.json.Decoder(SacctJob, strict=False)
    rows: list[dict[str, str | None]] = []
    places: list[int] = []
    rejects = []
    for place, raw in enumerate(raws, first):
        try:
            job = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            rejects.append(make_reject(source, place, MALFORMED, f"{error}: {_text(raw)}"))
            totals.rows += 1
            continue
        rows.append(_row(job))
        places.append(place)
        totals.rows += len(job.steps)
        if job.steps:
            totals.skipped[STEP] += len(job.steps)
    if not rows:
        return RecordBatch({}, rejects)
    table = pl.DataFrame(rows, schema=dict.fromkeys(KNOWN, pl.String), orient="row")
    lines = pl.Series(places, dtype=pl.Int64)
    part = converter.part(table, lines, lambda index: _text(raws[places[index] - first]))
    return part._replace(rejects=part.rejects + rejects)


def _row(job: SacctJob) -> dict[str, str | None]:
    times = job.time
    code = job.exit_code
    signal = code.signal or SacctSignal()
    number = _number(signal.id) or _number(signal.signal_id) or 0
    tres = ",".join(
        f"{resource.type}/{resource.name}={_number(resource.count) or 0}"
        if resource.name
        else f"{resource.type}={_number(resource.count) or 0}"
        for resource in job.tres.allocated
    )
    current = job.state.current
    return {
        "job": _name(job),
        "state": current if isinstance(current, str) else _state(current),
        "start": _moment(times.start),
        "end": _moment(times.end),
        "submit": _moment(times.submission),
        "eligible": _moment(times.eligible),
        "elapsed_s": _number_text(times.elapsed),
        "exit": f"{_number(code.return_code) or 0}:{number}",
        "tres": tres,
        "nodes": _number_text(job.allocation_nodes),
        "hosts": job.nodes,
        "cluster": job.cluster,
        "name": job.name,
        "user": job.user,
        "account": job.account,
        "partition": job.partition,
        "qos": job.qos,
        "failed_node": job.failed_node,
        "priority": _number_text(job.priority),
        "restarts": _number_text(job.restart_cnt),
        "line": job.submit_line,
    }


def _name(job: SacctJob) -> str:
    """Return a job's id as sacct prints it in its column JobID."""
    array = _number(job.array.job_id)
    task = _number(job.array.task_id)
    if array and task is not None:
        return f"{array}_{task}"
    if array and job.array.task:
        return f"{array}_[{job.array.task}]"
    het = _number(job.het.job_id)
    offset = _number(job.het.job_offset)
    if het and offset is not None:
        return f"{het}+{offset}"
    return str(_number(job.job_id))


def _state(names: list[str]) -> str:
    """Return the state without flags of transitions."""
    passing = ("COMPLETING", "CONFIGURING", "POWER_UP_NODE", "SIGNALING", "STAGE_OUT")
    return next((name for name in names if name not in passing), "".join(names[:1]))


def _number(value: Maybe) -> int | None:
    if isinstance(value, SacctNumber):
        value = value.number if value.set and not value.infinite else None
    return None if value is None or value >= NO_VALUE else int(value)


def _number_text(value: Maybe) -> str | None:
    number = _number(value)
    return None if number is None else str(number)


def _moment(value: Maybe) -> str | None:
    """Return a time as text; 0 means "not yet"."""
    return _number_text(value) if _number(value) else None


def _text(raw: msgspec.Raw) -> str:
    return bytes(raw).decode(errors="replace")


def _document(path: Path, source: str) -> SacctDocument:
    data = read_bounded(path, BYTES_MAX, "run sacct --parsable2, or --json for fewer days at once")
    try:
        return msgspec.json.decode(data, type=SacctDocument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(
            f"{source} is no output of sacct --json: {error}; it has {_keys(data)}"
        ) from error


def _keys(data: bytes) -> str:
    """Return a description of a JSON file's top level, for a message."""
    try:
        top = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "an end that is cut off, or other damage"
    if isinstance(top, dict):
        return f"the keys {', '.join(list(top)[:8])}"
    return f"a {type(top).__name__} at its top"
