"""Faults of a simulated run: kinds, places and times, drawn from the seed."""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

from outlast.config import AUTO
from outlast.controller.member_tables import NodePlacement
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.testing.absent_ranks.shrink_options import ShrinkOptions
from outlast.testing.sentinels.simulated_pace import OddPace, SlowRank

FaultKind = Literal[
    "kill",
    "exit",
    "hang",
    "stall",
    "pause",
    "raise",
    "nonfinite",
    "transport",
    "torn",
    "corrupt",
    "crash",
    "drop",
    "wait",
    "flip",
]

# Points in a worker's life at which faults can strike.
POINTS = (
    "spawned",
    "hello",
    "seated",
    "setup",
    "attempt",
    "slot",
    "voted",
    "answered",
    "applying",
    "applied",
    "tail",
    "closed",
    "reported",
    "decided",
    "settled",
    "ready",
    "connect",
    "meshed",
    "send",
    "receive",
    "joined",
    "opened",
    "finished",
)
_FLIPS = ("audited", "audited", "reduced")  # of the state after a phase, of a reduced gradient
_ONCE_A_START = ("spawned", "hello", "seated", "ready", "connect", "meshed", "joined", "opened")
_ONCE_A_PHASE = ("attempt", "slot", "voted", "answered", "applying", "applied", "tail")
_SPECIAL: dict[str, FaultKind] = {
    "attempt": "raise",
    "slot": "nonfinite",
    "applying": "torn",
    "receive": "corrupt",
}
_FAULT_KINDS: tuple[FaultKind, ...] = (
    "kill",
    "kill",
    "kill",
    "hang",
    "stall",
    "pause",
    "transport",
    "exit",
    "crash",
    "drop",
)


# Points at which a script may wait for something other than a rank.
WAITS = ("setup", "attempt", "answered", "applying", "tail")
WAIT_S = (3.0, 8.0)  # above the hang floor and below the ceiling of simulated runs

_EARLY = ("spawned", "hello", "seated", "setup", "connect", "meshed", "joined", "opened", "attempt")
NO_OWNER = "no agent has a lease, and nobody controls the run"
ATTEMPTS_AMPLE = 1000  # attempts of a plan that must end well


class PlannedFault(NamedTuple):
    """A fault at the `nth` time that any worker (or `seat`) passes `point`.

    A "wait" belongs to the script: every worker that makes phase `nth` waits there, each time.
    """

    point: str
    deed: FaultKind
    nth: int
    seat: int  # -1: any worker


