"""Advice for a scenario: the price at the best settings, its sensitivity to inputs, contents."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from outlast.errors import UsageError
from outlast.plan.answers.extra_costs import ExtraCost
from outlast.plan.answers.spare_nodes import cheapest_spares
from outlast.plan.answers.strategy_price import price_strategy
from outlast.plan.model.answer_values import Answer, How, Unit
from outlast.plan.model.ladder_costs import STRATEGIES, Strategy, matters
from outlast.plan.model.scenario import NEVER_S, Scenario
from outlast.plan.model.strategy_prediction import Prediction, predict, reason_impossible
from outlast.theory import costs

TIE = 1e-3  # share of the price: within it, the simpler strategy is chosen
ROUGH = 1.25  # price factor outside the first-order regime, without Numba to simulate it
TIMES = (0.5, 2.0)
CLOSE = 1e-9
Side = Literal["half", "double"]


class TunedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that cost nothing but spares. Fields are those of a scenario, except `strategy`."""

    strategy: Strategy
    interval_s: float
    memory_interval_s: float | None
    copies: int
    spares: int


class InputVariation(msgspec.Struct, frozen=True, kw_only=True):
    """An input with another value.

    `usd`, `goodput`: with the best settings there. `regret_usd`: extra cost with the settings that
    are best at the original value; infinity where those are impossible.
    """

    value: float
    usd: float
    goodput: float
    settings: TunedSettings
    regret_usd: float


class InputSensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """Sensitivity of the price to an input that is not free to set.

    `here_usd`: the price at its value. `half`, `double`: None where impossible. `buy`: the
    variation that is worth money, and saves `saves_usd`.
    """

    key: str
    label: str = msgspec.field(name="said")
    value: float
    unit: Unit
    given: bool
    here_usd: float
    half: InputVariation | None
    double: InputVariation | None
    buy: Side | None = None
    saves_usd: float = 0.0
    adds_goodput: float = 0.0

    @property
    def swing_usd(self) -> float:
        """Difference of the highest and lowest price over the variations."""
        prices = [turn.usd for turn in (self.half, self.double) if turn]
        if math.inf in prices:
            return math.inf if min(prices) < math.inf or not math.isinf(self.here_usd) else 0.0
        return max(prices) - min(prices) if len(prices) > 1 else self.saves_usd


class _Input(NamedTuple):
    label: str
    unit: Unit
    get: Callable[[Scenario], float]
    put: Callable[[Scenario, float], Scenario]
    helps: Side = "half"


def _seconds(name: str, text: str, helps: Side = "half") -> _Input:
    return _Input(
        text,
        "s",
        lambda scenario: getattr(scenario, name),
        lambda scenario, value: replace(scenario, **{name: value}),
        helps,
    )


def _mtbf(scenario: Scenario, value: float) -> Scenario:
    return replace(scenario, failures=replace(scenario.failures, per_gpu_s=1 / value))


def _replica_gpus(scenario: Scenario, value: float) -> Scenario:
    replicas = scenario.gpus / value
    if replicas < 1 or replicas != int(replicas) or scenario.nodes % int(replicas):
        raise UsageError("replicas of so many GPUs do not fill the nodes")
    return replace(scenario, replicas=int(replicas))


# In the order in which inputs of equal savings are listed.
_INPUTS: dict[str, _Input] = {
    "failures": _Input(
        "time between failures of a GPU", "s", lambda case: 1 / case.failures.per_gpu_s, _mtbf,
        "double",
    ),
    "fatal": _Input(
        "share of failures after which only storage is left", "share", lambda case: case.fatal,
        lambda case, value: replace(case, fatal=min(value, 1 - case.transient)),
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
        "share by which steps are slower while a save is flushed", "share", lambda case: case.drag,
        lambda case, value: replace(case, drag=min(value, 1.0)),
    ),
    "memory-cost": _seconds("memory_cost_s", "blocking part of a version in memory"),
    "window": _seconds("window_s", "time until all copies are there again"),
    "replica-gpus": _Input(
        "number of GPUs of a replica", "GPUs", lambda case: case.gpus / case.replicas, _replica_gpus
    ),
}  # fmt: skip


class BestSettings(NamedTuple):
    """The possible strategies, each at its best, and the chosen one."""

    scenario: Scenario
    found: list[Prediction]
    taken: Prediction


