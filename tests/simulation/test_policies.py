"""Seeded failure schedules under each preset, with all invariants checked after every event."""

from __future__ import annotations

import pytest

from outlast.launch.policies.policy_files import PRESETS, read_policy
from outlast.testing import SimCluster, run_seed
from outlast.testing.fault_plan import draw_takeover_plan

pytestmark = pytest.mark.sim
BATCHES = [
    pytest.param(range(100)),
    *(
        pytest.param(range(first, first + 475), marks=pytest.mark.extended)
        for first in range(100, 2000, 475)
    ),
]


@pytest.mark.parametrize("seeds", BATCHES, ids=str)
# torchft-like lets ranks leave, whatever room there is: test_fewer_ranks.py plays it.
@pytest.mark.parametrize("preset", [x for x in PRESETS if x not in ("default", "torchft-like")])
def test_every_invariant_holds(preset: str, seeds: range) -> None:
    policy = read_policy(preset)
    for seed in seeds:
        run_seed(seed, policy)


@pytest.mark.parametrize("preset", ["checkpoint-restart", "cheapest"])
def test_takeovers_keep_the_policy(preset: str) -> None:
    policy = read_policy(preset)
    for seed in range(60):
        SimCluster(seed, draw_takeover_plan(seed), policy).run()


def test_presets_differ_where_they_should() -> None:
    """A kill with a spare at hand is replaced, or all ranks start again."""

    def restarts(preset: str) -> int:
        return sum(run_seed(seed, read_policy(preset)).restarts for seed in range(60))

    assert restarts("checkpoint-restart") > 1.5 * restarts("exact") > 0
