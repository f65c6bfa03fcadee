"""Cost of a recovery policy on recorded, scheduled or simulated failures.

Ranks that leave (rung shrink) do so by the controller's own decisions, and come back when a worker
for them is warm, or their node is repaired. Meanwhile the others do their share of the work.

The real controller decides (plan/simulate/narrator.py); times are measured or those of a scenario.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from outlast.controller.recovery.recovery_policy import FROM_A_COPY, RUNGS, RecoveryPolicy, Rung
from outlast.errors import UsageError
from outlast.events import (
    AnyEvent,
    CheckpointSaved,
    Decided,
    GenerationOpened,
    LoopBegun,
    PhaseDone,
    RunStarted,
)
from outlast.plan.model.scenario import Scenario
from outlast.plan.simulate.narrator import narrate
from outlast.plan.simulate.scheduled_failures import FailureSchedule, ScheduledFailure
from outlast.plan.simulate.simulated_job import LIVE, MEMORY, STORAGE, SimulatedJob, job_of
from outlast.telemetry.history.incident_course import Incident
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import RunHistory
from outlast.telemetry.run_costs import is_failure
from outlast.theory.failures import HOUR_S

# Faults that take their worker.
TAKES = (
    *("killed", "exited", "hung", "stopped", "torn", "diverged", "unknown", "mismatch"),
    *("transfer", "agent_lost", "nonfinite"),
)
LIVE_RUNGS: tuple[Rung, ...] = ("retry", "migrate", "replace", "respawn", "shrink", "rebuild")
REGROW = "regrow"  # absent ranks come back: no rung of policies, and no failure
BAND = (0.05, 0.95)


class MeasuredJob(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a job, in seconds, as its events have them. `interval`, `copy_interval`: steps
    between checkpoints on disk and between copies in memory; 0: none. `rungs_s`: times from the
    notice of a failure until steps went on, by rung, and of a return of absent ranks (`regrow`).
    `start_s`: of the first start of all ranks. `step_shares`: time of a step with so many ranks
    absent, over that with all."""

    world: int
    spares: int
    steps: int
    step_s: float
    interval: int
    copy_interval: int
    save_s: float
    flush_s: float
    start_s: float
    rungs_s: dict[str, tuple[float, ...]]
    failures: tuple[ScheduledFailure, ...]
    step_shares: dict[int, float] = {}

    def rung_s(self, share: float = 0.5) -> dict[str, float]:
        """Return a time for each rung: a quantile of those measured, else of the nearest rung, else
        the start."""
        of_live = [s for rung in LIVE_RUNGS for s in self.rungs_s.get(rung, ())]
        of_start = [s for rung in FROM_A_COPY for s in self.rungs_s.get(rung, ())]
        found: dict[str, float] = {}
        for rung in (*RUNGS, REGROW):
            near = of_start if rung in FROM_A_COPY else of_live
            known = self.rungs_s.get(rung) or near or (self.start_s,)
            found[rung] = quantile(known, share)
        return found

    @property
    def assumed(self) -> tuple[Rung, ...]:
        """Return rungs whose time was not measured."""
        return tuple(rung for rung in RUNGS if rung != "stop" and rung not in self.rungs_s)


class PolicyTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a policy on one course of failures. `wall_s`: from the first step to the end, None
    of a job that did not get there; `band_s`: 5 % to 95 % of replications, where there are several.
    `slow_s`: time that absent ranks cost, as the others did their work. `steps_redone`: committed
    steps that all ranks computed again."""

    policy: str
    outcome: str
    reason: str
    wall_s: float | None
    band_s: tuple[float, float] | None = None
    ended_s: float
    work_s: float
    slow_s: float = 0.0
    steps_redone: float
    failures: float
    rungs: dict[str, int]
    cost_usd: float | None


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def try_on_schedule(
    measured: MeasuredJob,
    policy: RecoveryPolicy,
    *,
    share: float = 0.5,
    refill_s: float = 0.0,
    usd_per_rank_hour: float | None = None,
) -> PolicyTrial:
    """Return the cost of a policy on a job's failures. `share`: quantile of its times of
    recoveries."""
    schedule = FailureSchedule(
        failures=measured.failures,
        rung_s=measured.rung_s(share),
        refill_s=refill_s,
        step_shares=measured.step_shares,
    )
    job = simulated(measured)
    run = narrate(job, recovery=policy, schedule=schedule)
    ranks = measured.world + measured.spares
    cost = run.ended_s * ranks / HOUR_S * usd_per_rank_hour if usd_per_rank_hour else None
    return PolicyTrial(
        policy=policy.name,
        outcome=run.outcome,
        reason=run.reason,
        wall_s=run.ended_s if run.outcome == "done" else None,
        ended_s=run.ended_s,
        work_s=job.work_s,
        slow_s=run.tallies["slow_s"],
        steps_redone=_committed_redone(run.tallies["redo_s"], run.rungs, measured.step_s),
        failures=run.tallies["failures"],
        rungs=run.rungs,
        cost_usd=cost,
    )


def try_on_scenario(
    scenario: Scenario, policy: RecoveryPolicy, *, replications: int, seed: int = 0
) -> PolicyTrial:
    """Return the cost of a policy on a scenario's failures: means of replications."""
    job = job_of(scenario, "outlast")
    runs = [narrate(job, seed=seed, replication=k, recovery=policy) for k in range(replications)]
    walls = [run.ended_s for run in runs if run.outcome == "done"]
    is_done = len(walls) == len(runs)
    rungs: Counter[str] = Counter()
    for run in runs:
        rungs.update(run.rungs)
    other = next((run for run in runs if run.outcome != "done"), runs[0])
    ended_s = statistics.fmean(run.ended_s for run in runs)
    gpus = (job.nodes + job.spares) * scenario.gpus_per_node
    redo_s = statistics.fmean(run.tallies["redo_s"] for run in runs)
    return PolicyTrial(
        policy=policy.name,
        outcome=other.outcome,
        reason=other.reason,
        wall_s=statistics.fmean(walls) if is_done else None,
        band_s=(quantile(walls, BAND[0]), quantile(walls, BAND[1])) if len(walls) > 1 else None,
        ended_s=ended_s,
        work_s=job.work_s,
        slow_s=statistics.fmean(run.tallies["slow_s"] for run in runs),
        steps_redone=_committed_redone(redo_s, rungs, scenario.step_s, len(runs)),
        failures=statistics.fmean(run.tallies["failures"] for run in runs),
        rungs=dict(rungs),
        cost_usd=ended_s * gpus / HOUR_S * scenario.usd_per_gpu_hour,
    )