class FaultPlan(NamedTuple):
    """All choices that a seed determines."""

    world: int
    spares: int
    agents: int
    phases: int
    checkpoint_every: int
    strikes: tuple[PlannedFault, ...]
    timed: tuple[tuple[float, str], ...]  # (time, kind): kill, agent, stop, look, ...
    bug_at: int  # this phase raises on one rank, always; -1: none
    attempts_max: int
    duplicates: float
    repeats: bool  # whether workers answer a repeated request again
    rot: bool  # whether the newest checkpoint is damaged when a restart wants it
    policy: SavePolicy
    fails: float  # the share of saves that fail
    shard_sets: int = 1  # rank r holds shards r % shard_sets; the world: no rank has a replica
    skips: float = 0.0  # the share of copies in memory that are skipped
    waits: bool = False  # the script waits, and nothing else happens
    early: bool = False  # only a few kills before the first step
    flips: tuple[PlannedFault, ...] = ()  # of one rank's bits; then votes compare
    windows: int = 1  # in which votes compare the state, in turn
    links_end: bool = False  # ranks notice that two hosts do not reach each other
    takes_over: bool = False  # hosts share a store of terms, and take over from a lost controller
    shrinking: ShrinkOptions | None = None  # the run may go on with fewer ranks
    slow: SlowRank | None = None
    pace: OddPace | None = None  # of a run in which nothing fails, and votes compare

    def hosts(self) -> tuple[str, ...]:
        """Return the names of the hosts."""
        return tuple(f"host{index}" for index in range(self.agents))

    def room(self) -> int:
        """Return how many workers a host may have at once."""
        if self.shrinking and self.shrinking.room:
            return self.shrinking.room
        workers = self.world + self.spares
        return workers if self.agents == 1 else -(-workers // self.agents) + 1

    def placement(self) -> NodePlacement:
        """Return the placement of ranks; a run on one host takes any agent."""
        if self.agents == 1:
            return NodePlacement()
        share = -(-self.world // self.agents)
        return NodePlacement(agents=self.hosts(), ranks_per_node=share)


def draw_plan(seed: int) -> FaultPlan:
    """Draw the plan of a seed. Most faults come after the first step: a death before it ends it."""
    dice = random.Random(f"plan {seed}")
    world = dice.choice((2, 2, 3, 3, 4))
    spares = dice.choice((0, 1, 1, 2))
    phases = dice.randint(4, 12)
    early = dice.random() < 0.1
    strikes = tuple(
        _draw_fault(dice, world, spares, phases, early=early)
        for _ in range(dice.choice((0, 1, 2, 3, 4, 6, 8)))
    )
    kinds = ("kill", "kill", "pair", "all", "crash", "crash", "agent", "drop", "drop", "cut")
    timed = [
        (dice.uniform(0.0 if early else 3.0, 9.0), dice.choice(kinds))
        for _ in range(dice.choice((0, 0, 1, 1, 2, 3, 4)))
    ]
    if dice.random() < 0.06:
        timed.append((dice.uniform(1.0, 8.0), "stop"))
    if dice.random() < 0.1:
        timed.append((dice.uniform(1.0, 8.0), "save"))
    bug = dice.random() < 0.05
    plan = FaultPlan(
        world=world,
        spares=spares,
        agents=dice.choice((1, 1, 2)),
        phases=phases,
        checkpoint_every=dice.choice((0, 2, 3)),
        strikes=strikes,
        timed=tuple(timed),
        bug_at=dice.randint(1, phases) if bug else -1,
        attempts_max=3 if bug or dice.random() < 0.15 else ATTEMPTS_AMPLE,
        duplicates=dice.choice((0.0, 0.02, 0.1)),
        repeats=dice.random() < 0.7,
        rot=dice.random() < 0.3,
        policy=SavePolicy(
            memory=dice.choice((0, AUTO)), disk=dice.choice((3, AUTO)), stop=dice.random() < 0.3
        ),
        fails=dice.choice((0.0, 0.0, 0.0, 0.3)),
    )
    if dice.random() < 0.15:  # drawn last, so that older seeds keep their plans
        checks = [(dice.uniform(1.0, 9.0), "unwell") for _ in range(dice.choice((1, 1, 2, 5)))]
        plan = plan._replace(timed=(*plan.timed, *checks))
    if dice.random() < 0.15:
        plan = plan._replace(timed=(*plan.timed, (dice.uniform(0.0, 4.0), "look")))
    if dice.random() < 0.05:  # more moves than allowed, over several terms
        often = ("unwell",) * 12 + ("crash",) * 3
        when = [(dice.uniform(3.0, 20.0), what) for what in often]
        plan = plan._replace(spares=2, phases=40, timed=(*plan.timed, *when))
    plan = _waiting(dice, plan)
    plan = _killed_early(dice, plan) if dice.random() < 0.08 else plan
    plan = _flipping(dice, plan)
    plan = plan._replace(shard_sets=dice.choice((1, 1, 1, 1, 2, world)))
    if plan.shard_sets > 1 and dice.random() < 0.6:
        plan = plan._replace(checkpoint_every=1, skips=dice.choice((0.0, 0.3, 0.6)))
    if plan.agents > 1 and dice.random() < 0.3:  # a rank a node, and perhaps a spare node
        return plan._replace(agents=world + dice.choice((0, 1)))
    return plan


# Of the controller, its host, the network, and the store of terms.
_CONTROL_FAULTS = (
    *("crash", "crash", "freeze", "freeze", "host", "host", "pair of hosts", "agent", "frost"),
    *("island", "one", "split", "storeless", "blind", "outage"),
)
DRAINS = ("drain", "drain all")  # of nodes, by the scheduler; the next one takes them back
ROLL = "roll"  # all hosts leave the run and come back in turn
NOTICES = ("notice", "notice rank", "notice all")  # the next one may take them back
_OTHER_FAULTS = ("kill", "kill", "pair", "all", "drop", "cut", "save", "unwell")


def draw_takeover_plan(seed: int) -> FaultPlan:
    """Draw the plan of a seed with several hosts, each of which may take the control over."""
    dice = random.Random(f"takeover {seed}")
    world = dice.choice((2, 3, 4, 4))
    hosts = dice.choice((2, 3, 3, 4))
    timed = [
        (dice.uniform(2.5, 16.0), dice.choice(_CONTROL_FAULTS))
        for _ in range(dice.choice((1, 1, 2, 2, 3, 4, 6)))
    ]
    timed += [
        (dice.uniform(2.5, 16.0), dice.choice(_OTHER_FAULTS))
        for _ in range(dice.choice((0, 0, 1, 1, 2, 3)))
    ]
    if dice.random() < 0.3:  # a failure meets the gap
        timed.append((timed[0][0] + dice.uniform(0.0, 2.0), dice.choice(("kill", "agent", "pair"))))
    if dice.random() < 0.06:
        timed.append((dice.uniform(3.0, 14.0), "stop"))
    phases = dice.randint(8, 24)
    strikes = tuple(
        _draw_fault(dice, world, 1, phases, early=False)
        for _ in range(dice.choice((0, 0, 1, 2, 3)))
    )
    plan = FaultPlan(
        world=world,
        spares=dice.choice((0, 1, 1, 2)),
        agents=hosts,
        phases=phases,
        checkpoint_every=dice.choice((0, 1, 2, 3)),
        strikes=strikes,
        timed=tuple(timed),
        bug_at=-1,
        attempts_max=ATTEMPTS_AMPLE,
        duplicates=dice.choice((0.0, 0.02)),
        repeats=dice.random() < 0.7,
        rot=False,
        policy=SavePolicy(memory=dice.choice((0, AUTO)), disk=dice.choice((3, AUTO)), stop=False),
        fails=0.0,
        shard_sets=dice.choice((1, 1, 1, 2, world)),
        takes_over=True,
    )
    if dice.random() < 0.2:  # drawn last, so that older seeds keep their plans
        plan = plan._replace(timed=(*plan.timed, *_draw_drains(dice)))
    if dice.random() < 0.2:
        plan = plan._replace(timed=(*plan.timed, *_draw_notices(dice)))
    return plan


def draw_join_plan(seed: int) -> FaultPlan:
    """Draw the takeover plan of a seed, with one or two hosts that join the run; in a third of
    plans, a host is cut off from all others, which then lose the store."""
    dice = random.Random(f"join {seed}")
    plan = draw_takeover_plan(seed)
    joins = tuple((dice.uniform(1.0, 16.0), "join") for _ in range(dice.choice((1, 1, 2))))
    if dice.random() < 0.33:
        exile = (dice.uniform(2.5, 6.0), "exile")
        plan = plan._replace(timed=(*plan.timed[:2], exile), strikes=(), phases=60)
    return plan._replace(timed=(*plan.timed, *joins))


def draw_drain_plan(seed: int) -> FaultPlan:
    """Draw the plan of a seed in which nothing happens but drains of the scheduler."""
    dice = random.Random(f"drain {seed}")
    plan = draw_takeover_plan(seed)
    return plan._replace(
        strikes=(), timed=_draw_drains(dice), spares=dice.choice((0, 1, 2, 4)), agents=4, phases=24
    )


def draw_notice_plan(seed: int) -> FaultPlan:
    """Draw the plan of a seed in which nothing happens but notices, and what they announce."""
    dice = random.Random(f"notice {seed}")
    plan = draw_takeover_plan(seed)
    timed = _draw_notices(dice)
    return plan._replace(
        strikes=(), timed=timed, spares=dice.choice((0, 0, 1, 2, 4)), agents=4, phases=60
    )


def draw_roll_plan(seed: int) -> FaultPlan:
    """Draw the plan of a seed in which all hosts leave and come back in turn, and nothing else
    happens in most of them; a host more than there are ranks."""
    dice = random.Random(f"roll {seed}")
    plan = draw_takeover_plan(seed)
    others = plan.timed[:1] if dice.random() < 0.3 else ()
    return plan._replace(
        strikes=(),
        timed=((dice.uniform(2.0, 5.0), ROLL), *others),
        spares=dice.choice((1, 2)),
        agents=plan.world + 1,
        shard_sets=1,
        phases=150,
    )


def _draw_notices(dice: random.Random) -> tuple[tuple[float, str], ...]:
    kinds = ("notice", "notice", *NOTICES)
    return tuple(
        (dice.uniform(2.0, 12.0), dice.choice(kinds)) for _ in range(dice.choice((1, 1, 2, 3)))
    )


def _draw_drains(dice: random.Random) -> tuple[tuple[float, str], ...]:
    kinds = ("drain", "drain", "drain", *DRAINS)
    return tuple(
        (dice.uniform(2.5, 12.0), dice.choice(kinds)) for _ in range(dice.choice((1, 1, 2, 3)))
    )


def _killed_early(dice: random.Random, plan: FaultPlan) -> FaultPlan:
    """Return a plan with fewer kills before the first step than failed starts are allowed."""
    kills = tuple(
        PlannedFault(dice.choice(_EARLY), "kill", dice.randint(1, plan.world), -1)
        for _ in range(dice.choice((1, 1, 2)))
    )
    return plan._replace(
        strikes=kills,
        timed=(),
        bug_at=-1,
        attempts_max=3,
        fails=0.0,
        rot=False,
        waits=False,
        early=True,
    )


def _waiting(dice: random.Random, plan: FaultPlan) -> FaultPlan:
    """Make the script wait in some plans.

    It waits at one place of one phase, on one rank or on all of them, beside other faults or alone.
    """
    if dice.random() >= 0.15:
        return plan
    waits = tuple(strike for _ in range(dice.choice((1, 1, 2))) for strike in _wait(dice, plan))
    if dice.random() < 0.5:
        return plan._replace(agents=1, strikes=(*plan.strikes, *waits))
    return plan._replace(
        agents=1,
        strikes=waits,
        timed=(),
        bug_at=-1,
        attempts_max=3,
        fails=0.0,
        rot=False,
        waits=True,
    )


def _wait(dice: random.Random, plan: FaultPlan) -> list[PlannedFault]:
    point = dice.choice(WAITS)
    nth = 1 if point == "setup" else dice.randint(1, plan.phases)
    all_ranks = dice.random() < 0.5
    seats = range(plan.world) if all_ranks else [dice.randrange(plan.world)]
    return [PlannedFault(point, "wait", nth, seat) for seat in seats]


def _flipping(dice: random.Random, plan: FaultPlan) -> FaultPlan:
    """Flip bits of one rank's state or gradients in some plans, where votes compare both."""
    if plan.waits or plan.early or dice.random() >= 0.2:
        return plan
    often = plan.world * plan.phases
    points = dice.choices(_FLIPS, k=dice.choice((1, 1, 2)))
    flips = tuple(PlannedFault(point, "flip", dice.randint(1, often), -1) for point in points)
    return plan._replace(flips=flips, windows=dice.choice((1, 2, 3)))


def _draw_fault(
    dice: random.Random, world: int, spares: int, phases: int, *, early: bool
) -> PlannedFault:
    point = dice.choice(POINTS if early else [name for name in POINTS if name != "setup"])
    deed = dice.choice(_FAULT_KINDS)
    if point in _SPECIAL and dice.random() < 0.5:
        deed = _SPECIAL[point]
    if point in _ONCE_A_PHASE:
        nth = dice.randint(1, world * phases)
    elif point in _ONCE_A_START and not early:
        nth = world + spares + dice.randint(1, world)  # past the start: in a recovery
    else:
        nth = dice.randint(1, 3)
    seat = dice.randrange(world) if dice.random() < 0.2 else -1
    return PlannedFault(point, deed, nth, seat)