def best_settings(scenario: Scenario, *, every: bool = True, stocked: bool = False) -> BestSettings:
    """Return the best values of the settings left open in `scenario`, spares included.

    The simplest strategy within 0.1 % of the cheapest is chosen. Strategies outside a formula's
    regime are simulated, or cost a quarter more without Numba. Where no run ends, the one with most
    goodput. Without `every`, strategies that cannot be best at any interval are left out.
    `stocked`: the spares of `scenario` would be bought (none for dropped replicas).
    """
    if scenario.spares is None:
        scenario = replace(scenario, spares=cheapest_spares(scenario).best)
        stocked = True
    predictions: list[Prediction] = []
    for strategy in sorted(STRATEGIES, key=lambda name: name == "peer-memory"):  # the slow one last
        least = min((_at_most_usd(other) for other in predictions), default=math.inf)
        if reason_impossible(scenario, strategy) or not (
            every or _least_usd(scenario, strategy) <= least * (1 + TIE)
        ):
            continue
        here = replace(scenario, spares=0) if stocked and strategy == "drop" else scenario
        predictions.append(price_strategy(here, strategy, beside_usd=math.inf if every else least))
    least = min(_at_most_usd(choice) for choice in predictions)
    if math.isinf(least):
        return BestSettings(
            scenario, predictions, max(predictions, key=lambda choice: choice.outcome.goodput)
        )
    tied = [choice for choice in predictions if _at_most_usd(choice) <= least * (1 + TIE)]
    return BestSettings(
        scenario, predictions, min(tied, key=lambda choice: STRATEGIES.index(choice.strategy))
    )


def _at_most_usd(of: Prediction) -> float:
    return of.usd if of.outcome.in_regime else of.usd * ROUGH


def _least_usd(scenario: Scenario, strategy: Strategy) -> float:
    """Return a lower bound of a strategy's cost: saves that block nothing, no repeated work."""
    if strategy != "peer-memory":
        return 0.0
    any_s = max(1.0, scenario.flush_s)
    shown = predict(replace(scenario, interval_s=any_s, memory_interval_s=any_s), strategy)
    awake = 1 - shown.outcome.detect - shown.outcome.recover - shown.outcome.wait
    if awake <= 0:
        return math.inf
    return costs.cost_usd(
        scenario.gpus,
        costs.wall_s(scenario.work_s, min(1.0, awake)),
        scenario.usd_per_gpu_hour,
        spare_gpus=shown.spares * scenario.gpus_per_node,
    )


def settings_of(scenario: Scenario, taken: Prediction) -> TunedSettings:
    """Return the settings of a prediction for `scenario`."""
    return TunedSettings(
        strategy=taken.strategy,
        interval_s=taken.interval_s,
        memory_interval_s=taken.memory_interval_s,
        copies=scenario.copies,
        spares=taken.spares,
    )


def with_settings(scenario: Scenario, settings: TunedSettings) -> Scenario:
    """Return the scenario with these settings; impossible intervals are adjusted."""
    return replace(
        scenario,
        interval_s=max(scenario.flush_s, settings.interval_s),
        memory_interval_s=settings.memory_interval_s,
        copies=settings.copies,
        spares=settings.spares,
    )


def regret_usd(scenario: Scenario, settings: TunedSettings, least_usd: float) -> float:
    """Return the cost of `settings` over `least_usd`; infinite where no run ends with them."""
    if math.isinf(least_usd):
        return 0.0
    if reason_impossible(scenario, settings.strategy):
        return math.inf
    usd = price_strategy(with_settings(scenario, settings), settings.strategy).usd
    return usd - least_usd if usd > least_usd * (1 + CLOSE) else 0.0


def input_sensitivities(scenario: Scenario, at: BestSettings) -> list[InputSensitivity]:
    """Return the inputs that affect the run, by dollars between half and double.

    `scenario`: with the free settings left open, `at` being their best.
    """
    possible: list[Strategy] = [
        name for name in STRATEGIES if not reason_impossible(scenario, name)
    ]
    about = {key for strategy in possible for key in matters(strategy)}
    sensitivities = [
        _sensitivity(key, scenario, at)
        for key, entry in _INPUTS.items()
        if key in about and 0 < entry.get(scenario) < NEVER_S
    ]
    moving = [lever for lever in sensitivities if lever.swing_usd > 0]
    return sorted(moving, key=lambda lever: -lever.swing_usd)