def _committed_redone(redo_s: float, rungs: dict[str, int], step_s: float, runs: int = 1) -> float:
    """Return the committed steps among redone work; each recovery also redoes half a step that was
    not committed."""
    if not step_s:
        return 0.0
    kept = ("stop", REGROW)
    interrupted = 0.5 * sum(count for rung, count in rungs.items() if rung not in kept) / runs
    return max(0.0, redo_s / step_s - interrupted) if redo_s else 0.0


def simulated(measured: MeasuredJob) -> SimulatedJob:
    """Return the simulated job with measured times, whose failures a schedule has."""
    work_s = measured.steps * measured.step_s
    copies = measured.copy_interval or measured.interval
    interval = measured.interval or 2 * measured.steps
    versions = max(1, round(interval / copies)) if copies else 1
    interval_s = interval * measured.step_s
    return SimulatedJob(
        work_s=work_s,
        interval_s=interval_s,
        versions=versions,
        step_s=measured.step_s,
        memory_cost_s=measured.save_s if copies else 0.0,
        cost_s=0.0,  # a checkpoint blocks for its copy in memory
        flush_s=min(measured.flush_s, interval_s),
        nodes=measured.world,
        spares=measured.spares,
        replicas=measured.world,
        copies=1 if copies else 0,
        window_s=0.0,
        node_rate=0.0,
        stay_share=1.0,
        lemons=0.0,
        lemon_factor=1.0,
        cure_share=0.0,
        software_rate=0.0,
        rack_rate=0.0,
        rack_nodes=1,
        shape=1.0,
        scale_s=0.0,
        age_s=0.0,
        repair_s=0.0,
        repair_shape=0.0,
        detect_s=0.0,
        restart_s=(0.0, measured.start_s, measured.start_s),
        software_from=MEMORY if copies else STORAGE,
        node_from=LIVE,
        drop=False,
        failures_max=1_000_000,
    )


def measure(events: Sequence[AnyEvent]) -> MeasuredJob:
    """Return the times and failures of a run. Raises UsageError for one without steps."""
    started = next((event for event in events if isinstance(event, RunStarted)), None)
    steps = [event for event in events if isinstance(event, PhaseDone) and event.kind == "step"]
    opened = [event for event in events if isinstance(event, GenerationOpened)]
    if started is None or not steps or not opened:
        raise UsageError("this run has completed no step: nothing can be measured on it")
    first_ns = min(event.t_begin_ns for event in steps)
    step_s = _pace_s(steps)
    saves = [
        event for event in events if isinstance(event, PhaseDone) and event.kind == "checkpoint"
    ]
    rank = min(event.seat for event in steps)
    copied = sorted({event.step for event in saves if event.seat == rank})
    saved = sorted({event.step for event in events if isinstance(event, CheckpointSaved)})
    found = incidents(RunHistory.of(events))
    rungs_s: dict[str, list[float]] = {}
    for one in found:
        if one.state == "recovered" and not one.is_request:
            rungs_s.setdefault(one.rung, []).append(_going_on_s(one, step_s))
    if (starts_s := _starts_s(events)) and "respawn" not in rungs_s:
        rungs_s["respawn"] = starts_s
    failures = (_failure(one, first_ns) for one in found if is_failure(one))
    loops = [event.steps for event in events if isinstance(event, LoopBegun) and event.steps]
    return MeasuredJob(
        world=started.world,
        spares=started.spares,
        steps=max([*loops[-1:], *(event.step for event in steps)]),
        step_s=step_s,
        interval=_interval(saved),
        copy_interval=_interval(copied),
        save_s=statistics.fmean([(e.t_ns - e.t_begin_ns) / 1e9 for e in saves] or [0.0]),
        flush_s=statistics.fmean(
            [e.seconds for e in events if isinstance(e, CheckpointSaved)] or [0.0]
        ),
        start_s=(first_ns - started.t_ns) / 1e9,
        rungs_s={rung: tuple(each) for rung, each in rungs_s.items()},
        failures=tuple(failure for failure in failures if failure.t_s >= 0),
        step_shares=_step_shares(steps, step_s, started.world),
    )


