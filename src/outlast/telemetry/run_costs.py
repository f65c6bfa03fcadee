"""Durations measured on one run: recoveries by rung, saves, flushes and steps.

`outlast plan` has a field for each; `outlast fleet fit` and `outlast plan compare --run` take them
from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from outlast.events import CheckpointSaved, GenerationOpened
from outlast.log_records import COST_NAMES, CostName
from outlast.telemetry.history.event_columns import Integers, of_kind, rows
from outlast.telemetry.history.incident_course import Incident
from outlast.telemetry.history.launcher_terms import split_terms
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import RunHistory

# Source of the state by rung: live ranks, memory of nodes, storage.
OF_RUNG: Mapping[str, CostName] = {
    "retry": "pause",
    "migrate": "pause",
    "replace": "pause",
    "respawn": "pause",
    "rebuild": "pause",
    "rollback": "restore",
    "restart": "restart",
}
DEVIATES = 1.6448536269514722  # standard deviations at 95 % of a normal distribution
# Student's t at 95 %, for 1 to 10 degrees of freedom; above, its expansion is right to 0.1 %.
_T = (6.3138, 2.9200, 2.3534, 2.1318, 2.0150, 1.9432, 1.8946, 1.8595, 1.8331, 1.8125)


class MeasuredCost(msgspec.Struct, frozen=True, kw_only=True):
    """Mean of `count` durations in seconds; `low` to `high`: its 90 % interval (Student's t), None
    of a single duration."""

    mean_s: float
    low_s: float | None
    high_s: float | None
    count: int


class RunCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one run, and the incidents that it survived.

    `survived`: incidents after which the run continued, without requests. `seconds`: every
    duration, by the field of a scenario that it measures.
    """

    survived: tuple[Incident, ...]
    seconds: Mapping[CostName, Sequence[float]]

    @property
    def transient(self) -> int:
        """Return how many of `survived` lost no host, and went on from live ranks or memory."""
        return sum(
            incident.rung != "restart" and not is_host_lost(incident) for incident in self.survived
        )

    @property
    def fatal(self) -> int:
        """Return how many of `survived` went on from storage."""
        return sum(incident.rung == "restart" for incident in self.survived)

    def measured(self) -> dict[CostName, MeasuredCost]:
        """Return the mean of each cost that was measured at least once."""
        return {name: mean_of(each) for name in COST_NAMES if (each := self.seconds[name])}


def is_failure(incident: Incident) -> bool:
    """Return whether something failed: not for requests, and where absent ranks came back."""
    return not incident.is_request and incident.cause.kind != "regrow"


def is_host_lost(incident: Incident) -> bool:
    """Return whether a failure took a host, and not only processes on it."""
    return any(fault.kind == "agent_lost" for fault in incident.faults)


def mean_of(seconds: Sequence[float]) -> MeasuredCost:
    """Return the mean of durations, with its interval."""
    count, mean_s = len(seconds), math.fsum(seconds) / len(seconds)
    if count < 2:
        return MeasuredCost(mean_s=mean_s, low_s=None, high_s=None, count=count)
    squares = math.fsum((second - mean_s) ** 2 for second in seconds)
    reach_s = _student(count - 1) * math.sqrt(squares / (count - 1) / count)
    return MeasuredCost(
        mean_s=mean_s, low_s=max(0.0, mean_s - reach_s), high_s=mean_s + reach_s, count=count
    )


def run_costs(history: RunHistory) -> RunCosts:
    """Collect the durations of a run.

    `detect`: from a fault until it is noticed. `pause`, `restore`, `restart`: from there until the
    next generation opens, with state from live ranks, from memory, from storage. A later launcher's
    start until its first generation opens is a `restart`, too. `cost`: time for which a checkpoint
    blocks the slowest rank; `flush`: from then until the checkpoint is complete. `step`: of the
    slowest rank. Raises RunDirError if the events contain no start of a run.
    """
    seconds: dict[CostName, list[float]] = {name: [] for name in COST_NAMES}
    survived = tuple(
        incident
        for incident in incidents(history)
        if incident.state == "recovered" and is_failure(incident)
    )
    for incident in survived:
        seconds["detect"].append(incident.phases_ms["notice"] / 1e3)
        again_ms = incident.total_ms - incident.phases_ms["notice"] - incident.phases_ms["redo"]
        if name := OF_RUNG.get(incident.rung):
            seconds[name].append(again_ms / 1e3)
    for term in split_terms(history)[1:]:
        opened = next((event for event in term.events if isinstance(event, GenerationOpened)), None)
        if opened:
            seconds["restart"].append((opened.t_ns - term.started.t_ns) / 1e9)
    lengths_s, steps = _slowest(history, "step")
    seconds["step"] = np.repeat(lengths_s, steps).tolist()
    seconds["cost"] = _slowest(history, "checkpoint")[0].tolist()
    saves = rows(history.phases, of_kind(history.phases, history.kinds, "checkpoint"))
    ended_ns = dict(zip(saves.step.tolist(), saves.t_ns.tolist(), strict=True))
    seconds["flush"] = [
        max(0.0, (event.t_ns - ended_ns[event.step]) / 1e9)
        for event in history.events
        if isinstance(event, CheckpointSaved) and event.step in ended_ns
    ]
    return RunCosts(survived=survived, seconds=seconds)


def _slowest(history: RunHistory, kind: str) -> tuple[NDArray[np.float64], Integers]:
    """Return the step time of the slowest rank and the number of steps, by generation and phase."""
    phases = rows(history.phases, of_kind(history.phases, history.kinds, kind))
    if not len(phases.n):
        return np.empty(0), np.empty(0, np.int64)
    length_s = np.maximum((phases.t_ns - phases.begin_ns) / 1e9 / phases.steps, 0.0)
    order = np.lexsort((phases.steps, length_s, phases.n, phases.generation))
    key = phases.generation[order], phases.n[order]
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = (key[0][1:] != key[0][:-1]) | (key[1][1:] != key[1][:-1])
    first = np.minimum.reduceat(order, np.flatnonzero(np.roll(is_last, 1)))
    slowest = order[is_last][np.argsort(first)]  # by the first rank that completed the phase
    return length_s[slowest], phases.steps[slowest]


def _student(degrees: int) -> float:
    if degrees <= len(_T):
        return _T[degrees - 1]
    z = DEVIATES
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
