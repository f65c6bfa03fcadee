"""Synthetic clusters with known truth (Kokolis et al. 2025, II and III).

Modelled, so that records and truth are consistent:

- Jobs by size, length (log-normal, at most 7 days) and hour of the day; the shares of jobs, GPU
  time and end states of the paper; three QOS, of which high preempts the others after two hours.
- A scheduler: whole nodes event by event (`schedule`), jobs smaller than a node in lanes of nodes
  that are set aside for them (`shared`). A job that is preempted, requests it or loses a node is
  requeued under the same number from its last hourly checkpoint; some users resubmit instead.
- Hardware failures, Poisson in the time that a node runs jobs, at its own rate: lemons 30 to 60
  times the fleet's. With each comes its cause, whether the job ends as NODE_FAIL or FAILED, what
  checks find within minutes (if anything), and an outage: a reboot, a ticket, a replaced part.
- Checks added in the middle of the window, findings that drain a node after its job, irrelevant
  warnings, users who exclude nodes, large jobs that keep crashing after a failure. Episodes, in
  which a cause occurs more often, for shapes that have them.

Not modelled: queues by project and fair share, time limits that users set, backfill, topology,
arrays, heterogeneous jobs and jobs that never start; failures of idle nodes, of racks and switches
(nodes fail independently), slow nodes, repaired lemons, clock skew.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from outlast.errors import UsageError
from outlast.fleet.record_tables import Tables, schema
from outlast.fleet.synth.cluster_shapes import (
    RSC1,
    RSC2,
    SHAPES,
    ClusterShape,
    FailureProcess,
    check_shape,
    choose_lemons,
    resize_shape,
)
from outlast.fleet.synth.ground_truth import GroundTruth, ground_truth
from outlast.fleet.synth.scheduler import Scheduler
from outlast.fleet.synth.synthetic_attempts import attempts, clip_attempts, small_jobs
from outlast.fleet.synth.synthetic_jobs import whole_node_jobs
from outlast.fleet.synth.synthetic_tables import (
    draw_drains,
    make_findings,
    make_jobs_table,
    make_node_tables,
    node_names,
)
from outlast.log_records import Cost, Interruption

__all__ = ["RSC1", "RSC2", "SHAPES", "ClusterShape", "GroundTruth", "make_cluster", "resize_shape"]
SINCE_NS = 1_717_200_000 * 10**9  # 2024-06-01 in UTC
WARM_UP_S = 2 * 86400.0  # before the window; only attempts that end in it are in the tables
DAYS_MAX, NODES_MIN, NODES_MAX = 3660, 4, 100_000


def make_cluster(
    shape: str | ClusterShape, days: float, seed: int = 0, nodes: int | None = None,
    tell: Callable[[float], None] = lambda _: None,
) -> tuple[Tables, GroundTruth]:  # fmt: skip
    """Return a cluster's records over `days`, and their ground truth.

    Deterministic. `nodes`: another size, with jobs in proportion. `tell` is called with the share
    of the schedule that is done. Raises UsageError for an unknown shape or an invalid size.
    """
    shape = _shape(shape, days, seed, nodes)
    streams = [np.random.default_rng([seed, part]) for part in range(6)]
    bad = choose_lemons(shape, streams[0])
    pace = FailureProcess(shape, days, bad)
    since_s, until_s = -WARM_UP_S, float(round(days * 86400))
    jobs = whole_node_jobs(shape, since_s, until_s, bad, streams[1])
    drained = draw_drains(shape, days, since_s, bad, streams[2])
    ran = Scheduler(shape, jobs, pace, bad, seed).run(since_s, until_s, drained, tell)
    clipped = clip_attempts(attempts(ran, small_jobs(shape, ran, streams[3])), ran, 0.0)
    named = node_names(shape.name, shape.nodes)
    until_ns = SINCE_NS + int(until_s) * 10**9
    found = make_findings(shape, days, ran, drained, streams[4])
    rest = make_node_tables(shape, days, ran, found, named, SINCE_NS, streams[4])
    table = make_jobs_table(shape, clipped, ran, named, SINCE_NS, until_ns, streams[5])
    tables = Tables(
        table.lazy(), *(frame.lazy() for frame in rest),
        interruptions=pl.LazyFrame(schema=schema(Interruption)),
        costs=pl.LazyFrame(schema=schema(Cost)), since_ns=SINCE_NS, until_ns=until_ns,
    )  # fmt: skip
    return tables, ground_truth(shape, seed, days, clipped, ran, pace, bad, named, SINCE_NS)


def _shape(shape: str | ClusterShape, days: float, seed: int, nodes: int | None) -> ClusterShape:
    """Return the shape in the given size. Raises UsageError."""
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise UsageError(f"shape {shape} is not known; there are {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    if not 0 < days <= DAYS_MAX:
        raise UsageError(f"{days} days: more than 0, at most {DAYS_MAX:,}")
    if seed < 0:
        raise UsageError(f"seed {seed}: 0 or more")
    if nodes is None:
        return check_shape(shape)
    if not NODES_MIN <= nodes <= NODES_MAX:
        raise UsageError(f"{nodes} nodes: from {NODES_MIN} to {NODES_MAX:,}")
    return check_shape(resize_shape(shape, nodes))
