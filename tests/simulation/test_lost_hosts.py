"""Hosts die with all their ranks; their partners on other hosts have the ranks' own state."""

from __future__ import annotations

import random

import pytest

from outlast.controller.recovery import partner_slots
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.testing import SimCluster, SimFailure
from outlast.testing.fault_plan import FaultPlan
from outlast.testing.simulated_cluster import SimOutcome

pytestmark = pytest.mark.sim
BEGUN_S = 10.0  # all ranks have completed phases by then


def _plan(seed: int, times: tuple[float, ...]) -> FaultPlan:
    return FaultPlan(
        world=random.Random(seed).choice((2, 4, 5)),
        spares=0,
        agents=3,
        phases=120,
        checkpoint_every=0,
        strikes=(),
        timed=tuple((time_s, "agent") for time_s in times),
        bug_at=-1,
        attempts_max=3,
        duplicates=0.0,
        repeats=False,
        rot=False,
        policy=SavePolicy(),
        fails=0.0,
    )


def _play(seed: int, times: tuple[float, ...]) -> SimOutcome:
    outcome = SimCluster(seed, _plan(seed, times)).run()
    assert outcome.outcome == "done"
    return outcome


def test_a_lost_host_never_takes_the_others_back() -> None:
    generations = 0
    for seed in range(40):
        time_s = BEGUN_S + seed / 25
        outcome = _play(seed, (time_s,))
        generations += outcome.generations
        assert outcome.restarts == 0, f"seed {seed}"
    assert generations > 40


def test_hosts_that_are_lost_in_turn_never_take_the_others_back() -> None:
    for seed in range(25):
        assert _play(seed, (BEGUN_S, BEGUN_S + 14.0)).restarts == 0, f"seed {seed}"


def test_hosts_that_are_lost_together_are_survived_or_all_begin_again() -> None:
    restarts = [_play(seed, (BEGUN_S, BEGUN_S + seed / 15)).restarts for seed in range(30)]
    assert any(restarts) and not all(restarts)


def test_a_controller_that_asks_no_partner_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partner_slots, "are_awaited", lambda *arguments: False)
    with pytest.raises((SimFailure, AssertionError)):
        test_a_lost_host_never_takes_the_others_back()
