"""Goodput of each recovery strategy, and the interval at which it is best.

Failures are a Poisson process; each is of one of a ladder's *rungs*. While the job recovers,
failures go on: recovery then begins anew, on the deeper of the two rungs. docs/theory.md states the
model and derives the formulas, which are exact in the long run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from outlast.errors import UsageError
from outlast.theory import numerics
from outlast.theory.intervals import in_regime
from outlast.theory.levels import unchecked_nested_s
from outlast.theory.numerics import (
    check_not_negative,
    check_positive,
    check_share,
    check_whole,
    find_minimum,
)

Loses = Literal["nothing", "snapshot", "checkpoint"]
DEPTHS: tuple[Loses, ...] = ("nothing", "snapshot", "checkpoint")
SUM_CLOSE = 1e-9
HOPELESS = 1e-100  # share of recoveries that succeed; below, no run ends


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """One way to recover. `share`: of all failures, those that it covers.

    `recover_s`: from detection until the job works again; failures strike then, too. `wait_s`: time
    before detection without failures (a queue). `loses`: the work lost, by where it begins.
    `takes_node`: the failure keeps a node until it is repaired.
    """

    name: str
    share: float
    recover_s: float
    loses: Loses
    wait_s: float = 0.0
    takes_node: bool = True


class RecoveryJob(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a job that all strategies share.

    `mtbf_s`: between failures that stop the job while it works or recovers; infinity without
    failures.

    A checkpoint comes after each `interval_s` of work, blocks for `cost_s`, and can be restored
    `flush_s` later; meanwhile steps are slower by the share `drag`. `snapshots`: copies in memory
    in each interval, the last of them just before the checkpoint, each blocking `snapshot_cost_s`;
    0 for none. `detect_s`: from a failure until it is detected. `spares`: None for unlimited ones;
    a node is in repair for `repair_s`.
    """

    mtbf_s: float
    interval_s: float
    cost_s: float = 0.0
    flush_s: float = 0.0
    drag: float = 0.0
    snapshots: int = 0
    snapshot_cost_s: float = 0.0
    detect_s: float = 0.0
    spares: int | None = None
    repair_s: float = 0.0


class RecoveryOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of wall time in the long run; all from `goodput` to `degraded` sum to 1.

    `goodput`: useful work at full speed. `save`: blocking saves and slower steps that were not
    undone. `redo`: work and saves that a failure undid. `detect`, `recover`: after failures.
    `wait`: in queues and for a repaired node. `degraded`: work that missing replicas did not do.
    """

    goodput: float
    save: float
    redo: float
    detect: float
    recover: float
    wait: float
    degraded: float = 0.0
    recover_by_rung: dict[str, float]  # detection included
    falls_back: float  # share of recoveries that end at a checkpoint
    failures_per_s: float  # of wall time
    exact: bool
    in_regime: bool  # where not exact: whether first order holds


def ladder(job: RecoveryJob, rungs: Sequence[Rung]) -> RecoveryOutcome:
    """Return the outcome of a job that recovers by `rungs`, cheapest first; their shares sum to 1.

    Exact in the long run, except for `drag` beside rungs that lose less than a checkpoint, and for
    finite `spares` beside a `wait_s`. Raises UsageError with the invalid field.
    """
    return recovering(job, rungs)(job)


def recovering(job: RecoveryJob, rungs: Sequence[Rung]) -> Callable[[RecoveryJob], RecoveryOutcome]:
    """Return `ladder` for jobs that differ from `job` only in their save intervals.

    Those are `interval_s` and `snapshots`; everything independent of them is computed once.
    """
    _check(job, rungs)
    rate = 1 / job.mtbf_s
    visits = _visits([rung.share for rung in rungs], [_held_s(rung, job) for rung in rungs], rate)
    if any(math.isinf(rung) for rung in visits):
        never = _never(rungs, visits, rate)
        return lambda _: never
    detect = math.fsum(rate * v * _lasts_s(job.detect_s, rate) for v in visits)
    by_rung = [
        rate * v * _lasts_s(_held_s(r, job), rate) for v, r in zip(visits, rungs, strict=True)
    ]
    spent = math.fsum(by_rung)  # per second of running, as are detection and waits
    waits = math.fsum(rate * v * rung.wait_s for v, rung in zip(visits, rungs, strict=True))
    stalled = _stalled(job, rungs, rate)
    awake = (1 - stalled) / (1 + spent + waits)
    ends = _ends(visits, [math.exp(-rate * _held_s(rung, job)) for rung in rungs], rungs)
    exact = _is_exact(job, rungs)
    holds = _in_regime(job, rungs)

    def outcome(job: RecoveryJob) -> RecoveryOutcome:
        useful, saving = _kept(job, rate * ends["snapshot"], rate * ends["checkpoint"], rungs, rate)
        return RecoveryOutcome(
            goodput=awake * useful,
            save=awake * saving,
            redo=awake * max(0.0, 1 - useful - saving),
            detect=awake * detect,
            recover=awake * (spent - detect),
            wait=stalled + awake * waits,
            recover_by_rung={r.name: awake * s for r, s in zip(rungs, by_rung, strict=True)},
            falls_back=ends["checkpoint"],
            failures_per_s=rate * awake * (1 + spent),
            exact=exact,
            in_regime=holds,
        )

    return outcome


def checkpoint_restart(
    job: RecoveryJob, restart_s: float, *, wait_s: float = 0.0
) -> RecoveryOutcome:
    """Return the outcome where every failure restarts the job from its last checkpoint.

    Exact in the long run: goodput is `intervals.efficiency` with R = detection + restart and D =
    `wait_s`.
    """
    return ladder(job, [_restart(1.0, restart_s, wait_s)])


def peer_memory(
    job: RecoveryJob, restore_s: float, restart_s: float, falls_back: float, *, wait_s: float = 0.0
) -> RecoveryOutcome:
    """Return the outcome where the job restarts from the last snapshot in its nodes' memory.

    The share `falls_back` of failures takes the memory, too, and restarts from the checkpoint.
    """
    check_share("falls_back", falls_back)
    first = Rung(name="restore", share=1 - falls_back, recover_s=restore_s, loses="snapshot")
    return ladder(job, [first, _restart(falls_back, restart_s, wait_s)])


def migrate(
    job: RecoveryJob, pause_s: float, restart_s: float, falls_back: float, *, wait_s: float = 0.0
) -> RecoveryOutcome:
    """Return the outcome where a spare takes over from a live replica, while the others pause.

    Only the interrupted step is redone (include it in `pause_s`). The share `falls_back` of
    failures restarts from the checkpoint.
    """
    check_share("falls_back", falls_back)
    first = Rung(name="migrate", share=1 - falls_back, recover_s=pause_s, loses="nothing")
    return ladder(job, [first, _restart(falls_back, restart_s, wait_s)])


def _restart(of_failures: float, restart_s: float, wait_s: float) -> Rung:
    return Rung(
        name="restart", share=of_failures, recover_s=restart_s, loses="checkpoint", wait_s=wait_s
    )


def _held_s(rung: Rung, job: RecoveryJob) -> float:
    return job.detect_s + rung.recover_s


def _lasts_s(length_s: float, rate: float) -> float:
    """Return the mean part of `length_s` before a failure: (1 - e^(-l L))/l."""
    return -math.expm1(-rate * length_s) / rate if rate else length_s


def _visits(shares: Sequence[float], held_s: Sequence[float], rate: float) -> list[float]:
    """Return the mean number of recoveries begun on each rung, per failure while the job works.

    A failure in a recovery of rung i begins one of rung max(i, its own).
    """
    visits: list[float] = []
    handed = 1.0
    for k, (of_failures, length_s) in enumerate(zip(shares, held_s, strict=True)):
        fails = -math.expm1(-rate * length_s)
        leaves = math.exp(-rate * length_s) + fails * math.fsum(shares[k + 1 :])
        if not of_failures:
            visits.append(0.0)
            continue
        visits.append(handed * of_failures / leaves if leaves > HOPELESS else math.inf)
        handed += visits[-1] * fails
    return visits


def _ends(
    visits: Sequence[float], succeeds: Sequence[float], rungs: Sequence[Rung]
) -> dict[Loses, float]:
    """Return the shares of recoveries that end with no loss, with the loss of work since the last
    snapshot, and of work since the last checkpoint."""
    ends: dict[Loses, float] = dict.fromkeys(DEPTHS, 0.0)
    for count, success, rung in zip(visits, succeeds, rungs, strict=True):
        ends[rung.loses] += count * success
    return ends


def _kept(
    job: RecoveryJob,
    snapshot_rate: float,
    checkpoint_rate: float,
    rungs: Sequence[Rung],
    rate: float,
) -> tuple[float, float]:
    """Return the shares of running time that are work, and saves, which are not undone."""
    saves = max(1, job.snapshots)
    dragged_s = job.drag * job.flush_s
    round_s = unchecked_nested_s(
        job.interval_s / saves,
        job.snapshot_cost_s,
        job.cost_s + dragged_s,
        1 / snapshot_rate if snapshot_rate else math.inf,
        1 / checkpoint_rate if checkpoint_rate else math.inf,
        saves,
    )
    # A checkpoint counts once it is flushed without a failure that needs it.
    falling = rate * math.fsum(rung.share for rung in rungs if rung.loses == "checkpoint")
    survives = math.exp(-falling * (1 - job.drag) * job.flush_s)
    saving_s = saves * job.snapshot_cost_s + job.cost_s + dragged_s
    return job.interval_s * survives / round_s, saving_s * survives / round_s


def _stalled(job: RecoveryJob, rungs: Sequence[Rung], rate: float) -> float:
    if job.spares is None:
        return 0.0
    node_share = math.fsum(rung.share for rung in rungs if rung.takes_node)
    return numerics.erlang_b(job.spares + 1, rate * node_share * job.repair_s)


def _is_exact(job: RecoveryJob, rungs: Sequence[Rung]) -> bool:
    waits = any(rung.share and rung.wait_s for rung in rungs)
    lighter = any(rung.share and rung.loses != "checkpoint" for rung in rungs)
    return not (job.drag and job.flush_s and lighter) and not (waits and job.spares is not None)


def _in_regime(job: RecoveryJob, rungs: Sequence[Rung]) -> bool:
    waits_s = math.fsum(rung.share * rung.wait_s for rung in rungs)
    return _is_exact(job, rungs) or in_regime(job.flush_s + waits_s, job.mtbf_s)


def _check(job: RecoveryJob, rungs: Sequence[Rung]) -> None:
    check(job)
    depth = 0
    for rung in rungs:
        check_share(f"{rung.name}: share", rung.share)
        check_not_negative(f"{rung.name}: recover_s", rung.recover_s)
        check_not_negative(f"{rung.name}: wait_s", rung.wait_s)
        if DEPTHS.index(rung.loses) < depth:
            raise UsageError(f"{rung.name} loses less than the rung before it: list cheapest first")
        depth = DEPTHS.index(rung.loses)
        if rung.share and rung.loses == "snapshot" and not job.snapshots:
            raise UsageError(f"{rung.name} begins again from a snapshot, and snapshots is 0")
    total = math.fsum(rung.share for rung in rungs)
    if abs(total - 1) > SUM_CLOSE:
        raise UsageError(f"the shares of all rungs must sum to 1, not {total!r}")


def check(job: RecoveryJob) -> None:
    """Check `job`. Raises UsageError with the invalid field."""
    check_positive("mtbf_s", job.mtbf_s, endless=True)
    check_positive("interval_s", job.interval_s)
    check_share("drag", job.drag)
    check_whole("snapshots", job.snapshots)
    for name in ("cost_s", "flush_s", "snapshot_cost_s", "detect_s", "repair_s"):
        check_not_negative(name, getattr(job, name))
    if job.spares is not None:
        check_whole("spares", job.spares)
    if job.flush_s > job.interval_s:
        raise UsageError(
            f"flush_s ({job.flush_s!r}) is above interval_s ({job.interval_s!r}): a checkpoint"
            " begins when the last one can be restored"
        )


def _never(rungs: Sequence[Rung], visits: Sequence[float], rate: float) -> RecoveryOutcome:
    """Return the outcome of a job that never completes a recovery."""
    stuck = next(rung for rung, count in zip(rungs, visits, strict=True) if math.isinf(count))
    return RecoveryOutcome(
        goodput=0.0,
        save=0.0,
        redo=0.0,
        detect=0.0,
        recover=1.0,
        wait=0.0,
        recover_by_rung={rung.name: float(rung is stuck) for rung in rungs},
        falls_back=float(stuck.loses == "checkpoint"),
        failures_per_s=rate,
        exact=True,
        in_regime=True,
    )


SHORTEST_S = 1e-3
LONGEST_S = 1e9
SNAPSHOTS_MAX = 2**20


def tune_interval(
    strategy: Callable[[RecoveryJob], RecoveryOutcome],
    job: RecoveryJob,
    *,
    interval_s: float | None = None,
    longest_s: float = LONGEST_S,
) -> RecoveryJob:
    """Return `job` with the interval at which `strategy` has the most goodput.

    A given interval is kept; where the job takes snapshots, their best number is chosen, too. From
    1 ms (or the flush) to `longest_s` (31 years); numerically, the interval to 1e-6 relative. For
    `checkpoint_restart` it is `intervals.optimum_async`.
    """
    job = replace(job, interval_s=interval_s or max(job.flush_s, SHORTEST_S))
    check(job)

    def fit(variant: RecoveryJob) -> RecoveryJob:
        return variant if interval_s else _with_interval(strategy, variant, longest_s)

    if not job.snapshots:
        return fit(job)
    fitted: dict[int, RecoveryJob] = {}

    def goodput(snapshots: int) -> float:
        if snapshots not in fitted:
            fitted[snapshots] = fit(replace(job, snapshots=snapshots))
        return strategy(fitted[snapshots]).goodput

    low = high = 1
    while high < SNAPSHOTS_MAX and goodput(2 * high) > goodput(high):
        low = high
        high = 2 * high
    high *= 2
    while high - low > 2:
        low_third = low + (high - low) // 3
        high_third = high - (high - low) // 3
        low, high = (
            (low, high_third) if goodput(low_third) >= goodput(high_third) else (low_third, high)
        )
    return fitted[max(range(low, high + 1), key=goodput)]


def _with_interval(
    strategy: Callable[[RecoveryJob], RecoveryOutcome], job: RecoveryJob, longest_s: float
) -> RecoveryJob:
    shortest_s = max(job.flush_s, SHORTEST_S)

    def lost(interval_s: float) -> float:
        return -strategy(replace(job, interval_s=interval_s)).goodput

    # First order: sqrt(2 C M), times the snapshots in between.
    rounds = max(1, job.snapshots)
    cost_s = job.cost_s + job.drag * job.flush_s
    near_s = math.sqrt(2 * job.mtbf_s * (cost_s + rounds * job.snapshot_cost_s))
    longest_s = max(longest_s, shortest_s)
    if 2 * near_s >= longest_s and lost(longest_s) < lost(0.999 * longest_s):
        return replace(job, interval_s=longest_s)
    near_s = min(max(near_s, shortest_s), longest_s)
    found_s = find_minimum(lost, shortest_s, longest_s, near=near_s)
    return replace(job, interval_s=max(shortest_s, found_s))
