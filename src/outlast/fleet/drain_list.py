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
    command."""

    lines: list[str]
    beyond: list[str]
    unsafe: list[str]


def drain_list(found: pl.DataFrame, *, share_max: float = SHARE_MAX) -> Drain:
    """Of the lemons in `lemons.lemons`' ranking, the worst first, at most `share_max` of the nodes
    that it has, rounded down, but one where there is any."""
    share("share_max", share_max)
    named = found.filter("lemon").select("node", "failures", "expected", "times")
    most = max(1, math.floor(share_max * len(found))) if share_max else 0
    lines: list[str] = []
    beyond: list[str] = []
    unsafe: list[str] = []
    for node, failures, expected, times in named.iter_rows():
        if not PLAIN.fullmatch(node):
            unsafe.append(node)
        elif len(lines) == most:
            beyond.append(node)
        else:
            reason = f"lemon: {failures:.3g} failures, {expected:.2g} expected, {times:.3g} times"
            lines.append(f"scontrol update NodeName={node} State=DRAIN Reason='{reason}'")
    return Drain(lines, beyond, unsafe)