def _starts_s(events: Sequence[AnyEvent]) -> list[float]:
    """Return for how long ranks were absent: a worker was started for each meanwhile."""
    since_ns: dict[int, int] = {}
    found: list[float] = []
    for event in events:
        if isinstance(event, Decided):
            back = since_ns.keys() - set(event.absent)
            found += [(event.t_ns - since_ns[seat]) / 1e9 for seat in back]
            since_ns = {seat: since_ns.get(seat, event.t_ns) for seat in event.absent}
    return found


def _pace_s(steps: Sequence[PhaseDone]) -> float:
    """Return the mean time from one step's end to the next, within generations that all ranks were
    in, of one rank; the first step of a generation does not count."""
    ranks = _ranks_of(steps)
    most = max(map(len, ranks.values()))
    of_all = [event for event in steps if len(ranks[event.generation]) == most]
    if gaps := _gaps_s(of_all):
        return statistics.fmean(gaps)
    rank = min(event.seat for event in of_all)
    ours = [event for event in of_all if event.seat == rank]
    return statistics.fmean((event.t_ns - event.t_begin_ns) / 1e9 / event.steps for event in ours)


def _step_shares(steps: Sequence[PhaseDone], step_s: float, world: int) -> dict[int, float]:
    """Return the time of a step with so many ranks absent, over that with all."""
    ranks = _ranks_of(steps)
    found: dict[int, float] = {}
    for absent in range(1, world):
        fewer = [event for event in steps if len(ranks[event.generation]) == world - absent]
        if step_s and (gaps := _gaps_s(fewer)):
            found[absent] = statistics.fmean(gaps) / step_s
    return found


def _ranks_of(steps: Sequence[PhaseDone]) -> dict[int, set[int]]:
    """Return the ranks that completed steps in each generation."""
    ranks: dict[int, set[int]] = {}
    for event in steps:
        ranks.setdefault(event.generation, set()).add(event.seat)
    return ranks


def _gaps_s(steps: Sequence[PhaseDone]) -> list[float]:
    """Return times from one step's end to the next, of the first rank of each generation."""
    first: dict[int, int] = {}
    for event in steps:
        first[event.generation] = min(event.seat, first.get(event.generation, event.seat))
    ours = [event for event in steps if event.seat == first[event.generation]]
    return [
        (after.t_ns - before.t_ns) / 1e9 / after.steps
        for earlier, before, after in zip(ours, ours[1:], ours[2:], strict=False)
        if earlier.generation == after.generation and after.step == before.step + after.steps
    ]


def _interval(steps: Sequence[int]) -> int:
    """Return the usual number of steps between saves; 0 where none was made."""
    gaps = [after - before for before, after in zip([0, *steps], steps, strict=False)]
    return max(1, round(statistics.median(gaps))) if gaps else 0


def _going_on_s(incident: Incident, step_s: float) -> float:
    """Return the time from the notice of a failure until steps went on: without redone ones."""
    seconds = (incident.total_ms - incident.phases_ms["notice"]) / 1e3
    return max(0.0, seconds - (incident.committed_steps_lost + incident.redone) * step_s)


def _failure(incident: Incident, first_ns: int) -> ScheduledFailure:
    cause = incident.cause
    seats = {fault.seat for fault in incident.faults if fault.kind in TAKES and fault.seat >= 0}
    is_notice = cause.kind == "requested" and cause.seat >= 0
    return ScheduledFailure(
        t_s=(incident.t_ns - first_ns) / 1e9,
        kind=cause.kind,
        seats=(cause.seat,) if is_notice else tuple(sorted(seats)),
        source=_source(incident),
        detect_s=incident.phases_ms["notice"] / 1e3,
    )


def _source(incident: Incident) -> int:
    """Return the best state that survived, as far as the decision shows: a policy that restarts
    all ranks says nothing about it."""
    words = ("no other rank holds", "own state of", "no worker is left", "no rank is known")
    if not any(word in incident.reason for word in words):
        return LIVE
    return STORAGE if incident.rung == "restart" else MEMORY
