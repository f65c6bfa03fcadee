"""Each input halved and doubled, with everything that can be set tuned anew: what the run depends
on, and what is worth buying."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from outlast.errors import UsageError
from outlast.plan.answers import Unit
from outlast.plan.ladders import STRATEGIES, Strategy, matters
from outlast.plan.priced import priced
from outlast.plan.scenario import NEVER_S, Scenario
from outlast.plan.stock import stock
from outlast.plan.strategies import Prediction, possible, predict
from outlast.theory import dollars

TIE = 1e-3  # of the price: closer than that, the simpler strategy is taken
ROUGH = 1.25  # what first order adds outside its regime, where nothing is there to simulate it
TIMES = (0.5, 2.0)
CLOSE = 1e-9


Side = Literal["half", "double"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What can be set without buying anything but spares. Not `strategy`, the other fields are
    those of a scenario."""

    strategy: Strategy
    interval_s: float
    memory_interval_s: float | None
    copies: int
    spares: int


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """An input with another value. `usd`, `goodput`: with the best settings there. `regret_usd`:
    how much more it is with the settings that are best where nothing is turned; infinity where
    those cannot be."""

    value: float
    usd: float
    goodput: float
    settings: Settings
    regret_usd: float


class Lever(msgspec.Struct, frozen=True, kw_only=True):
    """An input that is not free to set. `here_usd`: the price as
    it is. `half` and `double`: None where it cannot be so. `given`:
    it was said, not assumed. `buy`: which of the two is worth money, and saves `saves_usd`."""

    key: str
    said: str
    value: float
    unit: Unit
    given: bool
    here_usd: float
    half: Turn | None
    double: Turn | None
    buy: Side | None = None
    saves_usd: float = 0.0
    adds_goodput: float = 0.0

    @property
    def swing_usd(self) -> float:
        """From the least to the most that the run costs, as it is turned."""
        found = [one.usd for one in (self.half, self.double) if one]
        if math.inf in found:
            return math.inf if min(found) < math.inf or not math.isinf(self.here_usd) else 0.0
        return max(found) - min(found) if len(found) > 1 else self.saves_usd


class _Input(NamedTuple):
    said: str
    unit: Unit
    get: Callable[[Scenario], float]
    put: Callable[[Scenario, float], Scenario]
    helps: Side = "half"


def _seconds(name: str, said: str, helps: Side = "half") -> _Input:
    return _Input(
        said, "s", lambda scenario: getattr(scenario, name),
        lambda scenario, value: replace(scenario, **{name: value}), helps,
    )  # fmt: skip


def _mtbf(scenario: Scenario, value: float) -> Scenario:
    return replace(scenario, failures=replace(scenario.failures, per_gpu_s=1 / value))


def _replica_gpus(scenario: Scenario, value: float) -> Scenario:
    replicas = scenario.gpus / value
    if replicas < 1 or replicas != int(replicas) or scenario.nodes % int(replicas):
        raise UsageError("replicas of so many GPUs do not fill the nodes")
    return replace(scenario, replicas=int(replicas))


# In the order in which they are told where they save as much.
_INPUTS: dict[str, _Input] = {
    "failures": _Input(
        "time between failures of a GPU", "s", lambda one: 1 / one.failures.per_gpu_s, _mtbf,
        "double",
    ),
    "fatal": _Input(
        "share of failures after which only storage is left", "share", lambda one: one.fatal,
        lambda one, value: replace(one, fatal=min(value, 1 - one.transient)),
    ),
    "rack-mtbf": _seconds("rack_mtbf_s", "time between failures of a rack", "double"),
    "repair": _seconds("repair_s", "repair of a node"),
    "detect": _seconds("detect_s", "detection of a failure"),
    "pause": _seconds("pause_s", "pause for live replicas"),
    "restore": _seconds("restore_s", "restore from memory"),
    "restart": _seconds("restart_s", "restart from storage"),
    "cost": _seconds("cost_s", "blocking part of a durable save"),
    "flush": _seconds("flush_s", "flush of a durable save"),
    "drag": _Input(
        "share by which steps are slower while a save is flushed", "share", lambda one: one.drag,
        lambda one, value: replace(one, drag=min(value, 1.0)),
    ),
    "memory-cost": _seconds("memory_cost_s", "blocking part of a version in memory"),
    "window": _seconds("window_s", "time until all copies are there again"),
    "replica-gpus": _Input(
        "number of GPUs of a replica", "GPUs", lambda one: one.gpus / one.replicas, _replica_gpus
    ),
}  # fmt: skip


class Best(NamedTuple):
    """The strategies that can be, each at its best, and which of them to take."""

    scenario: Scenario
    found: list[Prediction]
    taken: Prediction


