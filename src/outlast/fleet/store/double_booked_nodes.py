"""Double-booked nodes: jobs that hold more GPUs of a node than it has."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from outlast.errors import UsageError
from outlast.fleet import host_lists
from outlast.fleet.record_tables import DAY_NS
from outlast.fleet.store.lake_selection import LONGEST_DAYS

JOB_COLUMNS = ("cluster", "hosts", "nodes", "gpus", "start_ns", "t_ns")
SLACK_NS = 60 * 10**9  # tolerated overlap of jobs on a node: cleaning up, and rounding


class DoubleBooking(NamedTuple):
    """Node whose jobs had more GPUs at `t_ns` than any job had of a node of its cluster."""

    cluster: str
    node: str
    t_ns: int
    gpus: int
    most: int


class DoubleBookingDetector:
    """Detector over days of jobs, given from the last to the first.

    A job that ended later may have held a node on an earlier day. Keeps the jobs that ran at one
    midnight, up to LONGEST_DAYS each.
    """

    def __init__(self) -> None:
        self._later: pl.DataFrame | None = None
        self._found: dict[tuple[str, str], DoubleBooking] = {}

    def see(self, jobs: pl.DataFrame, since_ns: int) -> None:
        """Add the jobs that ended on the day that begins at `since_ns`."""
        current = jobs.select(JOB_COLUMNS)
        if self._later is not None:
            current = pl.concat([current, self._later])
        for one in find_double_bookings(current):
            known = self._found.get((one.cluster, one.node))
            if known is None or one.t_ns < known.t_ns:
                self._found[one.cluster, one.node] = one
        begun = pl.col("start_ns")
        still = (begun < since_ns) & (begun > pl.col("t_ns") - LONGEST_DAYS * DAY_NS)
        self._later = current.filter(still)

    def reaches(self, until_ns: int) -> bool:
        """Return whether an added job ran before that time."""
        return self._later is not None and bool((self._later["start_ns"] < until_ns).any())

    def found(self) -> list[DoubleBooking]:
        """Return each double-booked node, with its first time."""
        return sorted(self._found.values(), key=lambda one: (one.t_ns, one.node))


def find_double_bookings(jobs: pl.DataFrame) -> list[DoubleBooking]:
    """Return each double-booked node of these jobs, with its first time.

    A node's capacity is the most GPUs that a job had of a node. Jobs with unequal shares of their
    nodes are ignored, and so are invalid host lists.
    """
    running = jobs.lazy().filter(
        pl.col("start_ns").is_not_null(),
        pl.col("start_ns") + SLACK_NS < pl.col("t_ns"),
        pl.col("gpus") > 0,
        pl.col("nodes") > 0,
        pl.col("gpus") % pl.col("nodes") == 0,
    )
    try:
        each = host_lists.explode_hosts(
            running.with_columns(each=pl.col("gpus") // pl.col("nodes"))
        ).select("cluster", "node", "each", "start_ns", until=pl.col("t_ns") - SLACK_NS)
        begun = each.select("cluster", "node", "each", t_ns="start_ns", change="each")
        ended = each.select("cluster", "node", "each", t_ns="until", change=-pl.col("each"))
        # An end comes before a start at the same time.
        steps = pl.concat([begun, ended]).sort("t_ns", "change")
        where = ("cluster", "node")
        most = pl.col("each").max().over("cluster")
        at_once = pl.col("change").cum_sum().over(where)
        found = (
            steps.with_columns(most=most, at_once=at_once)
            .filter(pl.col("at_once") > pl.col("most"))
            .group_by(where, maintain_order=True)
            .first()
            .select("cluster", "node", "t_ns", "at_once", "most")
            .sort("t_ns", "node")
            .collect()
        )
    except UsageError:
        return []
    return [DoubleBooking(*row) for row in found.iter_rows()]
