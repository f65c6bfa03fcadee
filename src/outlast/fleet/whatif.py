"""What a better fleet would give: the measured runs' expected ETTR, with one thing changed."""

from __future__ import annotations

import math
from typing import NamedTuple

import polars as pl

from outlast.errors import UsageError
from outlast.fleet.ettr import INIT_S, INTERVAL_S
from outlast.theory import ettr as theory
from outlast.theory.checks import not_negative, positive

HALF = 0.5
AS_IS = "as it is"


class Setting(NamedTuple):
    """Of what an ETTR is computed."""

    node_rate_per_s: float
    init_s: float
    interval_s: float
    queue_factor: float = 1.0


def what_if(
    sizes: pl.DataFrame,
    node_rate_per_s: float,
    *,
    interval_s: float = INTERVAL_S,
    init_s: float = INIT_S,
    cost_s: float = 0.0,
    factor: float = HALF,
    without_lemons: float | None = None,
) -> pl.DataFrame:
    """For each size of `ettr.by_size` (its mean nodes and wait for a start) and each change: `ettr`
    in the long run, exactly, L tau/(e^(L (tau + C)) - 1) e^(-L u0)/(1 + L q) with L = nodes x rate
    (`theory.ettr.exact`); `gained` over the size as it is, in points from 0 to 1; and
    `mtbf_s`, between failures of such a job.

    Changes: `factor` times the failure rate, the start (u0), the interval, the wait after a
    failure, all of them; and `without_lemons` times the failure rate (`left_without_lemons`). A
    save costs `cost_s`, so that a shorter interval can lose. Nothing here is measured but nodes,
    waits and rates.
    """
    not_negative("node_rate_per_s", node_rate_per_s)
    positive("interval_s", interval_s)
    not_negative("init_s", init_s)
    not_negative("cost_s", cost_s)
    if not 0 < factor < math.inf:
        raise UsageError(f"factor must be above 0 and finite, not {factor!r}")
    rows: list[tuple[int, str, float, float, float]] = []
    settings = _settings(node_rate_per_s, interval_s, init_s, factor, without_lemons)
    for bucket, nodes, wait_s in sizes.select("bucket", "nodes", "wait_s").iter_rows():
        before = None
        for change, one in settings.items():
            mtbf_s = _mtbf_s(nodes, one.node_rate_per_s)
            at = theory.exact(
                one.interval_s, mtbf_s,
                init_s=one.init_s, queue_s=wait_s * one.queue_factor, cost_s=cost_s,
            )  # fmt: skip
            before = at if before is None else before
            rows.append((bucket, change, at, at - before, mtbf_s))
    schema = {
        "bucket": pl.Int64, "change": pl.String, "ettr": pl.Float64, "gained": pl.Float64,
        "mtbf_s": pl.Float64,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row")


def left_without_lemons(ranking: pl.DataFrame) -> float | None:
    """Failures per node-day of the nodes of `lemons.lemons` that are none over those of all, in its
    last days; None where these ran nothing, or nothing failed."""
    rates = [
        float(nodes["failures"].sum()) / days if (days := float(nodes["node_days"].sum())) else None
        for nodes in (ranking.filter(~pl.col("lemon")), ranking)
    ]
    others, everybody = rates
    return None if others is None or not everybody else others / everybody


def _settings(
    rate: float, interval_s: float, init_s: float, factor: float, without_lemons: float | None
) -> dict[str, Setting]:
    times = "half" if factor == HALF else f"{factor:g} times"
    found = {
        AS_IS: Setting(rate, init_s, interval_s),
        f"{times} the failure rate": Setting(rate * factor, init_s, interval_s),
        f"{times} the start": Setting(rate, init_s * factor, interval_s),
        f"{times} the checkpoint interval": Setting(rate, init_s, interval_s * factor),
        f"{times} the wait": Setting(rate, init_s, interval_s, factor),
        f"{times} of all these": Setting(
            rate * factor, init_s * factor, interval_s * factor, factor
        ),
    }
    if without_lemons is not None:
        not_negative("without_lemons", without_lemons)
        found["without the lemons"] = Setting(rate * without_lemons, init_s, interval_s)
    return found


def _mtbf_s(nodes: float, rate: float) -> float:
    return 1 / (nodes * rate) if nodes * rate else math.inf
