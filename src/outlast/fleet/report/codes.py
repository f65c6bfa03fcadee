"""What the XIDs and SXIDs that ended jobs mean: what mends them, and who would judge otherwise."""

from __future__ import annotations

import polars as pl

from outlast.fleet.attribution import CAUSES
from outlast.fleet.exposure import KEY
from outlast.fleet.report.sections import Column, Facts, Told, section
from outlast.symptoms.policy import Action, Entry, shipped

MENDS: dict[Action, str] = {
    "restart-app": "a restart of the program",
    "reset-gpu": "a reset of the GPU",
    "reboot": "a reboot",
    "inspect": "somebody has to look",
    "replace": "another part",
    "contact": "ask the vendor",
    "update": "an update of driver or firmware",
    "ignore": "nothing is to be done",
    "workflow": "depends on what else the log says",
}
SCHEMA = {
    "code": pl.String, "name": pl.String, "failures": pl.Int64, "nodes": pl.Int64,
    "mends": pl.String, "takes": pl.String, "leaves": pl.String,
}  # fmt: skip


def meant(facts: Facts) -> Told:
    """A row for each code, the ones of the most failures first, by the shipped policy."""
    ended = (
        facts.found.causes.filter(pl.col("code") != "", pl.col("severity").is_in(CAUSES))
        .join(facts.found.failures.select(KEY), on=KEY, how="semi")
        .group_by("code")
        .agg(failures=pl.struct(KEY).n_unique(), nodes=pl.struct("cluster", "node").n_unique())
        .sort(["failures", "code"], descending=[True, False])
    )
    rows = []
    for code, failures, nodes in ended.iter_rows():
        entry = shipped().entry(code)
        if entry is not None:
            row = (code, entry.name, failures, nodes, MENDS[entry.action])
            rows.append((*row, *_otherwise(code, entry)))
    columns = [
        Column("code", "code"), Column("name", "is"), Column("failures", "of failures", "count"),
        Column("nodes", "on nodes", "count"), Column("mends", "what mends it"),
        Column("takes", "would take the node"), Column("leaves", "would leave it"),
    ]  # fmt: skip
    said = (
        "Codes that NVIDIA's driver logged on the nodes of attempts that infrastructure ended, and"
        " what mends them. Where published policies disagree on whether the node should go, the"
        f" last columns say whose says what (policy {shipped().version})."
    )
    found = pl.DataFrame(rows, schema=SCHEMA, orient="row")
    return Told(section("codes", "What XIDs ask for", said, columns, found))


def _otherwise(code: str, entry: Entry) -> tuple[str, str]:
    """Who would take the node out of service for it and who would not, where they disagree."""
    kind, _, number = code.partition(" ")
    other = shipped().disagreements(int(number)) if kind == "XID" and entry.says else None
    return (", ".join(other.takes), ", ".join(other.leaves)) if other else ("", "")
