"""What the XIDs and SXIDs that ended jobs mean: what mends them, and who would judge otherwise."""

from __future__ import annotations

import polars as pl

from outlast.fleet.attribution import CAUSES, Attributed
from outlast.fleet.exposure import KEY
from outlast.observe.words import counted
from outlast.symptoms.policy import Action, Entry, shipped

CODES_MAX = 5  # the most frequent ones
MENDS: dict[Action, str] = {
    "restart-app": "a restart of the program mends it",
    "reset-gpu": "a reset of the GPU mends it",
    "reboot": "a reboot mends it",
    "inspect": "somebody has to look",
    "replace": "the part has to be replaced",
    "contact": "ask the vendor",
    "update": "an update of driver or firmware mends it",
    "ignore": "nothing is to be done",
    "workflow": "what else the log says decides",
}


def meanings(found: Attributed) -> list[str]:
    """A line for each code, the ones of the most failures first, by the shipped policy."""
    ended = (
        found.causes.filter(pl.col("code") != "", pl.col("severity").is_in(CAUSES))
        .join(found.failures.select(KEY), on=KEY, how="semi")
        .group_by("code")
        .agg(failures=pl.struct(KEY).n_unique(), nodes=pl.struct("cluster", "node").n_unique())
        .sort(["failures", "code"], descending=[True, False])
    )
    told = []
    for code, failures, nodes in ended.iter_rows():
        entry = shipped().entry(code)
        if entry is not None and len(told) < CODES_MAX:
            told.append(
                f"{code} ({entry.name}), of {counted(failures, 'failure')} on"
                f" {counted(nodes, 'node')}: {MENDS[entry.action]}{_otherwise(code, entry)}"
            )
    return told


def _otherwise(code: str, entry: Entry) -> str:
    """Where sources disagree whether the node stays in service."""
    kind, _, number = code.partition(" ")
    other = shipped().disagreements(int(number)) if kind == "XID" and entry.says else None
    if other is None:
        return ""
    return (
        f"; {', '.join(other.takes)} would take the node for it, {', '.join(other.leaves)} would"
        f" not (policy {shipped().version})"
    )
