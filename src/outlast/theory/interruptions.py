"""Stops that are known beforehand: maintenance, and preemption with notice."""

from __future__ import annotations

import math

from outlast.theory.arrays import broadcasts
from outlast.theory.checks import not_negative, positive
from outlast.theory.intervals import recovery_s
from outlast.theory.strategies import Rung


@broadcasts
def maintenance_share(
    period_s: float,
    length_s: float,
    *,
    save_s: float = 0.0,
    restart_s: float = 0.0,
    mtbf_s: float = math.inf,
) -> float:
    """The share of time that planned stops take: (C + S + Y)/(P + C + S + Y), P between two stops.

    The job saves, stands for `length_s`, and restarts; failures strike the restart (Y is
    `recovery_s`). Exact for stops that come right after a save; other goodput multiplies with what
    is left, first order in that the stop's save stands in for another.
    """
    positive("period_s", period_s)
    not_negative("length_s", length_s)
    not_negative("save_s", save_s)
    stop_s = save_s + length_s + recovery_s(restart_s, mtbf_s)
    return 1.0 if math.isinf(stop_s) else stop_s / (period_s + stop_s)


@broadcasts
def preemption_s(
    notice_s: float,
    save_s: float,
    interval_s: float,
    *,
    restart_s: float = 0.0,
    queue_s: float = 0.0,
) -> float:
    """Expected seconds that one preemption costs: C + R + q where the notice is long enough for a
    save, else tau/2 + R + q. First order: tau much shorter than what passes between failures."""
    positive("interval_s", interval_s)
    for name, value in (("notice_s", notice_s), ("save_s", save_s), ("restart_s", restart_s)):
        not_negative(name, value)
    not_negative("queue_s", queue_s)
    lost_s = save_s if notice_s >= save_s else interval_s / 2
    return lost_s + restart_s + queue_s


def preemption(
    share: float,
    notice_s: float,
    save_s: float,
    *,
    restart_s: float = 0.0,
    queue_s: float = 0.0,
) -> Rung:
    """The rung of `strategies.ladder` for preemptions, which are this `share` of all failures: with
    notice enough nothing is lost but the save's time. No node goes into repair."""
    in_time = notice_s >= save_s
    return Rung(
        name="preemption",
        share=share,
        recover_s=restart_s + (save_s if in_time else 0.0),
        loses="nothing" if in_time else "checkpoint",
        wait_s=queue_s,
        takes_node=False,
    )
