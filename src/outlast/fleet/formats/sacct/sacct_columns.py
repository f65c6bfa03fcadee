"""Columns of an accounting log: options, header, delimiter and typed values."""

from __future__ import annotations

import re
import zoneinfo
from collections import Counter
from collections.abc import Set
from typing import NamedTuple

import msgspec
import polars as pl

from outlast.errors import SourceError, UsageError
from outlast.fleet import host_lists
from outlast.fleet.formats.sacct import sacct_values

FOLD = "a time in the hour that the zone has twice: by the elapsed time, else the earlier one"
EARLY = "a time before 2000: taken as unknown"
NO_HOSTS = "a malformed list of nodes: left out"
NO_GPUS = "a number of GPUs that is none: taken as none"

SLICES = "jobs on slices of GPUs (MIG): each slice counts as a GPU, in rates by GPU too"
_SLICE = r"gres/gpu:[^=,]*\d+g\.\d+gb"

_INTEGER = pl.Int64()
_TEXTS = ("cluster", "name", "user", "account", "partition", "qos", "failed_node")
_MOMENTS = ("start", "end", "submit", "eligible")


class TypedRows(NamedTuple):
    """Rows with typed columns.

    `rows` has the columns of a job, and `end_ns`, `span_s` (elapsed), and `wrong` and `skipped` of
    its times. `odd`: rows that are kept despite an anomaly, by anomaly; `forms`: formats of times.
    """

    rows: pl.DataFrame
    odd: Counter[str]
    forms: Set[str]


