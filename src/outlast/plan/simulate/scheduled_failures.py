"""Failures at given times, of a recorded run or a published schedule, for a narrated job."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from outlast.events import FaultKind
from outlast.plan.simulate.narrated_nodes import NodeStrike
from outlast.plan.simulate.simulated_job import LIVE


class ScheduledFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One failure. `seats`: ranks whose workers are lost; none: all live on. `source`: best state
    that survives. `kind` "requested": a notice for the first of `seats`. A host that is lost counts
    as its workers."""

    t_s: float  # since the first step
    kind: FaultKind
    seats: tuple[int, ...] = ()
    source: int = LIVE
    detect_s: float = 0.0  # until it is noticed


class FailureSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """Failures in order, and the time from the notice of one until steps go on, by rung; each
    rung has one. `step_shares`: time of a step with so many ranks absent, over that with all; where
    a number is missing, a step takes as long as with all."""

    failures: tuple[ScheduledFailure, ...]
    rung_s: dict[str, float]
    refill_s: float = 0.0  # from then until spares are warm again
    step_shares: dict[int, float] = {}


class FailingNodes(Protocol):
    """Nodes of a narrated job, and their failures. `missing`: seats without a node."""

    now_s: float
    failures: int
    missing: list[int]

    def failure_s(self) -> float:
        """Return the time of the next failure."""
        ...

    def next_repair_s(self) -> float:
        """Return the time of the next repair; infinity where no node is in repair."""
        ...

    def pass_waiting_time(self, waited_s: float) -> None:
        """Postpone failures by waiting time, in which nothing fails."""

    def begin_window(self) -> None:
        """Begin the window after a recovery, at whose end all parts have copies again."""

    def strike(self) -> NodeStrike:
        """Apply the next failure, and return it."""
        ...

    def collect_repaired(self) -> list[int]:
        """Return repaired nodes; they and other spares take the empty seats."""
        ...


class ScheduledNodes:
    """Nodes that fail as scheduled, and are there again at once."""

    def __init__(self, schedule: FailureSchedule) -> None:
        self._failures = sorted(schedule.failures, key=lambda failure: failure.t_s)
        self.now_s = 0.0
        self.failures = 0
        self.missing: list[int] = []

    def failure_s(self) -> float:
        """Return the time of the next failure."""
        if self.failures == len(self._failures):
            return math.inf
        return max(self.now_s, self._failures[self.failures].t_s)

    def next_repair_s(self) -> float:
        """Return infinity: nothing is in repair."""
        return math.inf

    def pass_waiting_time(self, waited_s: float) -> None:
        """Do nothing: failures come at their times."""

    def begin_window(self) -> None:
        """Do nothing: failures bring what survives them."""

    def strike(self) -> NodeStrike:
        """Apply the next failure, and return it."""
        failure = self._failures[self.failures]
        self.failures += 1
        return NodeStrike(
            failure.source, crashed=failure.seats, kind=failure.kind, detect_s=failure.detect_s
        )

    def collect_repaired(self) -> list[int]:
        """Return no node: none is in repair."""
        return []
