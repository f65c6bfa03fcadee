"""Seeded schedules of several hosts: controllers die, stop, wake and are cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outlast.controller import membership
from outlast.controller.lifecycle import run_start
from outlast.testing import SimFailure, run_takeover_seed, soak
from outlast.testing.fault_plan import FaultPlan, draw_join_plan, draw_takeover_plan
from outlast.testing.simulated_agent import SimAgent
from outlast.testing.simulated_cluster import SimCluster
from outlast.testing.simulated_controller import SimController

pytestmark = pytest.mark.sim
_BATCH = 100
_SUITE = 700  # from 400 on, behind those that reach everything
_EXTENDED = 10_000  # in shares of .ci/run, which one by the commit


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.extended] if first >= _SUITE else [])
        for first in range(400, _EXTENDED, _BATCH)
    ],
)
def test_every_invariant_holds_across_takeovers(first: int) -> None:
    for seed in range(first, first + _BATCH):
        run_takeover_seed(seed)


@pytest.mark.parametrize("seed", [12_218, 13_496, 18_247, 18_308, 40_941, 100_562])
def test_schedules_that_once_broke_an_invariant_hold(seed: int) -> None:
    """One rank lost ahead of those that take a phase back; seats that were filled late; a Kill that
    waited for the store beyond its deadline; a lost worker that woke and made a shared value."""
    run_takeover_seed(seed)


def test_every_invariant_holds_where_hosts_join() -> None:
    have_joined = 0
    for seed in range(60):
        cluster = SimCluster(seed, draw_join_plan(seed))
        cluster.run()
        have_joined += any(name.startswith("late") for name in cluster.state.members.agents)
    assert have_joined > 20


def test_a_takeover_replays_to_the_last_turn() -> None:
    assert [run_takeover_seed(n) for n in range(30)] == [run_takeover_seed(n) for n in range(30)]


def test_the_takeovers_reach_everything() -> None:
    """A simulation that breaks nothing proves nothing."""
    outcomes = [run_takeover_seed(seed) for seed in range(400)]
    assert sum(outcome.outcome == "done" for outcome in outcomes) > 300
    assert sum(outcome.terms > 1 for outcome in outcomes) > 150
    assert sum(outcome.terms > 2 for outcome in outcomes) > 20
    assert sum(outcome.refused for outcome in outcomes) > 5
    assert sum(outcome.restarts == 0 and outcome.terms > 1 for outcome in outcomes) > 50
    kinds = {what for seed in range(400) for _, what in draw_takeover_plan(seed).timed}
    assert {"freeze", "frost", "host", "island", "split", "storeless", "outage"} <= kinds


def test_a_rank_that_is_lost_with_its_controller_goes_to_a_spare_of_the_old_term() -> None:
    """The spare is warm, and is not killed because a later term does not know it."""
    for seed in range(200):
        cluster = SimCluster(seed, draw_takeover_plan(seed))
        cluster.run()
        seats = cluster.state.members.seats
        if len(cluster.segments) > 1 and any(name.startswith("w1-") for name in seats):
            return
    raise AssertionError("no rank of the first term has outlived it")


def _play(seeds: range, draw: Callable[[int], FaultPlan] = draw_takeover_plan) -> None:
    for seed in seeds:
        SimCluster(seed, draw(seed)).run()


def test_a_failing_plan_is_shrunk_to_the_faults_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SimAgent, "may_apply", _always)
    failures = ((seed, soak.play(seed, draw_takeover_plan(seed))) for seed in range(4_000))
    seed, failure = next((seed, failure) for seed, failure in failures if failure is not None)
    plan = draw_takeover_plan(seed)
    smaller, found = soak.shrink(seed, plan, failure)
    faults, fewer = (len(each.timed) + len(each.strikes) for each in (plan, smaller))
    assert 0 < fewer <= faults and str(found).startswith(f"seed {seed}: ")
    assert any(what == "frost" for _, what in smaller.timed)


def _never(*_: Any) -> bool:
    return False


def _nothing(*_: Any) -> None:
    pass


def _always(*_: Any) -> bool:
    return True


def _leased(controller: SimController) -> tuple[str, ...]:
    return controller.leased()


def _decide_at_once(turn: Any) -> None:
    run_start.decide_without(turn)


def _is_there(state: Any) -> bool:
    members = state.members
    return all(name in members.workers for name in members.seats) and state.term.end is None


FIRST = {  # seeds shortly before those that find a rare breakage
    "renewals never wait": 1_730,
    "who was struck off succeeds": 285,
    "successors without a lease do not count": 565,
    "workers of a host that is lost, or comes back, are not": 300,
}
BREAKAGES: dict[str, tuple[Any, str, Any]] = {
    "a decision is sent before a read": (SimController, "_is_checked", _always),
    "renewals never wait": (SimController, "_is_in_touch", _always),
    "a new term waits for nobody": (run_start, "decide_when_agents_reported", _decide_at_once),
    "a takeover adopts what was never open": (run_start, "_is_unharmed", _is_there),
    "a takeover closes what is unharmed": (run_start, "_is_unharmed", _never),
    "a lease has no end": (SimAgent, "has_lease", _always),
    "a woken worker applies": (SimAgent, "may_apply", _always),
    "lower terms are obeyed": (SimAgent, "refuses", _never),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_takeover_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    room, function, broken = BREAKAGES[name]
    monkeypatch.setattr(room, function, broken)
    with pytest.raises((SimFailure, AssertionError, LookupError)):
        _play(range(FIRST.get(name, 0), 4_000))


def _may_succeed(agent: SimAgent, _successors: tuple[str, ...]) -> bool:
    return SUCCEED(agent, ())


SUCCEED = SimAgent.may_succeed
BREAKAGES_OF_JOINS: dict[str, tuple[Any, str, Any]] = {
    "who was struck off succeeds": (SimAgent, "may_succeed", _may_succeed),
    "successors without a lease do not count": (SimController, "_may_create", _leased),
    "workers of a host that is lost, or comes back, are not": (
        membership,
        "on_worker_lost_with_agent",
        _nothing,
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", BREAKAGES_OF_JOINS)
def test_a_broken_run_that_hosts_join_is_found_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, function, broken = BREAKAGES_OF_JOINS[name]
    monkeypatch.setattr(room, function, broken)
    with pytest.raises((SimFailure, AssertionError, LookupError)):
        _play(range(FIRST.get(name, 0), 4_000), draw_join_plan)
