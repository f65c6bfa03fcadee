"""Plans of simulated runs that go on with fewer ranks, and take them back."""

from __future__ import annotations

import random

from outlast.testing.absent_ranks.shrink_options import (
    HOST_LOSSES,
    RESPAWNS_AMPLE,
    ShrinkOptions,
)
from outlast.testing.fault_plan import (
    DRAINS,
    NOTICES,
    FaultPlan,
    PlannedFault,
    draw_plan,
    draw_takeover_plan,
)

_LOSSES = (*HOST_LOSSES, "lose", "lose", "kill", "pair", "agent")
_BESIDE = ("crash", "drop", "cut", "save", "freeze", "host", "split", *DRAINS, *NOTICES)
_WITHOUT_TERMS = _BESIDE[:4]
# Points between a decision and the first phase behind it, and points of that phase.
_BETWEEN = (
    *("opened", "opened", "opened", "connect", "joined", "meshed", "ready", "decided"),
    *("closed", "reported", "seated", "hello", "send"),
)
_IN_PHASES = ("attempt", "tail", "voted", "applied")
_DEEDS = ("kill", "kill", "kill", "transport", "exit", "hang")


def draw_shrink_plan(seed: int) -> FaultPlan:
    """Draw the plan of a seed whose hosts lose power for long, and have little room: a storm of
    losses in most, any faults in others."""
    dice = random.Random(f"shrink {seed}")
    takes_over = dice.random() < 0.6
    plan = draw_takeover_plan(seed) if takes_over else draw_plan(seed)
    plan = plan._replace(bug_at=-1, attempts_max=1000, waits=False, early=False)
    if dice.random() < 0.8:
        plan = _with_restart(dice, _draw_storm(dice, plan))
    else:
        plan = _draw_any(dice, plan)
    return _in_units(random.Random(f"units {seed}"), plan)


def _with_restart(dice: random.Random, plan: FaultPlan) -> FaultPlan:
    """Lose all workers, in some plans, perhaps behind a checkpoint without ranks."""
    if dice.random() > 0.3:
        return plan
    begin_s = min(time_s for time_s, _ in plan.timed)
    timed = (*plan.timed, (begin_s + dice.uniform(3.0, 14.0), "all"))
    return plan._replace(timed=timed, checkpoint_every=dice.choice((1, 1, 3)))


def _in_units(dice: random.Random, plan: FaultPlan) -> FaultPlan:
    """Make replicas of several ranks, in some plans; the others stay as they were."""
    options = plan.shrinking
    if options is None or dice.random() > 0.35:
        return plan
    unit, count = dice.choice(((2, 2), (2, 2), (2, 3), (2, 3), (3, 2), (2, 4)))
    world, before = unit * count, -(-plan.world // plan.agents)
    room = options.room and -(-world // plan.agents) + options.room - before
    options = options._replace(
        unit=unit, shares=dice.random() < 0.4, forgets=dice.random() < 0.15, room=room
    )
    return plan._replace(world=world, shard_sets=unit, shrinking=options)


def _draw_storm(dice: random.Random, plan: FaultPlan) -> FaultPlan:
    """Lose a host, and workers while the others reconfigure."""
    world = dice.choice((3, 4, 4, 5))
    hosts = dice.choice((2, 3, world, world))
    begin_s = dice.uniform(4.0, 8.0)
    kinds = ("lose", "kill", "pair", "agent", "drop", "join" if plan.takes_over else "kill")
    timed = [(begin_s, dice.choice(("lose", "lose", "lose two", "agent")))]
    timed += [
        (begin_s + dice.uniform(0.0, 12.0), dice.choice(kinds))
        for _ in range(dice.choice((1, 2, 3, 5)))
    ]
    if dice.random() < 0.4:
        timed.append((begin_s + dice.uniform(0.0, 12.0), dice.choice(_beside(plan))))
    if dice.random() < 0.4:  # the controller changes while ranks are absent
        kind = dice.choice(("crash", "crash", "freeze", "host") if plan.takes_over else ("crash",))
        timed.append((begin_s + dice.uniform(3.0, 10.0), kind))
    if dice.random() < 0.3:  # ranks have had other workers
        timed.append((dice.uniform(2.0, begin_s), dice.choice(("kill", "pair"))))
    strikes: list[PlannedFault] = []
    for _ in range(dice.choice((1, 2, 3, 4, 6))):
        point = dice.choice((*_BETWEEN, *_IN_PHASES))
        most = 10 * world if point in _IN_PHASES else 4 * world
        nth = dice.randint(world + 1, most)
        strikes.append(PlannedFault(point, dice.choice(_DEEDS), nth, -1))
    share = -(-world // hosts)
    return plan._replace(
        world=world,
        agents=hosts,
        spares=dice.choice((0, 0, 1, 1, 2)),
        phases=dice.choice((16, 24, 32)),
        checkpoint_every=dice.choice((0, 3)),
        strikes=tuple(strikes),
        timed=tuple(timed),
        flips=(),
        fails=0.0,
        shard_sets=1,
        shrinking=ShrinkOptions(
            rows=dice.choice((1, 2, 3, 4)),
            room=dice.choice((share, share, share + 1)),
            respawns_max=dice.choice((1, 2, 3, RESPAWNS_AMPLE)),
            root=0 if dice.random() < 0.1 else -1,
            needs_all=dice.random() < 0.05,
        ),
    )


def _draw_any(dice: random.Random, plan: FaultPlan) -> FaultPlan:
    """Lose hosts beside all other faults."""
    hosts = dice.choice((2, 3, 3, 4)) if plan.takes_over else dice.choice((1, 2, 3))
    share = -(-plan.world // hosts)
    losses = [
        (dice.uniform(3.0, 15.0), dice.choice(_LOSSES)) for _ in range(dice.choice((1, 1, 2, 3, 4)))
    ]
    if dice.random() < 0.5:  # a failure meets another
        losses.append((losses[0][0] + dice.uniform(0.0, 6.0), dice.choice(_LOSSES)))
    if dice.random() < 0.5:
        losses += [
            (dice.uniform(3.0, 20.0), dice.choice(_beside(plan)))
            for _ in range(dice.choice((1, 2)))
        ]
    if plan.takes_over and dice.random() < 0.4:
        losses.append((dice.uniform(4.0, 20.0), "join"))
    options = ShrinkOptions(
        rows=dice.choice((0, 1, 2, 3, 5, 8)),
        room=dice.choice((0, share, share, share + 1)),
        respawns_max=dice.choice((1, 2, 3, *(RESPAWNS_AMPLE,) * 3)),
        root=0 if dice.random() < 0.1 else -1,
        needs_all=dice.random() < 0.05,
    )
    if hosts == 1:  # ranks leave where no worker may be started any more
        room = plan.world + plan.spares
        options = options._replace(room=room, respawns_max=dice.choice((1, 2)))
    return plan._replace(
        agents=hosts,
        spares=dice.choice((0, 0, 0, 1, 2)) if hosts > 1 else plan.spares,
        phases=dice.choice((20, 40, 60)),
        strikes=plan.strikes if dice.random() < 0.5 else (),
        timed=(*losses, *(plan.timed if dice.random() < 0.4 else ())),
        shard_sets=plan.shard_sets if dice.random() < 0.2 else 1,
        shrinking=options,
    )


def _beside(plan: FaultPlan) -> tuple[str, ...]:
    return _BESIDE if plan.takes_over else _WITHOUT_TERMS
