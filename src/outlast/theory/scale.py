"""Limits of a job's size by failures."""

from __future__ import annotations

import math
from collections.abc import Callable

from outlast.errors import UsageError
from outlast.theory.argument_checks import (
    broadcasts,
    check_not_negative,
    check_positive,
    check_share,
)
from outlast.theory.special_functions import find_root, one_plus_w0

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
    """Return the number of GPUs at which the best efficiency has fallen to `efficiency`: from there
    on, failures take more. Exact, numerically; not rounded. Infinity above 1e30.

    What a save and a restart take may be functions of the number of GPUs; efficiency must fall as
    it grows. For storage C is state over bandwidth, for memory `save_s`. Raises UsageError where
    one GPU is no better than that.
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
    """Return seconds to send `copies` of the job's state over links that together carry B N^alpha:
    alpha = 1 where each GPU sends to a neighbour, less where the network thins out at its top.
    Epoch AI 2024."""
    check_not_negative("state_bytes", state_bytes)
    check_positive("gpus", gpus)
    check_positive("bytes_per_s_per_gpu", bytes_per_s_per_gpu)
    check_not_negative("copies", copies)
    check_share("network_exponent", network_exponent)
    return copies * state_bytes / (bytes_per_s_per_gpu * gpus**network_exponent)
