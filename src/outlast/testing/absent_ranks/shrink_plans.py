"""Plans of simulated runs that go on with fewer ranks, and take them back."""

from __future__ import annotations

import random

from outlast.testing.absent_ranks.shrink_options import HOST_LOSSES, ShrinkOptions
from outlast.testing.fault_plan import (
    DRAINS,
    NOTICES,
    FaultPlan,
    draw_plan,
    draw_takeover_plan,
)

_LOSSES = (*HOST_LOSSES, "lose", "lose", "kill", "pair", "agent")
_BESIDE = ("crash", "drop", "cut", "save", "freeze", "host", "split", *DRAINS, *NOTICES)


def draw_shrink_plan(seed: int) -> FaultPlan:
    """Draw the plan of a seed whose hosts lose power for long, and have little room."""
    dice = random.Random(f"shrink {seed}")
    takes_over = dice.random() < 0.6
    plan = draw_takeover_plan(seed) if takes_over else draw_plan(seed)
    hosts = dice.choice((2, 3, 3, 4)) if takes_over else dice.choice((1, 2, 3))
    share = -(-plan.world // hosts)
    losses = [
        (dice.uniform(3.0, 25.0), dice.choice(_LOSSES)) for _ in range(dice.choice((1, 1, 2, 3, 4)))
    ]
    if dice.random() < 0.5:  # a failure meets another
        losses.append((losses[0][0] + dice.uniform(0.0, 6.0), dice.choice(_LOSSES)))
    if dice.random() < 0.5:
        losses += [
            (dice.uniform(3.0, 30.0), dice.choice(_BESIDE if takes_over else _BESIDE[:4]))
            for _ in range(dice.choice((1, 2)))
        ]
    if takes_over and dice.random() < 0.4:
        losses.append((dice.uniform(4.0, 30.0), "join"))
    options = ShrinkOptions(
        rows=dice.choice((0, 1, 2, 3, 5, 8)),
        room=dice.choice((0, share, share, share + 1)),
        respawns_max=dice.choice((1, 2, 3, 400, 400, 400)),
        root=0 if dice.random() < 0.1 else -1,
        needs_all=dice.random() < 0.05,
    )
    if hosts == 1:  # ranks leave where no worker may be started any more
        options = options._replace(room=plan.world + plan.spares, respawns_max=dice.choice((1, 2)))
    beside = plan.timed if dice.random() < 0.4 else ()
    return plan._replace(
        agents=hosts,
        phases=dice.choice((20, 40, 60, 100)),
        strikes=plan.strikes if dice.random() < 0.5 else (),
        timed=(*losses, *beside),
        spares=dice.choice((0, 0, 0, 1, 2)),
        bug_at=-1,
        attempts_max=1000,
        waits=False,
        early=False,
        shard_sets=plan.shard_sets if dice.random() < 0.2 else 1,
        shrinking=options,
    )
