"""Seeded schedules of runs that go on with fewer ranks, and take them back, on scarce hosts."""

from __future__ import annotations

import msgspec
import pytest

from outlast.controller import membership, node_placement
from outlast.controller.recovery import partner_slots, reconfiguration, shrinking
from outlast.controller.replica_placement import partner_sets
from outlast.controller.state_parts import Progress
from outlast.data.batch_deal import BatchDeal
from outlast.launch.policies.policy_files import read_policy
from outlast.testing import SimCluster, SimFailure
from outlast.testing.absent_ranks.shrink_plans import draw_shrink_plan
from outlast.testing.simulated_cluster import SimOutcome

pytestmark = pytest.mark.sim
_BATCH = 100


BATCHES = [  # behind those that reach everything
    200,
    *(pytest.param(first, marks=pytest.mark.extended) for first in range(300, 2000, _BATCH)),
]


def play(seed: int, policy: str = "elastic") -> SimOutcome:
    return SimCluster(seed, draw_shrink_plan(seed), read_policy(policy)).run()


@pytest.mark.parametrize("seed", [408_587, 472_213])
def test_a_generation_may_save_while_the_next_one_is_decided(seed: int) -> None:
    assert play(seed).outcome == "done"


@pytest.mark.parametrize("seed", [777, 201_487, 366_459])
def test_a_start_may_find_a_newer_copy_than_the_one_before(seed: int) -> None:
    """What the later start restores was trained, although the earlier one had taken it back."""
    play(seed)


def test_a_takeover_waits_for_a_node_that_joined_later() -> None:
    """Its workers have taken ranks behind a decision that names no worker for them."""
    assert play(383_525).outcome == "done"


def test_a_spare_whose_seat_is_overtaken_after_a_takeover_holds_no_state() -> None:
    """The earlier term had decided its seat, and had not passed it on."""
    assert play(512_515).outcome == "done"


def test_a_flip_that_all_ranks_share_condemns_no_copy() -> None:
    """The flipped rank was the only source of the other one's state."""
    assert play(640_609).outcome == "done"


@pytest.mark.parametrize("seed", [305_069, 354_875, 365_936])
def test_no_rank_leaves_where_those_that_had_a_phase_are_lost(seed: int) -> None:
    assert play(seed).outcome == "gave_up"


def test_ranks_leave_although_there_is_room() -> None:
    assert sum(play(seed, "torchft-like").shrinks for seed in range(100)) > 40


@pytest.mark.parametrize("first", BATCHES)
def test_every_invariant_holds(first: int) -> None:
    for seed in range(first, first + _BATCH):
        play(seed)


def test_the_schedules_reach_everything() -> None:
    outcomes = [play(seed) for seed in range(200)]
    assert sum(outcome.outcome == "done" for outcome in outcomes) > 140
    assert sum(outcome.shrinks for outcome in outcomes) > 40
    assert sum(outcome.returns for outcome in outcomes) > 20
    assert sum(outcome.restores for outcome in outcomes) > 10


def _partners_by_place(state):
    return partner_sets([worker.agent for worker in state.occupants()], {})


def _without_owed(deal):
    LOOK(deal)
    deal._owed = ()
    return deal.hand


def _forgetful(progress, decision, *, opened):
    RESTORE(progress, msgspec.structs.replace(decision, absent=()), opened=opened)


def _alone(state, survivors, lost):
    units, why = LEAVING(state, survivors, lost)
    return tuple((seat,) for seat in lost if any(seat in unit for unit in units)), why


def _one_by_one(state):
    return tuple((seat,) for seat in state.progress.absent)


def _without_left_slots(turn, partners, workers):
    frame = CONNECT(turn, partners, workers)
    return msgspec.structs.replace(frame, slots={rank: {} for rank in frame.slots})


def _with_everybody(place):
    return AT({**place, "present": list(range(place["world"]))})


def _trust(turn, agent, name, *, is_spare):
    MEET(turn, agent, name, is_spare=is_spare)
    turn.change(name, whole=turn.state.members.workers[name].seat >= 0)


MEET = membership._meet
CONNECT, AT = reconfiguration.connect_frame, BatchDeal.at
LOOK, RESTORE = BatchDeal._look, Progress.restore
LEAVING = shrinking.leaving_units
BREAKAGES = {
    "partners are places": (partner_slots, "_sets", _partners_by_place),
    "any rank may leave": (shrinking, "leaving_units", lambda *arguments: ((), "")),
    "a rank leaves its unit": (shrinking, "leaving_units", _alone),
    "ranks of a unit come back one by one": (shrinking, "absent_units", _one_by_one),
    "old slots are kept": (shrinking, "leaving_slots", lambda slots, n: slots),
    "a deputy has nothing": (reconfiguration, "connect_frame", _without_left_slots),
    "a checkpoint has all ranks": (BatchDeal, "at", _with_everybody),
    "own slots are lost": (
        shrinking,
        "returning_slots",
        lambda left, slots, n, seed: {**slots, **left},
    ),
    "a term forgets who is absent": (Progress, "restore", _forgetful),
    "a hand has batches of absent ranks": (BatchDeal, "change", lambda deal, step, present: None),
    "what ranks leave is dropped": (BatchDeal, "_look", _without_owed),
    "a spare that was not seated is whole": (membership, "_meet", _trust),
    "a full host waits": (node_placement, "rooms", lambda state: 100),
}


RARE = {  # what the first seeds do not reach
    "old slots are kept": 200,
    "a spare that was not seated is whole": 512_500,
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_controller_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BREAKAGES[name])
    with pytest.raises((SimFailure, AssertionError, LookupError)):
        test_every_invariant_holds(RARE.get(name, 0))
