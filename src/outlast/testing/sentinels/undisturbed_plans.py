"""Plans of runs of odd kinds in which nothing fails, so that no sentinel may find anything."""

from __future__ import annotations

import random
from typing import get_args

from outlast.config import AUTO
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.testing.fault_plan import ATTEMPTS_AMPLE, FaultPlan
from outlast.testing.sentinels.simulated_pace import OddPace, PaceKind


def draw_undisturbed_plan(seed: int) -> FaultPlan:
    """Draw the plan of a seed: world, hosts, spares, replicas, saves, frames and pace."""
    dice = random.Random(f"undisturbed {seed}")
    world = dice.choice((1, 2, 2, 3, 4, 4, 6, 8))
    takes_over = dice.random() < 0.4
    kind: PaceKind = dice.choice(get_args(PaceKind))
    return FaultPlan(
        world=world,
        spares=dice.choice((0, 1, 2)),
        agents=dice.choice((2, 3, 4)) if takes_over else dice.choice((1, 1, 2)),
        phases=dice.randint(20, 120),
        checkpoint_every=dice.choice((0, 1, 3, 10)),
        strikes=(),
        timed=(),
        bug_at=-1,
        attempts_max=ATTEMPTS_AMPLE,
        duplicates=dice.choice((0.0, 0.02, 0.1)),
        repeats=dice.random() < 0.7,
        rot=False,
        policy=SavePolicy(memory=dice.choice((0, AUTO)), disk=dice.choice((3, AUTO)), stop=False),
        fails=dice.choice((0.0, 0.0, 0.3)),  # of saves, which is no sentinel's matter
        shard_sets=dice.choice((1, 1, 1, 2, world)),
        skips=dice.choice((0.0, 0.3)),
        windows=dice.choice((1, 2, 3)),
        takes_over=takes_over,
        pace=OddPace(kind, dice.uniform(0.005, 0.08), world),
    )
