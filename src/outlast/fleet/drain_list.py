"""The commands that would drain lemons, for somebody to read and run. Nothing here runs them."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import polars as pl

from outlast.theory.checks import share

SHARE_MAX = 0.02
PLAIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,253}[A-Za-z0-9])?")


class Drain(NamedTuple):
    """`lines` to run; nodes `beyond` what may be drained at once; names `unsafe` to put into a
    command, of nodes or of their cluster."""

    lines: list[str]
    beyond: list[str]
    unsafe: list[str]


def drain_list(found: pl.DataFrame, *, share_max: float = SHARE_MAX) -> Drain:
    """Return commands for the lemons in `lemons.lemons`' ranking, the worst first.

    Of each cluster at most `share_max` of its nodes in the ranking, rounded down, but one where
    there is any. A command names the node's cluster (`-M`): where it is run does not decide which
    of two nodes with one name it drains.
    """
    share("share_max", share_max)
    named = found.filter("lemon").select("cluster", "node", "failures", "expected", "times")
    nodes = dict(found.group_by("cluster").len().iter_rows())
    most = {
        cluster: max(1, math.floor(share_max * many)) if share_max else 0
        for cluster, many in nodes.items()
    }
    lines: list[str] = []
    beyond: list[str] = []
    unsafe: list[str] = []
    for cluster, node, failures, expected, times in named.iter_rows():
        if not PLAIN.fullmatch(node) or not (cluster == "" or PLAIN.fullmatch(cluster)):
            unsafe.append(node)
        elif not most[cluster]:
            beyond.append(node)
        else:
            most[cluster] -= 1
            of = f"-M {cluster} " if cluster else ""
            reason = f"lemon: {failures:.3g} failures, {expected:.2g} expected, {times:.3g} times"
            lines.append(f"scontrol {of}update NodeName={node} State=DRAIN Reason='{reason}'")
    return Drain(lines, beyond, unsafe)
