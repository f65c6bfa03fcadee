"""Clusters whose truth is known, shaped like RSC-1 and RSC-2 in the paper.

Draft of the interface: `cluster(shape, days, seed, nodes)` gives tables and truth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outlast.errors import UsageError
from outlast.fleet.synth.attempts import attempts, within
from outlast.fleet.synth.findings import drains, others, said
from outlast.fleet.synth.frames import jobs_table
from outlast.fleet.synth.hosts import names
from outlast.fleet.synth.pace import Pace, lemons
from outlast.fleet.synth.schedule import Scheduler
from outlast.fleet.synth.shapes import RSC1, RSC2, SHAPES, Shape, resized
from outlast.fleet.synth.shared import small_jobs
from outlast.fleet.synth.truth import Truth, truth
from outlast.fleet.synth.workload import whole_node_jobs
from outlast.fleet.tables import Tables

__all__ = ["RSC1", "RSC2", "SHAPES", "Shape", "Truth", "cluster", "resized"]
SINCE_NS = 1_717_200_000 * 10**9  # 2024-06-01 in UTC
WARM_UP_S = 2 * 86400.0
DAYS_MAX = 3660


class Made(NamedTuple):
    tables: Tables
    truth: Truth


def cluster(
    shape: str | Shape, days: float, seed: int = 0, nodes: int | None = None
) -> tuple[Tables, Truth]:
    """A cluster's records over `days`, and what is true of it. The same arguments give the same.

    Raises UsageError for a shape that is not known or a size that cannot be.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise UsageError(f"shape {shape}: there are {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    if not 0 < days <= DAYS_MAX:
        raise UsageError(f"{days} days: more than 0, at most {DAYS_MAX:,}")
    if nodes is not None:
        if not 4 <= nodes <= 100_000:
            raise UsageError(f"{nodes} nodes: from 4 to 100,000")
        shape = resized(shape, nodes)
    streams = [np.random.default_rng([seed, part]) for part in range(6)]
    bad = lemons(shape, streams[0])
    pace = Pace(shape, days, bad)
    since_s, until_s = -WARM_UP_S, float(round(days * 86400))
    jobs = whole_node_jobs(shape, since_s, until_s, bad, streams[1])
    drained = drains(shape, days, since_s, bad, streams[2])
    ran = Scheduler(shape, jobs, pace, bad, seed).run(since_s, until_s, drained)
    made = within(attempts(ran, small_jobs(shape, ran, streams[3])), ran, 0.0)
    named = names(shape.name, shape.nodes)
    until_ns = SINCE_NS + int(until_s) * 10**9
    found = said(shape, days, ran, drained, streams[4])
    rest = others(shape, days, ran, found, named, SINCE_NS, streams[4])
    table = jobs_table(shape, made, ran, named, SINCE_NS, until_ns, streams[5])
    tables = Tables(
        table.lazy(), *(frame.lazy() for frame in rest), since_ns=SINCE_NS, until_ns=until_ns
    )
    return tables, truth(shape, seed, days, made, ran, pace, bad, named, SINCE_NS)