def convert_rows(rows: pl.DataFrame, known: Set[str], zone: str, cluster: str) -> TypedRows:
    """Convert texts to typed columns. `known`: the columns that the log has."""
    odd: Counter[str] = Counter()
    span = _span(rows)
    moments, forms = _moments(rows, span, zone, odd)
    lists, named = _hosts(rows, odd)
    lists, named = _plausible(lists, named, _nodes(rows), odd)
    new = [*moments, span.alias("span_s"), *_sizes(rows, known, named, odd), lists]
    new.append(_excluded(rows["line"]))
    ended = sacct_values.map_texts(rows["exit"], sacct_values.exit_and_signal, _INTEGER).fill_null(
        0
    )
    new += [
        (ended // sacct_values.SIGNALS).alias("exit_code"),
        (ended % sacct_values.SIGNALS).alias("signal"),
    ]
    new += [_counts(rows[name]).fill_null(0) for name in ("priority", "restarts")]
    texts = [pl.col(name).fill_null(cluster if name == "cluster" else "") for name in _TEXTS]
    failed_node = pl.col("failed_node").replace(dict.fromkeys(sacct_values.NOTHING, ""))
    rows = rows.with_columns(texts).with_columns(failed_node).with_columns(new)
    return TypedRows(rows, odd, forms)


def _span(rows: pl.DataFrame) -> pl.Series:
    """Return the elapsed seconds of each job."""
    raw = rows["elapsed_s"].cast(_INTEGER, strict=False)
    if not raw.null_count() or rows["elapsed"].null_count() == rows.height:
        return raw
    clock = (
        rows["elapsed"].str.to_time("%H:%M:%S", strict=False).to_physical()
        // sacct_values.SECOND_NS
    )
    rest = rows["elapsed"].set(clock.is_not_null(), None)
    return _first(
        raw, clock.cast(_INTEGER), sacct_values.map_texts(rest, sacct_values.span_s, _INTEGER)
    )


def _moments(
    rows: pl.DataFrame, span: pl.Series, zone: str, odd: Counter[str]
) -> tuple[list[pl.Series], set[str]]:
    """Return the columns of times, and their formats."""
    read = {name: sacct_values.parse_times(rows[name], zone) for name in _MOMENTS}
    moments = {name: times.ns for name, times in read.items()}
    if zone != "UTC":
        start = read["start"]
        end = read["end"]
        elapsed_ns = span * sacct_values.SECOND_NS
        late_end = (end.late_ns - start.ns == elapsed_ns) | (end.ns < start.ns)
        late_start = (end.ns - start.late_ns == elapsed_ns) & (end.ns - start.ns != elapsed_ns)
        moments["end"] = _where(late_end, end.late_ns, end.ns)
        moments["start"] = _where(late_start, start.late_ns, start.ns)
        twice = [times.late_ns.is_not_null() for times in read.values()]
        _count(odd, FOLD, _any(twice))
    _count(odd, EARLY, _any([times.early for times in read.values()]))
    wrong = _any([times.wrong for times in read.values()]).alias("wrong")
    skipped = _any([times.skipped for times in read.values()]).alias("skipped")
    columns = [series.alias(f"{name}_ns") for name, series in moments.items()]
    return [*columns, wrong, skipped], {form for times in read.values() for form in times.forms}


def _sizes(
    rows: pl.DataFrame, known: Set[str], named: pl.Series, odd: Counter[str]
) -> list[pl.Series]:
    """Return nodes and GPUs: those allocated, or requested in a log without allocations.

    A gres is per node. Nodes are the number of hosts in the list (`named`), if there is a list.
    """
    nodes = _nodes(rows)
    _count(odd, host_lists.OTHER_NODES, ((nodes != named) & (nodes > 0)).fill_null(value=False))
    nodes = _first(named, nodes).fill_null(0)
    requested = not {"tres", "gres"} & known
    tres, gres = ("asked_tres", "asked_gres") if requested else ("tres", "gres")
    gpus = sacct_values.map_texts(rows[tres], sacct_values.tres_gpus, _INTEGER)
    slices = rows[tres].unique().drop_nulls()
    if slices.str.contains(_SLICE).any():
        _count(odd, SLICES, rows[tres].str.contains(_SLICE).fill_null(value=False))
    if gpus.null_count() and gres in known:
        each = sacct_values.map_texts(rows[gres], sacct_values.gres_gpus, _INTEGER)
        gpus = _first(gpus, each * nodes if requested else each)
    if gpus.null_count():
        mentioned = pl.any_horizontal(
            rows[name].str.contains("gpu").fill_null(value=False) for name in (tres, gres)
        )
        _count(
            odd, NO_GPUS, rows.select(mentioned.alias("mentioned"))["mentioned"] & gpus.is_null()
        )
    return [nodes.alias("nodes"), gpus.fill_null(0).alias("gpus")]


def _nodes(rows: pl.DataFrame) -> pl.Series:
    """Return the number of nodes of each row, by its own column or its TRES."""
    nodes = _counts(rows["nodes"])
    if nodes.null_count():
        nodes = _first(
            nodes, sacct_values.map_texts(rows["tres"], sacct_values.tres_nodes, _INTEGER)
        )
    return nodes


def _plausible(
    lists: pl.Series, named: pl.Series, nodes: pl.Series, odd: Counter[str]
) -> tuple[pl.Series, pl.Series]:
    """Drop lists that name far more nodes than the job's number of nodes.

    A digit lost from `n[1-8]` makes a list of thousands of nodes.
    """
    wrong = ((nodes > 0) & (named > host_lists.FAR_MORE_TIMES * nodes)).fill_null(value=False)
    if not wrong.any():
        return lists, named
    _count(odd, host_lists.FAR_MORE, wrong)
    return lists.set(wrong, ""), named.set(wrong, None)


def _hosts(rows: pl.DataFrame, odd: Counter[str]) -> tuple[pl.Series, pl.Series]:
    """Return the valid host lists, "" for others, and how many hosts each names, or null."""
    lists = rows["hosts"].fill_null("")
    missing = lists.is_in(host_lists.NOBODY)
    lists = lists.set(missing, "") if missing.any() else lists
    named = pl.Series("named", [1], pl.Int64).new_from_index(0, len(lists)).set(lists == "", None)
    several = lists.str.contains(r"[,\[\]\s]")
    if not several.any():
        return lists, named
    host_counts = host_lists.count_hosts(lists.filter(several))
    named = named.scatter(several.arg_true(), host_counts)
    wrong = host_counts.is_null()
    if not wrong.any():
        return lists, named
    _count(odd, NO_HOSTS, wrong)
    return lists.scatter(several.arg_true().filter(wrong), ""), named


def _excluded(lines: pl.Series) -> pl.Series:
    """Return the excluded hosts in the submit lines."""
    some = lines.str.contains(" -x|--exclude").fill_null(value=False)
    hosts = sacct_values.map_texts(lines.set(~some, None), sacct_values.excluded_hosts, pl.String())
    return hosts.fill_null("").alias("excluded")


def _counts(column: pl.Series) -> pl.Series:
    """Parse numbers, also with a unit."""
    numbers = column.cast(_INTEGER, strict=False)
    if numbers.null_count() == column.null_count():
        return numbers
    return _first(
        numbers,
        sacct_values.map_texts(
            column.set(numbers.is_not_null(), None), sacct_values.parse_count, _INTEGER
        ),
    )


def _first(*columns: pl.Series) -> pl.Series:
    """Return the first value that is not null."""
    named = [column.alias(str(i)) for i, column in enumerate(columns)]
    return pl.DataFrame(named).select(pl.coalesce(pl.all())).to_series().alias(columns[0].name)


def _where(condition: pl.Series, yes: pl.Series, no: pl.Series) -> pl.Series:
    return yes.zip_with(condition.fill_null(value=False) & yes.is_not_null(), no)


def _any(columns: list[pl.Series]) -> pl.Series:
    mask = columns[0].fill_null(value=False)
    for column in columns[1:]:
        mask |= column.fill_null(value=False)
    return mask


def _count(odd: Counter[str], what: str, rows: pl.Series) -> None:
    if count := int(rows.sum()):
        odd[what] += count


BLOCK_BYTES = 32 << 20


class SacctOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of reading a log. Raises UsageError for invalid ones."""

    zone: str = "UTC"  # of times without one: that of the machine sacct ran on
    is_zone_given: bool = True  # False: it is assumed, and noted
    cluster: str = ""  # if no column has it
    delimiter: str = ""  # "": from the header
    columns: tuple[str, ...] = ()  # of a log without a header, in sacct's names
    taken_ns: int | None = None  # when sacct ran; None: the latest time in the log
    block_bytes: int = BLOCK_BYTES  # of text processed at once

    def __post_init__(self) -> None:
        try:
            zoneinfo.ZoneInfo(self.zone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError) as error:
            raise UsageError(
                f"{self.zone!r} is no time zone; use a name as in Europe/Berlin"
            ) from error
        if "\n" in self.delimiter or self.delimiter.isalnum():
            raise UsageError(f"{self.delimiter!r} cannot separate fields")
        if self.block_bytes < 1:
            raise UsageError("a block has at least one byte")


# Our names of columns, and sacct's names, in order of preference.
COLUMNS: dict[str, tuple[str, ...]] = {
    "job": ("jobid", "jobidraw"),
    "state": ("state",),
    "start": ("start",),
    "end": ("end",),
    "elapsed_s": ("elapsedraw",),
    "elapsed": ("elapsed",),
    "submit": ("submit",),
    "eligible": ("eligible",),
    "cluster": ("cluster",),
    "name": ("jobname",),
    "user": ("user", "uid"),
    "account": ("account",),
    "partition": ("partition",),
    "qos": ("qos",),
    "exit": ("exitcode",),
    "nodes": ("nnodes", "allocnodes"),
    "hosts": ("nodelist",),
    "tres": ("alloctres",),
    "gres": ("allocgres",),
    "asked_tres": ("reqtres",),
    "asked_gres": ("reqgres",),
    "failed_node": ("failednode",),
    "priority": ("priority",),
    "restarts": ("restarts",),
    "line": ("submitline",),
}
# Columns of free text, by users or Slurm, which may contain `|`.
FREE = frozenset(
    "admincomment comment constraints container extra jobname licenses stderr stdin"  # noqa: SIM905
    " stdout submitline systemcomment wckey workdir".split()
)
OTHERS = frozenset(
    "alloccpus associd avecpu avecpufreq avediskread avediskwrite avepages averss avevmsize"  # noqa: SIM905
    " blockid consumedenergy consumedenergyraw cputime cputimeraw dbindex derivedexitcode"
    " flags gid group jobidraw layout maxdiskread maxdiskreadnode maxdiskreadtask maxdiskwrite"
    " maxdiskwritenode maxdiskwritetask maxpages maxpagesnode maxpagestask maxrss maxrssnode"
    " maxrsstask maxvmsize maxvmsizenode maxvmsizetask mcslabel mincpu mincpunode mincputask"
    " ncpus ntasks planned plannedcpu plannedcpuraw qosraw qosreq reason reqcpufreq"
    " reqcpufreqgov reqcpufreqmax reqcpufreqmin reqcpus reqmem reqnodes reservation"
    " reservationid reserved resvcpu resvcpuraw sluid originalsluid suspended systemcpu"
    " timelimit timelimitraw totalcpu uid usercpu wckeyid".split()
)
KNOWN = FREE | OTHERS | {name for names in COLUMNS.values() for name in names}
USUAL = "JobID,State,Submit,Eligible,Start,End,ElapsedRaw,ExitCode,NNodes,NodeList,AllocTRES"

HIDDEN = {  # information that is missing without a column
    "cluster": "which cluster a job ran on (Cluster)",
    "submit": "how long a job waited (Submit)",
    "eligible": "when a job could have begun (Eligible)",
    "user": "the user of a job (User)",
    "qos": "which jobs may preempt others (QOS)",
    "partition": "to which nodes a job was limited (Partition)",
    "exit": "how a job's program ended (ExitCode)",
    "hosts": "on which nodes a job ran (NodeList): no figure of a node is possible",
    "failed_node": "which node failed (FailedNode)",
    "priority": "in which order jobs waited (Priority)",
    "restarts": "how often a job was requeued (Restarts)",
    "line": "which nodes a user excluded (SubmitLine)",
}


class SacctHeader(NamedTuple):
    """Header of a log. `at`: positions of our columns; `names`: all columns, in sacct's terms."""

    delimiter: str
    names: tuple[str, ...]
    at: dict[str, int]

    @property
    def width(self) -> int:
        """Number of columns."""
        return len(self.names)

    def free(self) -> tuple[int, ...]:
        """Return the columns that may contain a delimiter or a line break."""
        return tuple(i for i, name in enumerate(self.names) if name.lower() in FREE)

    def notes(self, cluster: str) -> list[str]:
        """Return one note on the information that these columns lack."""
        missing = {ours for ours in HIDDEN if ours not in self.at}
        if cluster:
            missing.discard("cluster")
        notes = [HIDDEN[ours] for ours in HIDDEN if ours in missing]
        if not {"tres", "gres", "asked_tres", "asked_gres"} & self.at.keys():
            notes.append("how many GPUs a job had (AllocTRES): taken as none")
        elif not {"tres", "gres"} & self.at.keys():
            notes.append("how many GPUs a job had (AllocTRES): taken as those that it requested")
        return [f"no column says {'; '.join(notes)}"] if notes else []


def parse_header(line: str, source: str, options: SacctOptions) -> SacctHeader | None:
    """Return the header that this line is, or None.

    Raises SourceError for a header that cannot be used.
    """
    text = line.strip("\r\n ")
    delimiter = options.delimiter or _delimiter(text)
    if not delimiter:
        return None
    for_the_eye = not delimiter.strip(" ")
    split = text.split() if for_the_eye else text.split(delimiter)
    names = tuple(name.strip() for name in split)
    known = [name for name in names if name.lower() in KNOWN]
    if len(known) < 2 or len(known) < len([name for name in names if name]) / 2:
        return None
    if for_the_eye:
        raise SourceError(
            f"{source} is a table for display, with columns cut to a width; run"
            f" sacct --parsable2 --duplicates --allusers --format={USUAL}"
        )
    return _check_header(delimiter, names, source)


def header_of_options(source: str, options: SacctOptions) -> SacctHeader:
    """Return the header given by the options. Raises SourceError."""
    strange = [name for name in options.columns if name and name.lower() not in KNOWN]
    if strange:
        raise SourceError(f"sacct has no column {strange[0]!r} (of those given for {source})")
    return _check_header(options.delimiter or "|", options.columns, source)


def _check_header(delimiter: str, names: tuple[str, ...], source: str) -> SacctHeader:
    lower = [name.lower() for name in names]
    at = {
        ours: lower.index(next(name for name in theirs if name in lower))
        for ours, theirs in COLUMNS.items()
        if any(name in lower for name in theirs)
    }
    times = at.keys() & {"start", "end"}
    timed = times and (len(times) == 2 or at.keys() & {"elapsed", "elapsed_s"})
    lost = [name for ours, name in (("job", "JobID"), ("state", "State")) if ours not in at]
    lost += [] if timed else ["Start", "End"]
    if lost:
        raise SourceError(
            f"{source} has no column {', '.join(lost)}, which is required; run sacct"
            f" --parsable2 --duplicates --allusers --format={USUAL}"
        )
    return SacctHeader(delimiter, names, at)


def _delimiter(text: str) -> str:
    """Return the text between the first two known column names."""
    match = re.match(r"([A-Za-z]+)([^A-Za-z]+)(?=[A-Za-z])", text)
    if match is None or match[1].lower() not in KNOWN:
        return ""
    return match[2]
