"""Host lists of many attempts at once."""

from __future__ import annotations

import numpy as np
import polars as pl

NODES_A_RACK, RACKS_A_POD = 2, 10


def names(cluster: str, nodes: int) -> list[str]:
    """Of all nodes: rsc1-0001 is the first."""
    digits = max(4, len(str(nodes)))
    return [f"{cluster}-{node + 1:0{digits}}" for node in range(nodes)]


def place(node: int) -> tuple[str, str]:
    """Its rack and its pod: as in the paper, two nodes in a rack and ten racks in a pod."""
    rack = node // NODES_A_RACK
    return f"rack{rack + 1:04}", f"pod{rack // RACKS_A_POD + 1:03}"


def host_lists(
    named: list[str], held: np.ndarray, first: np.ndarray, many: np.ndarray
) -> pl.Series:
    """For each attempt, whose nodes are `many` of `held` from `first` on: rsc1-[0001-0004,0007]."""
    single = pl.Series(named).gather(held[np.minimum(first, len(held) - 1)])
    (several,) = np.nonzero(many > 1)
    if not len(several):
        return single
    counts = many[several]
    attempt = np.repeat(np.arange(len(several)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    nodes = held[np.repeat(first[several], counts) + within].astype(np.int64)
    order = np.lexsort((nodes, attempt))
    nodes, attempt = nodes[order], attempt[order]
    begins = np.r_[True, (attempt[1:] != attempt[:-1]) | (nodes[1:] != nodes[:-1] + 1)]
    lows = np.flatnonzero(begins)
    highs = np.r_[lows[1:], len(nodes)] - 1
    prefix, _, _ = named[0].rpartition("-")
    digits = pl.Series([name.rpartition("-")[2] for name in named])
    ranges = pl.DataFrame({
        "attempt": attempt[lows], "low": digits.gather(nodes[lows]),
        "high": digits.gather(nodes[highs]),
    })  # fmt: skip
    text = pl.when(pl.col("low") == pl.col("high")).then("low").otherwise(
        pl.col("low") + "-" + pl.col("high")
    )  # fmt: skip
    lists = ranges.group_by("attempt", maintain_order=True).agg(
        text.str.join(",").alias("text")
    )  # fmt: skip
    whole = (f"{prefix}-[" + lists["text"] + "]").alias("hosts")
    return single.scatter(several, whole)
