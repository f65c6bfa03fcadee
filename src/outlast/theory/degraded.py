"""Running without a replica during its repair: throughput traded for time."""

from __future__ import annotations

import math

import msgspec

from outlast.errors import UsageError
from outlast.theory.argument_checks import (
    broadcasts,
    check_not_negative,
    check_positive,
    check_share,
    check_whole,
)
from outlast.theory.intervals import in_regime
from outlast.theory.strategies import RecoveryJob, RecoveryOutcome, check, checkpoint_restart


@broadcasts
def replicas_present(replica_mtbf_s: float, repair_s: float) -> float:
    """Return the mean share of replicas that are not in repair: M/(M + T). Exact for any law of
    repair times, where each fails by itself and only while it works (alternating renewal)."""
    check_positive("replica_mtbf_s", replica_mtbf_s, endless=True)
    check_not_negative("repair_s", repair_s)
    return 1 / (1 + repair_s / replica_mtbf_s)


def drop_and_regrow(
    job: RecoveryJob,
    replicas: int,
    pause_s: float,
    restart_s: float = 0.0,
    falls_back: float = 0.0,
    *,
    slower: float = 0.0,
) -> RecoveryOutcome:
    """Return the outcome of a job whose failures take a replica out for `job.repair_s`.

    Nobody works for detection + `pause_s` after each drop and for `pause_s` after each return; a
    drop or return meanwhile begins its own. `job.mtbf_s` is that of all replicas together. The
    share `falls_back` of failures restarts the job from its checkpoint. `slower`: the share of
    speed that the strategy costs always. Samples of what is missing are not trained on.

    Exact for exponential repairs where nothing falls back, and the law of repairs matters only
    within a pause; else first order in how the two interplay. `recover` contains the detection of
    drops. `job.spares` must be None: a spare is a short `repair_s`.
    """
    check(job)
    check_positive("replicas", replicas)
    check_whole("replicas", replicas)
    check_not_negative("pause_s", pause_s)
    check_share("falls_back", falls_back)
    check_share("slower", slower)
    if job.spares is not None:
        raise UsageError("replicas are dropped where there is no spare: spares must be None")
    rate = (1 - falls_back) / (job.mtbf_s * replicas)
    works, quiet = _quiet(rate, job.repair_s, job.detect_s + pause_s, pause_s)
    paused_free = quiet**replicas
    present = works * quiet ** (replicas - 1)
    fatal_mtbf_s = job.mtbf_s / falls_back if falls_back else math.inf
    fatal = checkpoint_restart(msgspec.structs.replace(job, mtbf_s=fatal_mtbf_s), restart_s)
    goodput = present * (1 - slower) * fatal.goodput
    restarting = paused_free * (fatal.detect + fatal.recover)
    events = rate * replicas * replicas_present(1 / rate if rate else math.inf, job.repair_s)
    return RecoveryOutcome(
        goodput=goodput,
        save=paused_free * fatal.save,
        redo=paused_free * fatal.redo,
        detect=paused_free * fatal.detect,
        recover=1 - paused_free + paused_free * fatal.recover,
        wait=paused_free * fatal.wait,
        degraded=paused_free * fatal.goodput - goodput,
        recover_by_rung={"drop and regrow": 1 - paused_free, "restart": restarting},
        falls_back=falls_back,
        failures_per_s=events + fatal.failures_per_s * paused_free,
        exact=not falls_back,
        in_regime=not falls_back or in_regime(job.detect_s + pause_s + restart_s, job.mtbf_s),
    )


def _quiet(rate: float, repair_s: float, drop_s: float, return_s: float) -> tuple[float, float]:
    """Return, for one replica at any time, the probabilities that it works, and that it works or is
    missing, with no drop in the last `drop_s` and no return in the last `return_s`."""
    present = 1 / (1 + rate * repair_s)
    stays = math.exp(-rate * drop_s)
    if not repair_s:
        return stays, stays
    turn = 1 / repair_s - rate
    early_s = drop_s - return_s  # in which it may return, and then stay
    came_s = -math.expm1(-turn * early_s) / turn if turn else early_s
    works = present * stays * (1 + rate * came_s)
    return works, works + (1 - present) * math.exp(-drop_s / repair_s)
