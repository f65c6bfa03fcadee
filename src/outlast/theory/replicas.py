"""Copies of each rank's state in other nodes' memory: losses and costs.

A *group* is the nodes that hold one piece of state, its owner included: `members` of them. After a
node's failure its group is short for `window_s`, until a new node holds the state again.
"""

from __future__ import annotations

import math

from outlast.errors import UsageError
from outlast.theory.argument_checks import (
    broadcasts,
    check_not_negative,
    check_positive,
    check_whole,
)

NEGLIGIBLE = 1e-18


@broadcasts
def loss_rate_per_s(nodes: int, members: int, node_rate_per_s: float, window_s: float) -> float:
    """Groups lost a second: every member fails within `window_s` of the first. Exact.

    `nodes`/`members` disjoint groups of independent nodes; after the window, and after a loss, the
    group is whole. With u = 1 - e^(-l w) and k over 1 to M - 1: groups x l u^(M-1) / [1/M + sum of
    u^k/k]; for short windows groups x M l (l w)^(M-1). Derived here (docs/theory.md). In a ring,
    where each node's copies lie on the next M - 1, each node begins a group: M times as often,
    first order.
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
    counts GPUs and l is a node's rate. Use `loss_rate_per_s`, whose window says what is meant.
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
    (`scale.save_s`).
    """
    check_positive("interval_s", interval_s)
    return memory_per_gpu_bytes(state_bytes, gpus, copies) / interval_s


def _powers(base: float, many: int) -> float:
    """Return the sum of base^k/k for k from 1 to `many`; what adds nothing any more is left out."""
    total = 0.0
    for k in range(1, many + 1):
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
