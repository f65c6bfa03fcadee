"""One name for each node: a kernel says n1.example.org where accounting says n1."""

from __future__ import annotations

from collections import Counter

import polars as pl

from outlast.fleet.hosts import nodes_of
from outlast.fleet.tables import Name, Tables
from outlast.text_formatting import plural

BY_NODE: tuple[Name, ...] = ("nodes", "outages", "findings", "repairs", "interruptions")
"""Kinds of records that name a node each."""


def joined(tables: Tables, notes: list[str]) -> Tables:
    """Return tables of one cluster in which a node has the name that its jobs have.

    `n1.example.org` becomes `n1` where jobs (else the list of nodes, else outages) name `n1` and
    only one longer name begins so; `n1` becomes `n1.example.org` where only one of their names
    begins so. A name that could be two nodes stays as it is; `notes` gets both.
    """
    said = {kind: _names(getattr(tables, kind)) for kind in BY_NODE}
    lists = tables.jobs.select("hosts").filter(pl.col("hosts") != "").unique()
    dot = pl.col("hosts").str.contains(".", literal=True).any()
    if not lists.select(dot).collect().item() and not any(
        "." in name for names in said.values() for name in names
    ):
        return tables
    ours = set(nodes_of(lists).select(pl.col("node").unique()).collect()["node"])
    ours = ours or said["nodes"] or said["outages"]
    table, unclear = _translation(ours, set[str]().union(*said.values()) - ours)
    if unclear:
        notes.append(
            f"{plural(len(unclear), 'name')} of nodes could be several ({min(unclear)}): what"
            " they name is told of no job; write names alike, or read each site into its own lake"
        )
    if not table:
        return tables
    theirs = min(table)
    notes.append(
        f"{plural(len(table), 'node')} written in two ways taken for one each:"
        f" {theirs} is {table[theirs]}"
    )
    node = pl.col("node")
    alike = node.replace_strict(list(table), list(table.values()), default=node)
    return tables._replace(
        **{
            kind: getattr(tables, kind).with_columns(node=alike)
            for kind in BY_NODE
            if said[kind] & table.keys()
        }
    )


def _translation(ours: set[str], others: set[str]) -> tuple[dict[str, str], list[str]]:
    """Return our name for each of the others that is clear, and those that could be several."""
    longer: dict[str, list[str]] = {}
    for name in ours:
        if (short := _short(name)) != name:
            longer.setdefault(short, []).append(name)
    begins = Counter(_short(name) for name in others if _short(name) != name)
    table: dict[str, str] = {}
    unclear: list[str] = []
    for name in sorted(others):
        short = _short(name)
        if short == name:
            candidates = longer.get(name, [])
        else:
            candidates = [short] * begins[short] if short in ours else []
        if len(candidates) == 1:
            table[name] = candidates[0]
        elif candidates:
            unclear.append(name)
    return table, unclear


def _short(name: str) -> str:
    """Return a name up to its first dot; an address of digits stays whole."""
    first = name.partition(".")[0]
    return name if first.isdecimal() else first


def _names(frame: pl.LazyFrame) -> set[str]:
    return set(frame.select(pl.col("node").unique()).collect()["node"]) - {""}
