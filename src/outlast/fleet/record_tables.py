"""Typed records of a cluster as polars tables, one for each kind."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import polars as pl
from msgspec.structs import astuple

from outlast.log_records import (
    KINDS,
    Bandwidth,
    CheckAdded,
    Cost,
    Finding,
    Interruption,
    JobEnded,
    NodeSeen,
    Outage,
    Record,
    Repair,
)

DAY_NS = 86_400 * 10**9
Name = Literal[
    "jobs",
    "findings",
    "outages",
    "repairs",
    "nodes",
    "checks",
    "interruptions",
    "costs",
    "bandwidths",
]
NAMES: dict[type[Record], Name] = {
    JobEnded: "jobs",
    Finding: "findings",
    Outage: "outages",
    Repair: "repairs",
    NodeSeen: "nodes",
    CheckAdded: "checks",
    Interruption: "interruptions",
    Cost: "costs",
    Bandwidth: "bandwidths",
}
KIND_OF: dict[Name, type[Record]] = {name: kind for kind, name in NAMES.items()}


class Tables(NamedTuple):
    """Records of a cluster from `since_ns` to `until_ns`.

    Each table has the columns of its record, in their order, with the types of `schema`. Jobs that
    ended in the window are complete.
    """

    jobs: pl.LazyFrame
    findings: pl.LazyFrame
    outages: pl.LazyFrame
    repairs: pl.LazyFrame
    nodes: pl.LazyFrame
    checks: pl.LazyFrame
    interruptions: pl.LazyFrame
    costs: pl.LazyFrame
    bandwidths: pl.LazyFrame
    since_ns: int
    until_ns: int


def schema(kind: type[Record]) -> pl.Schema:
    """Return the schema of a kind of record: Int64, String, or an Enum for a Literal."""
    hints = get_type_hints(kind)
    return pl.Schema({name: _type(hints[name]) for name in kind.__struct_fields__})


def table(kind: type[Record], records: Iterable[Record]) -> pl.DataFrame:
    """Return records of one kind as a table."""
    return pl.DataFrame([astuple(record) for record in records], schema=schema(kind), orient="row")


def tables(records: Iterable[Record], since_ns: int, until_ns: int) -> Tables:
    """Return the tables of records of any kinds, without a cut at the window."""
    of: dict[type[Record], list[Record]] = {kind: [] for kind in KINDS}
    for record in records:
        of[type(record)].append(record)
    frames = {NAMES[kind]: table(kind, found).lazy() for kind, found in of.items()}
    return Tables(**frames, since_ns=since_ns, until_ns=until_ns)


def _type(hint: Any) -> pl.DataType:
    if get_origin(hint) is Literal:
        return pl.Enum(get_args(hint))
    if isinstance(hint, UnionType):
        (hint,) = (option for option in get_args(hint) if option is not NoneType)
    return {int: pl.Int64(), str: pl.String()}[hint]
