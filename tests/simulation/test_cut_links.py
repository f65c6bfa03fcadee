"""Links between two hosts that both reach the controller are cut, for seconds or for ever."""

from __future__ import annotations

import random

import pytest

from outlast.controller.recovery import network_cuts
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.testing import SimCluster, SimFailure
from outlast.testing.fault_plan import FaultPlan
from outlast.testing.simulated_cluster import SimOutcome

pytestmark = pytest.mark.sim
BEGUN_S = 10.0  # all ranks have completed phases by then


def _plan(seed: int, timed: tuple[tuple[float, str], ...], spares: int) -> FaultPlan:
    return FaultPlan(
        world=random.Random(seed).choice((3, 4, 5)),
        spares=spares,
        agents=4,
        phases=120,
        checkpoint_every=0,
        strikes=(),
        timed=timed,
        bug_at=-1,
        attempts_max=3,
        duplicates=0.0,
        repeats=bool(seed % 2),
        rot=False,
        policy=SavePolicy(),
        fails=0.0,
        links_end=True,
    )


def _play(seed: int, *timed: tuple[float, str], spares: int = 2) -> SimOutcome:
    return SimCluster(seed, _plan(seed, timed, spares)).run()


def test_a_cut_link_never_takes_anybody_back() -> None:
    generations = 0
    for seed in range(40):
        outcome = _play(seed, (BEGUN_S + seed / 25, "link"))
        generations += outcome.generations
        assert (outcome.outcome, outcome.restarts) == ("done", 0), f"seed {seed}"
    assert generations > 60


def test_cuts_and_kills_end_well_or_by_the_name_of_the_cut() -> None:
    ends: set[str] = set()
    for seed in range(40):
        dice = random.Random(seed)
        kinds = [dice.choice(("link", "link", "kill", "drop")) for _ in range(4)]
        timed = tuple((BEGUN_S + dice.uniform(0.0, 15.0), kind) for kind in kinds)
        outcome = _play(seed, *timed, spares=seed % 3)
        ends.add(outcome.outcome)
        assert outcome.outcome in ("done", "gave_up"), f"seed {seed}: {outcome}"
    assert "done" in ends


def test_a_controller_that_moves_nobody_waits_and_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network_cuts, "ranks_to_move", lambda *_, **__: {})
    with pytest.raises((SimFailure, AssertionError)):
        test_a_cut_link_never_takes_anybody_back()
