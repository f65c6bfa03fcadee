"""Copies of each rank's state in memory, running without a replica, and limits of a job's size.

A *group* is the `members` nodes that hold one piece of state, its owner included. After a node's
failure its group is short for `window_s`, until a new node holds the state again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from outlast.errors import UsageError
from outlast.theory.intervals import in_regime
from outlast.theory.numerics import (
    broadcasts,
    check_not_negative,
    check_positive,
    check_share,
    check_whole,
    find_root,
    one_plus_w0,
)
from outlast.theory.strategies import RecoveryJob, RecoveryOutcome, check, checkpoint_restart

NEGLIGIBLE = 1e-18


@broadcasts
def loss_rate_per_s(nodes: int, members: int, node_rate_per_s: float, window_s: float) -> float:
    """Return groups lost per second: every member fails within `window_s` of the first. Exact.

    `nodes`/`members` disjoint groups of independent nodes; after the window, and after a loss, the
    group is complete. With u = 1 - e^(-l w) and k over 1 to M - 1: groups x l u^(M-1) / [1/M + sum
    of u^k/k]; for short windows groups x M l (l w)^(M-1). Derived here (docs/theory.md). In a ring,
    where each node's copies are on the next M - 1 nodes, each node begins a group: M times as
    often, first order.
    """
    _check_group(nodes, members)
    check_not_negative("node_rate_per_s", node_rate_per_s)
    check_not_negative("window_s", window_s)
    lost = -math.expm1(-node_rate_per_s * window_s)
    short = _powers(lost, int(members) - 1)
    return nodes / members * node_rate_per_s * lost ** (members - 1) / (1 / members + short)


@broadcasts
def epoch_losses(
    train_s: float, step_s: float, holders: int, members: int, node_rate_per_s: float
) -> float:
    """Return expected losses of a run as Epoch AI 2024 prints it: (t_train/t_step) (N/M) (l
    t_step)^M.

    A loss is M failures within one step, as if state were protected again by the next step; N
    counts GPUs and l is a node's rate. Use `loss_rate_per_s`, whose window is explicit.
    """
    check_positive("train_s", train_s)
    check_positive("step_s", step_s)
    _check_group(holders, members)
    check_not_negative("node_rate_per_s", node_rate_per_s)
    return train_s / step_s * holders / members * (node_rate_per_s * step_s) ** members


@broadcasts
def memory_per_gpu_bytes(state_bytes: float, gpus: int, copies: int, *, versions: int = 1) -> float:
    """Return the host or device memory that `copies` of the job's state take on each of `gpus`.

    Besides the state in use; spread evenly. `versions`: versions kept at once, say 2 where a new
    one arrives before the old one is deleted. Exact.
    """
    check_not_negative("state_bytes", state_bytes)
    check_positive("gpus", gpus)
    check_not_negative("copies", copies)
    check_positive("versions", versions)
    return state_bytes * copies * versions / gpus


@broadcasts
def network_per_gpu_bytes_per_s(
    state_bytes: float, gpus: int, copies: int, interval_s: float
) -> float:
    """Return the mean rate at which each GPU sends, and receives, in bytes/s.

    For `copies` of the whole state every `interval_s`. Exact; a save sends it in a burst
    (`save_s`).
    """
    check_positive("interval_s", interval_s)
    return memory_per_gpu_bytes(state_bytes, gpus, copies) / interval_s


def _powers(base: float, count: int) -> float:
    """Return the sum of base^k/k for k from 1 to `count`, without terms too small to change it."""
    total = 0.0
    for k in range(1, count + 1):
        term = base**k / k
        if term <= NEGLIGIBLE * total:
            break
        total += term
    return total


def _check_group(nodes: int, members: int) -> None:
    check_positive("members", members)
    check_whole("members", members)
    if nodes < members:
        raise UsageError(f"{nodes!r} nodes make no group of {members!r}")


@broadcasts
def replicas_present(replica_mtbf_s: float, repair_s: float) -> float:
    """Return the mean share of replicas that are not in repair: M/(M + T). Exact for any
    distribution of repair times, if each replica fails independently and only while it works
    (alternating renewal)."""
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

    The job pauses for detection + `pause_s` after each drop and for `pause_s` after each return; a
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


GPUS_MAX = 1e30
TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. 2022 (arXiv 2203.15556), as Epoch AI 2024 uses it
FLOPS_PER_PARAMETER_TOKEN = 6.0


@broadcasts
def best_efficiency(
    cost_s: float, mtbf_s: float, *, restart_s: float = 0.0, safe_saves: bool = False
) -> float:
    """Return the efficiency at the best interval tau*: (1 - tau*/M) e^(-R/M). Exact.

    `safe_saves`: nothing fails while saving, as in Epoch AI 2024. Then it is e^(-u - R/M), where u
    = 1 + W0((C e^(-R/M)/M - 1)/e): 1/e where a save takes as long as passes between two failures.
    """
    check_not_negative("cost_s", cost_s)
    check_positive("mtbf_s", mtbf_s, endless=True)
    check_not_negative("restart_s", restart_s)
    if math.isinf(mtbf_s):
        return 1.0
    save = cost_s / mtbf_s
    restart = restart_s / mtbf_s
    if safe_saves:
        return math.exp(-one_plus_w0(save * math.exp(-restart)) - restart)
    return math.exp(-one_plus_w0(-math.expm1(-save)) - save - restart)  # e^(-u - C/M) = 1 - u


def gpus_at(
    efficiency: float,
    device_mtbf_s: float,
    cost_s: float | Callable[[float], float],
    *,
    restart_s: float | Callable[[float], float] = 0.0,
    safe_saves: bool = False,
) -> float:
    """Return the number of GPUs at which the best efficiency has fallen to `efficiency`.

    Exact, numerically; not rounded. Infinity above 1e30. The durations of a save and a restart may
    be functions of the number of GPUs; efficiency must fall as it grows. For storage C is state
    over bandwidth, for memory `save_s`. Raises UsageError if a single GPU is not above
    `efficiency`.
    """
    if not 0 < efficiency < 1:
        raise UsageError(f"efficiency must lie between 0 and 1, not {efficiency!r}")
    check_positive("device_mtbf_s", device_mtbf_s)

    def spare(gpus: float) -> float:
        cost = cost_s(gpus) if callable(cost_s) else cost_s
        restart = restart_s(gpus) if callable(restart_s) else restart_s
        best = best_efficiency(cost, device_mtbf_s / gpus, restart_s=restart, safe_saves=safe_saves)
        return best - efficiency

    if spare(1.0) <= 0:
        best = spare(1.0) + efficiency
        raise UsageError(f"one GPU is no better than {efficiency!r}: its best is {best:.4g}")
    high = 2.0
    while spare(high) > 0:
        high *= 2
        if high > GPUS_MAX:
            return math.inf
    return find_root(spare, high / 2, high)


@broadcasts
def chinchilla_parameters(gpus: float, flops_per_gpu: float, mfu: float, train_s: float) -> float:
    """Return parameters of the model that these GPUs train best in `train_s`: sqrt(N x FLOP/s x MFU
    x t / 120), by C = 6 N D and D = 20 N. Hoffmann et al. 2022 (arXiv 2203.15556), rounded."""
    check_positive("gpus", gpus)
    check_positive("flops_per_gpu", flops_per_gpu)
    check_positive("train_s", train_s)
    check_share("mfu", mfu)
    each = FLOPS_PER_PARAMETER_TOKEN * TOKENS_PER_PARAMETER
    return math.sqrt(gpus * flops_per_gpu * mfu * train_s / each)


@broadcasts
def save_s(
    state_bytes: float,
    gpus: float,
    bytes_per_s_per_gpu: float,
    *,
    copies: int = 1,
    network_exponent: float = 1.0,
) -> float:
    """Return seconds to send `copies` of the job's state over links with a total of B N^alpha.
    alpha = 1 where each GPU sends to a neighbour, less where the network is oversubscribed at its
    top. Epoch AI 2024."""
    check_not_negative("state_bytes", state_bytes)
    check_positive("gpus", gpus)
    check_positive("bytes_per_s_per_gpu", bytes_per_s_per_gpu)
    check_not_negative("copies", copies)
    check_share("network_exponent", network_exponent)
    return copies * state_bytes / (bytes_per_s_per_gpu * gpus**network_exponent)
