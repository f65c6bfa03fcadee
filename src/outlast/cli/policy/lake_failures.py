"""Failures of a fleet lake, as jobs on which policies are tried (docs/policies.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import polars as pl
from msgspec.structs import replace

from outlast.controller.recovery.recovery_policy import FAILURES, FROM_A_COPY, RecoveryPolicy
from outlast.errors import UsageError
from outlast.events import FaultKind
from outlast.fleet.analysis.failure_attribution import attribute_failures
from outlast.fleet.analysis.job_runs import attempts_of_runs
from outlast.fleet.lake import Lake
from outlast.fleet.lake_selection import resolve_cluster, select_cluster
from outlast.plan.answers.policy_trial import (
    BAND,
    LIVE_RUNGS,
    TAKES,
    MeasuredJob,
    PolicyTrial,
    try_on_schedule,
)
from outlast.plan.model.scenario import Scenario
from outlast.plan.simulate.narrator import NODES_MAX
from outlast.plan.simulate.scheduled_failures import ScheduledFailure
from outlast.plan.simulate.simulated_job import LIVE, MEMORY, STORAGE, SimulatedJob, job_of
from outlast.text_formatting import plural

JOBS_MAX = 20  # largest jobs, by their GPU time
_S = 1e9
_SOURCES = {"rollback": MEMORY, "restart": STORAGE}  # by recorded rung; else LIVE
_BY_SPARES = ("replace", "migrate")
_HAVE = "`outlast fleet ingest LAKE RUN_DIR` reads those of runs of `outlast run`"


class LakeJob(NamedTuple):
    """A job of the lake: its times and failures. `seat_gpus`: GPUs of a simulated rank: 1, or those
    of a node. `unknown`: rungs of whose times nothing is known."""

    name: str
    measured: MeasuredJob
    recorded_s: float
    seat_gpus: int
    unknown: tuple[str, ...]
    is_measured: bool


class LakeJobs(NamedTuple):
    """Jobs with failures, the largest first, and what was left out or assumed."""

    jobs: list[LakeJob]
    notes: list[str]


def read_jobs(
    path: Path, scenario: Scenario | None, *, spares: int | None, cluster: str | None
) -> LakeJobs:
    """Return the jobs of a lake that had failures. `scenario`: costs of jobs that measured none.

    Raises LakeError, and UsageError where the lake has no failures or no costs of them.
    """
    lake = Lake.open(path)
    notes: list[str] = []
    tables = select_cluster(lake.tables(), lake, resolve_cluster(lake, cluster), notes)
    infra = attribute_failures(tables).failures.lazy()
    attempts = attempts_of_runs(tables, infra).filter(
        pl.col("start_ns").is_not_null(), pl.col("gpus") > 0, pl.col("runtime_s") > 0
    )
    survived = _by_job(tables.interruptions)
    costs = _by_job(tables.costs)
    model = job_of(scenario, "outlast") if scenario else None
    found: list[tuple[float, LakeJob]] = []
    skipped: Counter[str] = Counter()
    for rows in attempts.partition_by("run", maintain_order=True):
        each = rows.to_dicts()
        key = (each[0]["cluster"], each[0]["job"])
        measures, events = costs.get(key, []), survived.get(key, [])
        is_ours = any(one["what"] == "step" and one["length_ns"] > 0 for one in measures)
        failures, ended = _failures(each, events, is_ours=is_ours)
        skipped["jobs' last attempts that a failure ended: their remaining work is unknown"] += (
            ended
        )
        if not failures:
            continue
        if is_ours:
            job = _measured_job(each, events, measures, failures, spares)
        elif scenario is None or model is None:
            skipped["jobs whose steps and recoveries were not measured, without --simulate"] += 1
            continue
        else:
            job = _assumed_job(each, failures, scenario, model, spares)
        if job.measured.world + job.measured.spares > NODES_MAX:
            skipped[f"jobs of more than {NODES_MAX:,} ranks and spares"] += 1
            continue
        found.append((sum(one["gpus"] * one["runtime_s"] for one in each), job))
    jobs = [job for _, job in sorted(found, key=lambda one: (-one[0], one[1].name))]
    skipped[f"smaller jobs than the {JOBS_MAX} largest"] += len(jobs[JOBS_MAX:])
    notes += [f"left out: {count:,} {what}" for what, count in skipped.items() if count]
    if not jobs:
        reasons = "; ".join(notes) or "it records no failure of a job with GPUs"
        raise UsageError(
            f"{path} has no failures on which a policy can be tried ({reasons}); {_HAVE}"
        )
    return LakeJobs(jobs[:JOBS_MAX], notes)


def try_on_lake(
    jobs: Sequence[LakeJob],
    policy: RecoveryPolicy,
    *,
    refill_s: float,
    usd_per_gpu_hour: float | None,
) -> PolicyTrial:
    """Return the cost of a policy on all jobs together. Its band: from the shortest times of
    recoveries, where a replica always survives, to the longest, where only what was used did.

    Raises UsageError where the policy takes a rung of whose time the lake has nothing.
    """
    low_s = high_s = 0.0
    trials: list[PolicyTrial] = []
    for job in jobs:
        usd = usd_per_gpu_hour * job.seat_gpus if usd_per_gpu_hour else None
        alive = tuple(replace(one, source=LIVE) for one in job.measured.failures)
        best = replace(job.measured, failures=alive)
        middle = try_on_schedule(job.measured, policy, refill_s=refill_s, usd_per_rank_hour=usd)
        _check_known(job, middle)
        low_s += try_on_schedule(best, policy, share=BAND[0], refill_s=refill_s).ended_s
        high_s += try_on_schedule(job.measured, policy, share=BAND[1], refill_s=refill_s).ended_s
        trials.append(middle)
    rungs: Counter[str] = Counter()
    for one in trials:
        rungs.update(one.rungs)
    other = next(
        ((job, one) for job, one in zip(jobs, trials, strict=True) if one.outcome != "done"), None
    )
    ended_s = sum(one.ended_s for one in trials)
    return PolicyTrial(
        policy=policy.name,
        outcome=other[1].outcome if other else "done",
        reason=f"job {other[0].name}: {other[1].reason}" if other else "",
        wall_s=None if other else ended_s,
        band_s=(min(low_s, ended_s), max(high_s, ended_s)),
        ended_s=ended_s,
        work_s=sum(one.work_s for one in trials),
        slow_s=sum(one.slow_s for one in trials),
        steps_redone=sum(one.steps_redone for one in trials),
        failures=sum(one.failures for one in trials),
        rungs=dict(rungs),
        cost_usd=sum(one.cost_usd or 0.0 for one in trials) if usd_per_gpu_hour else None,
    )


def _check_known(job: LakeJob, trial: PolicyTrial) -> None:
    for rung in trial.rungs:
        needed = ("respawn",) if rung == "shrink" else ()
        if unknown := [one for one in (rung, *needed) if one in job.unknown]:
            raise UsageError(
                f"policy {trial.policy} takes {rung} in job {job.name}, and the lake has no time of"
                f" {unknown[0]} or of a rung like it; give a scenario for it: --simulate SCENARIO"
            )


def _by_job(frame: pl.LazyFrame) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in frame.collect().sort("t_ns").iter_rows(named=True):
        found.setdefault((row["cluster"], row["job"]), []).append(row)
    return found


def _failures(
    attempts: Sequence[Mapping[str, Any]], survived: Iterable[Mapping[str, Any]], *, is_ours: bool
) -> tuple[list[ScheduledFailure], int]:
    """Return the failures of a job in its running time, one attempt after another, and how many
    ended its last attempt. A simulated rank is a GPU of runs of ours, else a node."""
    first = attempts[0]
    world = int(first["gpus"] if is_ours else first["nodes"])
    on_node = max(1, int(first["gpus"]) // max(1, int(first["nodes"]))) if is_ours else 1
    found: list[ScheduledFailure] = []
    before_s, begins = 0.0, dict[int, float]()
    ended = 0
    for number, one in enumerate(attempts):
        begins[one["attempt"]] = before_s - one["start_ns"] / _S
        before_s += one["runtime_s"]
        if one["infra"] and number == len(attempts) - 1:
            ended = 1
        elif one["infra"]:
            rank = len(found) * on_node % world
            lost = tuple(range(world)) if is_ours else (rank,)
            source = STORAGE if is_ours else LIVE
            found.append(
                ScheduledFailure(t_s=before_s, kind="agent_lost", seats=lost, source=source)
            )
    for one in survived:
        cause = one["cause"] if one["cause"] in (*FAILURES, "requested") else "killed"
        if one["cause"] in ("save", "regrow") or one["attempt"] not in begins:
            continue
        rank = len(found) * on_node % world
        size = on_node if one["took_node"] else 1
        takes = cause in TAKES or cause == "requested"
        found.append(
            ScheduledFailure(
                t_s=max(0.0, one["t_ns"] / _S + begins[one["attempt"]]),
                kind=cast(FaultKind, cause),
                seats=tuple((rank + each) % world for each in range(size)) if takes else (),
                source=_SOURCES.get(one["rung"], LIVE),
            )
        )
    return sorted(found, key=lambda one: one.t_s), ended


def _measured_job(
    attempts: Sequence[Mapping[str, Any]],
    survived: Sequence[Mapping[str, Any]],
    costs: Sequence[Mapping[str, Any]],
    failures: list[ScheduledFailure],
    spares: int | None,
) -> LakeJob:
    """Return a job of ours, with its own times."""
    means: dict[str, list[float]] = {}
    for one in costs:
        means.setdefault(one["what"], []).extend([one["length_ns"] / _S])
    step_s = means["step"][0]
    detect_s = _mean(means.get("detect", []))
    saves = means.get("cost", [])
    recorded_s = sum(one["runtime_s"] for one in attempts)
    lost_s = sum(one["length_ns"] / _S for one in survived) + sum(saves)
    steps = max(1, round(max(0.0, recorded_s - lost_s) / step_s))
    rungs_s: dict[str, tuple[float, ...]] = {}
    for rung in LIVE_RUNGS:
        lengths = [one["length_ns"] / _S for one in survived if one["rung"] == rung]
        if lengths:  # without the notice and the interrupted step
            rungs_s[rung] = tuple(max(0.0, length - detect_s - step_s) for length in lengths)
    for rung, what in (("rollback", "restore"), ("restart", "restart")):
        if what in means:
            rungs_s[rung] = tuple(means[what])
    used = {one["rung"] for one in survived}
    interval = max(1, round(steps / len(saves))) if saves else 0
    measured = MeasuredJob(
        world=int(attempts[0]["gpus"]),
        spares=spares if spares is not None else int(bool(used.intersection(_BY_SPARES))),
        steps=steps,
        step_s=step_s,
        interval=interval,
        copy_interval=interval,
        save_s=_mean(saves),
        flush_s=_mean(means.get("flush", [])),
        start_s=0.0,
        rungs_s=rungs_s,
        failures=tuple(_noticed(failures, detect_s)),
    )
    return LakeJob(_name(attempts), measured, recorded_s, 1, _unknown(rungs_s), is_measured=True)


def _assumed_job(
    attempts: Sequence[Mapping[str, Any]],
    failures: list[ScheduledFailure],
    scenario: Scenario,
    model: SimulatedJob,
    spares: int | None,
) -> LakeJob:
    """Return a job of a scheduler, with the times of a scenario. A simulated rank is a node."""
    step_s = scenario.step_s
    recorded_s = sum(one["runtime_s"] for one in attempts)
    restarts_s = len(failures) * (scenario.restart_s + model.interval_s / 2)
    steps = max(1, round(max(0.0, recorded_s - restarts_s) / step_s))
    interval = max(1, round(model.interval_s / step_s))
    live = model.node_from if scenario.replicas > 1 else (MEMORY if model.copies else STORAGE)
    nodes = max(1, int(attempts[0]["nodes"]))
    known = [replace(one, source=max(one.source, live)) for one in failures]
    rungs_s: dict[str, tuple[float, ...]] = dict.fromkeys(LIVE_RUNGS, (scenario.pause_s,))
    rungs_s |= {"rollback": (scenario.restore_s,), "restart": (scenario.restart_s,)}
    measured = MeasuredJob(
        world=nodes,
        spares=spares if spares is not None else model.spares,
        steps=steps,
        step_s=step_s,
        interval=interval,
        copy_interval=max(1, interval // model.versions),
        save_s=model.memory_cost_s + model.cost_s / model.versions,
        flush_s=model.flush_s,
        start_s=scenario.restart_s,
        rungs_s=rungs_s,
        failures=tuple(_noticed(known, scenario.detect_s)),
    )
    gpus = max(1, int(attempts[0]["gpus"]) // nodes)
    return LakeJob(_name(attempts), measured, recorded_s, gpus, (), is_measured=False)


def _noticed(failures: Iterable[ScheduledFailure], detect_s: float) -> Iterable[ScheduledFailure]:
    return (replace(one, detect_s=detect_s) for one in failures)


def _unknown(rungs_s: Mapping[str, object]) -> tuple[str, ...]:
    """Return the rungs for which neither a time nor that of a rung like it is known."""
    groups = (LIVE_RUNGS, FROM_A_COPY)
    return tuple(rung for group in groups if not rungs_s.keys() & set(group) for rung in group)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _name(attempts: Sequence[Mapping[str, Any]]) -> str:
    return str(attempts[0]["job"])


def describe(found: LakeJobs, path: Path) -> str:
    """Describe the jobs in a line."""
    failures = sum(len(job.measured.failures) for job in found.jobs)
    ours = sum(job.is_measured for job in found.jobs)
    ranks = sum(job.measured.world for job in found.jobs)
    return (
        f"{path}: {plural(failures, 'failure')} of {plural(len(found.jobs), 'job')}, {ranks:,}"
        f" simulated ranks ({ours} jobs by their own times)"
    )