def _sensitivity(key: str, scenario: Scenario, at: BestSettings) -> InputSensitivity:
    entry = _INPUTS[key]
    settings = settings_of(at.scenario, at.taken)
    usd = at.taken.usd
    value = entry.get(scenario)
    half, double = (vary_input(key, scenario, times * value, settings) for times in TIMES)
    lever = InputSensitivity(
        key=key,
        label=entry.label,
        value=value,
        unit=entry.unit,
        given=key not in scenario.assumed,
        here_usd=usd,
        half=half,
        double=double,
    )
    turn = half if entry.helps == "half" else double
    if turn is None or not turn.usd < usd:
        return lever
    more = turn.goodput - at.taken.outcome.goodput
    return replace(lever, buy=entry.helps, saves_usd=usd - turn.usd, adds_goodput=more)


def vary_input(
    key: str, scenario: Scenario, value: float, settings: TunedSettings
) -> InputVariation | None:
    """Return the variation of an input to this value; None where it is impossible."""
    try:
        return vary_scenario(_INPUTS[key].put(scenario, value), value, settings)
    except UsageError:
        return None


def vary_scenario(there: Scenario, value: float, settings: TunedSettings) -> InputVariation:
    """Return the variation from a scenario (`there`) with one value changed and open settings."""
    there, _, taken = best_settings(there, every=False)
    return InputVariation(
        value=value,
        usd=taken.usd,
        goodput=taken.outcome.goodput,
        settings=settings_of(there, taken),
        regret_usd=regret_usd(there, settings, taken.usd),
    )


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars by cause.

    `ideal`: the work alone, without failures and saves; the others are added to it, and all sum to
    `total`.
    """

    total: float
    ideal: float
    save: float
    redo: float
    detect: float
    recover: float
    wait: float
    slow: float
    spares: float


class CurrentCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of the settings that the scenario states, and the saving by the advised ones."""

    strategy: Strategy
    interval_s: float
    wall_s: float
    goodput: float
    bill: Bill
    saves_usd: float
    how: How
    text: str = msgspec.field(name="said")


class AdviceItem(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of the advice.

    `value`: None where the setting is a word. `saves_usd`: over the setting in use, with all else
    as advised; None where none is stated.
    """

    what: Literal["strategy", "interval", "memory-interval", "copies", "spares", "policy"]
    set_to: str
    value: float | None
    unit: Unit
    why: str
    saves_usd: float | None = None
    how: How


class StrategyOption(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy at its best for the mean rate.

    `low_usd`, `high_usd`: with the same settings at the ends of the rate's 90 % band; None where it
    has none. `why_not`: reason why it is impossible; it then has no figures.
    """

    strategy: Strategy
    why_not: str = ""
    usd: float | None = None
    low_usd: float | None = None
    high_usd: float | None = None
    more_usd: float | None = None
    wall_s: float | None = None
    goodput: float | None = None
    how: How | None = None


class AdviceDoubt(msgspec.Struct, frozen=True, kw_only=True):
    """An unknown that may change the advice.

    If it is as `unknown` describes, the advice costs `regret_usd` more than the best advice would,
    which is `strategy`.
    """

    unknown: str
    strategy: Strategy
    regret_usd: float
    text: str = msgspec.field(name="said")


class NextMeasure(msgspec.Struct, frozen=True, kw_only=True):
    """An unknown to measure next, and its effect on the advice."""

    what: str
    why: str


class Advice(Answer, frozen=True, kw_only=True):
    """Advice for one scenario.

    Where no run ends there are no items, and prices are infinite. `sure`: bound of the error of the
    advice besides `doubts`. `extras`: requested costs besides failures.
    """

    finishes: bool
    now: CurrentCost | None
    items: list[AdviceItem]
    bill: Bill
    strategies: list[StrategyOption]
    levers: list[InputSensitivity]
    matters_most: str
    doubts: list[AdviceDoubt]
    sure: str
    measure: list[NextMeasure]
    policy_file: str = ""  # TOML, for `outlast run --policy`
    extras: tuple[ExtraCost, ...] = ()
