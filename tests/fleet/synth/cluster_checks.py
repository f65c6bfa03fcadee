"""Checks of synthetic clusters, read directly from their tables."""

import re
from typing import NamedTuple

import numpy as np
import polars as pl

from outlast.fleet.record_tables import Tables
from outlast.fleet.synth.synthetic_cluster import GroundTruth

_PART = re.compile(r"(\d+)(?:-(\d+))?")


class Seen(NamedTuple):
    jobs: pl.DataFrame
    findings: pl.DataFrame
    outages: pl.DataFrame
    repairs: pl.DataFrame
    nodes: pl.DataFrame
    checks: pl.DataFrame
    truth: GroundTruth

    @property
    def held(self) -> pl.DataFrame:
        """Return a row for each attempt and node of it."""
        pairs = [(row, node) for row, text in enumerate(self.jobs["hosts"]) for node in hosts(text)]
        rows, nodes = zip(*pairs, strict=True)
        return self.jobs[list(rows)].with_columns(node=pl.Series(nodes))


def seen(made: tuple[Tables, GroundTruth]) -> Seen:
    tables, truth = made
    jobs, findings, outages, repairs, nodes, checks = (frame.collect() for frame in tables[:6])
    return Seen(jobs, findings, outages, repairs, nodes, checks, truth)


def hosts(text: str) -> list[str]:
    if "[" not in text:
        return [text]
    prefix, _, inside = text.removesuffix("]").partition("[")
    found = []
    for part in inside.split(","):
        match = _PART.fullmatch(part)
        assert match, text
        low, high = match[1], match[2] or match[1]
        found += [f"{prefix}{at:0{len(low)}}" for at in range(int(low), int(high) + 1)]
    return found


def most_at_once(held: pl.DataFrame) -> int:
    """Return the largest number of GPUs of one node in use at one time."""
    used = held.select("node", "start_ns", "t_ns", used=pl.min_horizontal("gpus", pl.lit(8)))
    changes = pl.concat([
        used.select("node", at="start_ns", change="used"),
        used.select("node", at="t_ns", change=-pl.col("used")),
    ]).sort("node", "at", "change")  # who ends makes room before who starts  # fmt: skip
    return int(changes.select(pl.col("change").cum_sum().over("node").max()).item())


def problems(one: Seen) -> list[str]:
    """Return the contradictions in a cluster's records."""
    jobs = one.jobs.sort("job", "attempt")
    same = jobs["job"] == jobs["job"].shift(1)
    minutes = (jobs["t_ns"] - jobs["start_ns"]).to_numpy() / 60e9
    preempted = (jobs["state"] == "PREEMPTED").to_numpy()
    gone = one.held.join(one.outages.rename({"t_ns": "gone_ns"}), on="node").filter(
        (pl.col("start_ns") < pl.col("until_ns").fill_null(2**62))
        & (pl.col("t_ns") > pl.col("gone_ns"))
    )
    unwanted = [
        row for row in one.jobs.filter(pl.col("excluded") != "").iter_rows(named=True)
        if set(row["excluded"].split(",")) & set(hosts(row["hosts"]))
    ]  # fmt: skip
    counts = [len(hosts(text)) for text in one.jobs["hosts"]]
    wrong = {
        "more than 8 GPUs of a node": most_at_once(one.held) > 8,
        "attempts overlap": (same & (jobs["start_ns"] < jobs["t_ns"].shift(1))).any(),
        "attempts are not counted": (
            (same & (jobs["attempt"] != jobs["attempt"].shift(1) + 1))
            | (~same & (jobs["attempt"] != 0))
        ).any(),
        "submitted anew before the end": (same & (jobs["submit_ns"] < jobs["t_ns"].shift(1))).any(),
        "times": (
            (jobs["submit_ns"] > jobs["eligible_ns"]) | (jobs["eligible_ns"] > jobs["start_ns"])
            | (jobs["start_ns"] >= jobs["t_ns"])
        ).any(),
        "preempted too soon": (minutes[preempted] < 120).any(),
        "runs on a node that is away": len(gone) > 0,
        "has a node that it excluded": len(unwanted) > 0,
        "nodes": counts != one.jobs["nodes"].to_list(),
        "GPUs": (one.jobs["nodes"] != np.ceil(one.jobs["gpus"] / 8)).any(),
    }  # fmt: skip
    return [what for what, is_so in wrong.items() if is_so]