def best(scenario: Scenario, *, every: bool = True, stocked: bool = False) -> Best:
    """Of what is open in `scenario`, spares included, the best; the simplest strategy within 0.1 %
    of the cheapest. What a formula does not hold for is simulated, and counts a quarter more where
    Numba is not there. Where none ends, the one with most goodput. Without `every`, what cannot be
    the best at any interval is left out. `stocked`: the spares of `scenario` are what would be
    bought, which are none for replicas that are dropped."""
    if scenario.spares is None:
        scenario, stocked = replace(scenario, spares=stock(scenario).best), True
    found: list[Prediction] = []
    for one in sorted(STRATEGIES, key=lambda one: one == "peer-memory"):  # the slow one last
        least = min((_at_most_usd(other) for other in found), default=math.inf)
        if possible(scenario, one) or not (every or _least_usd(scenario, one) <= least * (1 + TIE)):
            continue
        here = replace(scenario, spares=0) if stocked and one == "drop" else scenario
        found.append(priced(here, one, beside_usd=math.inf if every else least))
    least = min(_at_most_usd(one) for one in found)
    if math.isinf(least):
        return Best(scenario, found, max(found, key=lambda one: one.outcome.goodput))
    tied = [one for one in found if _at_most_usd(one) <= least * (1 + TIE)]
    return Best(scenario, found, min(tied, key=lambda one: STRATEGIES.index(one.strategy)))


def _at_most_usd(of: Prediction) -> float:
    return of.usd if of.outcome.in_regime else of.usd * ROUGH


def _least_usd(scenario: Scenario, strategy: Strategy) -> float:
    """What a strategy costs at the least: where saves block nothing and nothing is done again."""
    if strategy != "peer-memory":
        return 0.0
    any_s = max(1.0, scenario.flush_s)
    shown = predict(replace(scenario, interval_s=any_s, memory_interval_s=any_s), strategy)
    awake = 1 - shown.outcome.detect - shown.outcome.recover - shown.outcome.wait
    if awake <= 0:
        return math.inf
    return dollars.cost_usd(
        scenario.gpus, dollars.wall_s(scenario.work_s, min(1.0, awake)), scenario.usd_per_gpu_hour,
        spare_gpus=shown.spares * scenario.gpus_per_node,
    )  # fmt: skip


def settings_of(scenario: Scenario, taken: Prediction) -> Settings:
    return Settings(
        strategy=taken.strategy, interval_s=taken.interval_s,
        memory_interval_s=taken.memory_interval_s, copies=scenario.copies, spares=taken.spares,
    )  # fmt: skip


def fixed(scenario: Scenario, settings: Settings) -> Scenario:
    """The scenario with these settings; intervals give way where they cannot be kept."""
    interval_s = max(scenario.flush_s, settings.interval_s)
    return replace(
        scenario, interval_s=interval_s, memory_interval_s=settings.memory_interval_s,
        copies=settings.copies, spares=settings.spares,
    )  # fmt: skip


def regret_usd(scenario: Scenario, settings: Settings, least_usd: float) -> float:
    """How much more `settings` cost here than `least_usd`; infinity where they cannot be, or the
    run does not end with them alone."""
    if math.isinf(least_usd):
        return 0.0
    if possible(scenario, settings.strategy):
        return math.inf
    usd = priced(fixed(scenario, settings), settings.strategy).usd
    return usd - least_usd if usd > least_usd * (1 + CLOSE) else 0.0


def levers(scenario: Scenario, at: Best) -> list[Lever]:
    """Those that what becomes of the run depends on, with most dollars between half and double
    first. `scenario`: with what may be set left open, where `at` is the best."""
    about = {key for one in STRATEGIES if not possible(scenario, one) for key in matters(one)}
    found = [
        _lever(key, scenario, at)
        for key, one in _INPUTS.items()
        if key in about and 0 < one.get(scenario) < NEVER_S
    ]
    moving = [one for one in found if one.swing_usd > 0]
    return sorted(moving, key=lambda one: -one.swing_usd)


def _lever(key: str, scenario: Scenario, at: Best) -> Lever:
    one, settings, usd = _INPUTS[key], settings_of(at.scenario, at.taken), at.taken.usd
    value = one.get(scenario)
    half, double = (turned(key, scenario, times * value, settings) for times in TIMES)
    lever = Lever(
        key=key, said=one.said, value=value, unit=one.unit, given=key not in scenario.assumed,
        here_usd=usd, half=half, double=double,
    )  # fmt: skip
    turn = half if one.helps == "half" else double
    if turn is None or not turn.usd < usd:
        return lever
    more = turn.goodput - at.taken.outcome.goodput
    return replace(lever, buy=one.helps, saves_usd=usd - turn.usd, adds_goodput=more)


def turned(key: str, scenario: Scenario, value: float, settings: Settings) -> Turn | None:
    """None where the input cannot have this value."""
    try:
        return turn_to(_INPUTS[key].put(scenario, value), value, settings)
    except UsageError:
        return None


def turn_to(there: Scenario, value: float, settings: Settings) -> Turn:
    """`there`: the scenario with another value of something, and the best open again."""
    there, _, taken = best(there, every=False)
    return Turn(
        value=value, usd=taken.usd, goodput=taken.outcome.goodput,
        settings=settings_of(there, taken), regret_usd=regret_usd(there, settings, taken.usd),
    )  # fmt: skip
