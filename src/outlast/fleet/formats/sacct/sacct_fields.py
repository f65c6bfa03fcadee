"""Accounting rows with typed columns instead of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import NamedTuple

import polars as pl

from outlast.fleet import host_lists
from outlast.fleet.formats.sacct import sacct_values

FOLD = "a time in the hour that the zone has twice: as elapsed says, else the earlier one"
EARLY = "a time before 2000: taken as unknown"
NO_HOSTS = "a list of nodes that is none: left out"
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
    """Convert texts to typed columns.

    `known`: the columns that the log has.
    """
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
    nobody = pl.col("failed_node").replace(dict.fromkeys(sacct_values.NOTHING, ""))
    rows = rows.with_columns(texts).with_columns(nobody).with_columns(new)
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
    found = {name: one.ns for name, one in read.items()}
    if zone != "UTC":
        start, end = read["start"], read["end"]
        elapsed_ns = span * sacct_values.SECOND_NS
        late_end = (end.late_ns - start.ns == elapsed_ns) | (end.ns < start.ns)
        late_start = (end.ns - start.late_ns == elapsed_ns) & (end.ns - start.ns != elapsed_ns)
        found["end"] = _where(late_end, end.late_ns, end.ns)
        found["start"] = _where(late_start, start.late_ns, start.ns)
        twice = [one.late_ns.is_not_null() for one in read.values()]
        _count(odd, FOLD, _any(twice))
    _count(odd, EARLY, _any([one.early for one in read.values()]))
    wrong = _any([one.wrong for one in read.values()]).alias("wrong")
    skipped = _any([one.skipped for one in read.values()]).alias("skipped")
    columns = [series.alias(f"{name}_ns") for name, series in found.items()]
    return [*columns, wrong, skipped], {form for one in read.values() for form in one.forms}


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
    nobody = lists.is_in(host_lists.NOBODY)
    lists = lists.set(nobody, "") if nobody.any() else lists
    named = pl.Series("named", [1], pl.Int64).new_from_index(0, len(lists)).set(lists == "", None)
    several = lists.str.contains(r"[,\[\]\s]")
    if not several.any():
        return lists, named
    many = host_lists.count_hosts(lists.filter(several))
    named = named.scatter(several.arg_true(), many)
    wrong = many.is_null()
    if not wrong.any():
        return lists, named
    _count(odd, NO_HOSTS, wrong)
    return lists.scatter(several.arg_true().filter(wrong), ""), named


def _excluded(lines: pl.Series) -> pl.Series:
    """Return the excluded hosts in the submit lines."""
    some = lines.str.contains(" -x|--exclude").fill_null(value=False)
    found = sacct_values.map_texts(lines.set(~some, None), sacct_values.excluded_hosts, pl.String())
    return found.fill_null("").alias("excluded")


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
    found = columns[0].fill_null(value=False)
    for column in columns[1:]:
        found |= column.fill_null(value=False)
    return found


def _count(odd: Counter[str], what: str, rows: pl.Series) -> None:
    if count := int(rows.sum()):
        odd[what] += count
