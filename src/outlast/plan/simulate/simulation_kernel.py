"""Compiled kernel: one synchronous job; the only events are failures and repairs.

Work and saves between two failures are computed in closed form, so that the cost of a replication
grows with its failures, not with nodes or time. The model: docs/plan.md, "The simulated job".
In compiled code `p` is the parameters, `f` the fleet's tables, `s` the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from outlast.plan.simulate.compiled_random import bare, cached, compiled, inlined, key_of, sources
from outlast.plan.simulate.simulated_job import (
    LIVE,
    MEMORY,
    STORAGE,
    Parameters,
    SimulatedFleet,
    State,
)
from outlast.plan.simulate.simulated_nodes import (
    begin_fleet,
    collect_repaired,
    fill_seats,
    next_failure_s,
    strike,
)


def _compile_entry(
    of: str,
) -> Callable[[Parameters, SimulatedFleet, State, int, int, np.ndarray], None]:
    """Compile the function into which all others are inlined.

    `of` becomes a part of the cache key, because Numba checks only this file for changes.
    """

    @cached
    def replicate(
        p: Parameters, tables: SimulatedFleet, s: State, seed: int, first: int, out: np.ndarray
    ) -> None:
        _ = of
        f = bare(tables)
        for row in range(len(out)):
            _simulate(p, f, s, key_of(seed, first + row))
            o = out[row]
            o[0], o[1], o[2], o[3] = s.now_s, s.done_s, s.failures, s.incidents
            o[4], o[5], o[6], o[7] = s.from_live, s.from_memory, s.from_storage, s.stalls
            o[8], o[9], o[10], o[11] = s.redo_s, s.save_s, s.detect_s, s.restart_s
            o[12], o[13] = s.wait_s, s.slow_s

    return replicate


@inlined
def _simulate(p: Parameters, f: SimulatedFleet, s: State, key: np.uint64) -> None:
    """Simulate one replication.

    `now_s` is the time at which the work was done and saved; infinity, with the progress by then,
    where failures_max came first, or no node ever returns.
    """
    begin_fleet(p, f, s, key)
    _set_pace(p, s)
    while s.now_s < math.inf:
        begun_s = s.cycle * s.cycle_s + s.version * s.version_s + s.own_s * s.pace + s.saving_s
        end_s = s.now_s + (s.whole_s - begun_s)
        failure_s = next_failure_s(p, f, s)
        back_s = max(s.now_s, f.repair_s[0]) if s.missing and s.repairing else math.inf
        if end_s <= min(failure_s, back_s):
            left_s = p.work_s - s.work_s
            s.slow_s += left_s * (s.pace - 1)
            s.save_s += end_s - s.now_s - left_s * s.pace
            s.now_s = end_s
            s.done_s = p.work_s
            return
        _run_until(p, s, min(failure_s, back_s), begun_s)
        s.incidents += 1
        source = LIVE if back_s < failure_s else _apply_failure(p, f, s)
        if p.drop and source == LIVE:
            source = _pause(p, f, s, p.detect_s if failure_s <= back_s else 0.0)
        if not p.drop or source != LIVE:
            source = _recover(p, f, s, source)
        _restore(p, s, source)
        if p.drop:
            _set_pace(p, s)
        if s.failures >= p.failures_max:
            s.now_s = math.inf
    s.done_s = s.work_s


# --- running ---


@compiled
def _set_pace(p: Parameters, s: State) -> None:
    """Set the durations for the present number of replicas.

    `pace`: of a second of work; `version_s`: of work and save of a memory version; `cycle_s`: of a
    durable interval with its saves; `whole_s`: of a job without failures, its last flush included.
    """
    s.pace = p.pace * p.replicas / (p.replicas - s.replicas_lost)
    s.version_s = p.interval_s / p.versions * s.pace + p.memory_cost_s
    s.cycle_s = p.versions * s.version_s + p.cost_s
    cycles = math.floor(p.work_s / p.interval_s * (1 + 1e-12))
    rest_s = p.work_s - cycles * p.interval_s
    s.whole_s = cycles * s.cycle_s + p.flush_s
    if rest_s > 1e-9 * p.interval_s:
        versions = math.floor(rest_s / p.interval_s * p.versions)
        own_s = rest_s - versions * p.interval_s / p.versions
        s.whole_s += versions * s.version_s + own_s * s.pace + p.cost_s


@inlined
def _run_until(p: Parameters, s: State, when_s: float, begun_s: float) -> None:
    """Run the job from `now_s` to `when_s`; update progress and saves.

    `begun_s`: time at which a job without failures would have the same progress.
    """
    own_max_s = p.interval_s / p.versions
    run_s = when_s - s.now_s
    at_s = begun_s + run_s
    cycle = max(s.cycle, math.floor(at_s / s.cycle_s))
    in_cycle_s = max(0.0, at_s - cycle * s.cycle_s)
    version = min(math.floor(in_cycle_s / s.version_s), p.versions)
    in_version_s = max(0.0, in_cycle_s - version * s.version_s)
    own_s = 0.0 if version == p.versions else min(in_version_s / s.pace, own_max_s)
    if cycle > s.cycle:  # a durable save has ended on the way
        _flush(p, s, cycle, when_s - in_cycle_s)
    s.cycle = cycle
    s.version = version
    s.own_s = own_s
    s.saving_s = 0.0 if 0.0 < own_s < own_max_s else in_version_s - own_s * s.pace
    work_s = min(cycle * p.interval_s + version * own_max_s + own_s, p.work_s)
    ran_s = work_s - s.work_s
    s.work_s = work_s
    s.slow_s += ran_s * (s.pace - 1)
    s.save_s += run_s - ran_s * s.pace
    s.now_s = when_s


@inlined
def _flush(p: Parameters, s: State, cycle: int, ended_s: float) -> None:
    """End save number `cycle`, restorable after `flush_s`; the save before is restorable now."""
    if s.flushing and s.flushed_s <= ended_s:
        s.at_storage = s.flushing
    if cycle - 1 > s.cycle:
        s.at_storage = cycle - 1
    s.flushing = cycle
    s.flushed_s = ended_s + p.flush_s


@compiled
def _apply_failure(p: Parameters, f: SimulatedFleet, s: State) -> int:
    """Apply a failure; return the best source left. A failure that leaves storage stops a flush."""
    source = strike(p, f, s)
    if source == STORAGE:
        if s.flushing and s.flushed_s <= s.now_s:
            s.at_storage = s.flushing
        s.flushing = 0
    return source


# --- recovering ---


@inlined
def _recover(p: Parameters, f: SimulatedFleet, s: State, source: int) -> int:
    """Recover until the job can run; return the source.

    A failure meanwhile restarts the recovery, and may leave a worse source.
    """
    while True:
        _fill_or_wait(p, f, s)
        length_s = p.detect_s + p.restart_s[source]
        failure_s = next_failure_s(p, f, s)
        passed_s = min(length_s, failure_s - s.now_s)
        s.detect_s += min(passed_s, p.detect_s)
        s.restart_s += max(0.0, passed_s - p.detect_s)
        s.now_s += passed_s
        if passed_s == length_s or s.now_s == math.inf or s.failures >= p.failures_max:
            break
        source = max(source, _apply_failure(p, f, s))
    s.exposed_s = s.now_s + p.window_s
    return source


@inlined
def _pause(p: Parameters, f: SimulatedFleet, s: State, detect_s: float) -> int:
    """Pause the others while a replica leaves or returns; overlapping pauses end with the last.

    Return another source than LIVE if no live replica is left.
    """
    quiet_s = s.now_s + detect_s  # end of detection
    end_s = quiet_s + p.restart_s[LIVE]
    while True:
        collect_repaired(f, s)
        if s.missing and s.free:
            fill_seats(p, f, s)
            end_s = max(end_s, s.now_s + p.restart_s[LIVE])
        if s.replicas_lost == p.replicas:
            return STORAGE
        failure_s = next_failure_s(p, f, s)
        back_s = f.repair_s[0] if s.missing and s.repairing else math.inf
        until_s = min(end_s, failure_s, back_s)
        s.detect_s += max(0.0, min(until_s, quiet_s) - s.now_s)
        s.restart_s += max(0.0, until_s - max(s.now_s, quiet_s))
        s.now_s = until_s
        if until_s == end_s:
            break
        if until_s == failure_s:
            if s.failures >= p.failures_max:
                return LIVE
            source = _apply_failure(p, f, s)
            if source != LIVE:
                return source
            quiet_s = s.now_s + p.detect_s
            end_s = max(end_s, quiet_s + p.restart_s[LIVE])
    s.exposed_s = s.now_s + p.window_s
    return LIVE


@compiled
def _fill_or_wait(p: Parameters, f: SimulatedFleet, s: State) -> None:
    """Give empty seats to spares; wait for repairs if there are too few.

    Nothing fails while the job waits.
    """
    collect_repaired(f, s)
    fill_seats(p, f, s)
    if not s.missing or (p.drop and s.replicas_lost < p.replicas):
        return
    s.stalls += 1
    while s.missing and not (p.drop and s.replicas_lost < p.replicas):
        waited_s = f.repair_s[0] - s.now_s if s.repairing else math.inf
        s.wait_s += waited_s
        s.now_s += waited_s
        s.next_s += waited_s
        s.flushed_s += waited_s
        if waited_s == math.inf:
            return
        collect_repaired(f, s)
        fill_seats(p, f, s)


@inlined
def _restore(p: Parameters, s: State, source: int) -> None:
    if source == LIVE:
        s.from_live += 1
        if p.step_s > 0 and s.saving_s == 0.0:
            s.own_s = math.floor(s.own_s / p.step_s) * p.step_s
    elif source == MEMORY:
        s.from_memory += 1
        s.own_s = s.saving_s = 0.0
    else:
        s.from_storage += 1
        s.cycle = s.at_storage
        s.version = 0
        s.own_s = s.saving_s = 0.0
    work_s = min(p.work_s, s.cycle * p.interval_s + s.version * p.interval_s / p.versions + s.own_s)
    s.redo_s += s.work_s - work_s
    s.work_s = work_s


# Simulates the replications `first`, `first + 1`, ...: one row of TALLIES each in `out`.
replicate = _compile_entry(sources())
