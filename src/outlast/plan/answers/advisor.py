"""Advisor: the best open settings, their price, and what that depends on."""

from __future__ import annotations

import math
from functools import partial

from msgspec.structs import asdict, replace

from outlast.plan.answers import advice_text
from outlast.plan.answers.advice import (
    TIE,
    Advice,
    AdviceDoubt,
    AdviceItem,
    BestSettings,
    Bill,
    CurrentCost,
    InputSensitivity,
    InputVariation,
    StrategyOption,
    TunedSettings,
    best_settings,
    input_sensitivities,
    settings_of,
    vary_scenario,
    with_settings,
)
from outlast.plan.answers.extra_costs import ExtraInputs, extra_costs
from outlast.plan.answers.formula_answers import flat_zone
from outlast.plan.answers.policy_advice import ProposedPolicy, describe_policy, propose_policy
from outlast.plan.answers.spare_nodes import cheapest_spares
from outlast.plan.answers.strategy_price import price_strategy
from outlast.plan.model import formula_domain
from outlast.plan.model.answer_values import (
    HIGH,
    LOW,
    Quantity,
    answer,
    at_rate,
    format_quantity,
    quantity_with_band,
)
from outlast.plan.model.ladder_costs import STRATEGIES, Strategy, matters
from outlast.plan.model.rates import EXACT
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import Prediction, predict, reason_impossible

COPIES = (2, 3, 4)
RARER_POWER_MAX = 20
FRAGILE = 0.01  # of the price: cost of a wrong guess from which it is reported


def advise(
    scenario: Scenario, in_use: Strategy | None = None, extras: ExtraInputs | None = None
) -> Advice:
    """Return the advice for a scenario.

    `in_use`: the present strategy; checkpoint-restart where a scenario has an interval and no
    strategy is given. Raises UsageError where `in_use` is impossible.
    """
    open_ = _with_copies(replace(scenario, interval_s=None, memory_interval_s=None))
    at = best_settings(open_)
    settings = settings_of(at.scenario, at.taken)
    finishes = math.isfinite(at.taken.usd)
    policy = propose_policy(at, settings) if finishes else None
    sensitivities = input_sensitivities(open_, at)
    quantities = _quantities(at, settings)
    doubts, rest = _doubts(open_, sensitivities, settings)
    can: list[Strategy] = [
        strategy for strategy in STRATEGIES if not reason_impossible(scenario, strategy)
    ]
    about = {"work", "gpu-hour"}.union(*(matters(name) for name in can))
    plain = answer(
        "What should this run set, and what should it buy?",
        scenario,
        quantities,
        advice_text.advice_warnings(scenario, at),
        about - {"interval", "memory-interval"},
    )
    return Advice(
        **asdict(plain),
        finishes=finishes,
        now=_current_cost(scenario, in_use, at),
        items=[*_items(scenario, in_use, at, settings), _policy(at, policy)] if policy else [],
        bill=make_bill(at.scenario, at.taken),
        strategies=[_option(at, strategy) for strategy in STRATEGIES],
        levers=sensitivities,
        matters_most=advice_text.describe_main_inputs(sensitivities) if finishes else _rarer(open_),
        doubts=doubts if finishes else [],
        sure=advice_text.describe_certainty(doubts, rest, at) if finishes else "",
        measure=advice_text.next_measures(scenario, sensitivities, at),
        policy_file=policy.file if policy else "",
        extras=tuple(extra_costs(at.scenario, at.taken, extras)) if extras else (),
    )


def _rarer(open_: Scenario) -> str:
    """Return the factor by which failures would have to be rarer for the run to end."""
    rate = open_.failures
    for times in (2.0**power for power in range(1, RARER_POWER_MAX)):
        there = replace(open_, failures=replace(rate, per_gpu_s=rate.per_gpu_s / times))
        usd = best_settings(there, every=False).taken.usd
        if math.isfinite(usd):
            return advice_text.describe_rarer(times, usd)
    return ""


def make_bill(scenario: Scenario, of: Prediction) -> Bill:
    """Return the cost of the prediction `of` for `scenario`, by cause. Infinite without an end."""
    working = scenario.gpus / (scenario.gpus + of.spares * scenario.gpus_per_node)
    shares = of.outcome

    def spent(share: float) -> float:
        return share * working * of.usd if share else 0.0

    return Bill(
        total=of.usd,
        ideal=scenario.gpus * scenario.work_s / 3600 * scenario.usd_per_gpu_hour,
        save=spent(shares.save),
        redo=spent(shares.redo),
        detect=spent(shares.detect),
        recover=spent(shares.recover),
        wait=spent(shares.wait),
        slow=spent(shares.degraded),
        spares=(1 - working) * of.usd if of.spares else 0.0,
    )


def _with_copies(scenario: Scenario) -> Scenario:
    """Choose the fewest copies, among divisors of the nodes, that cost no more than others."""
    if "copies" not in scenario.assumed or scenario.copies < 2:
        return scenario
    fitting = [copies for copies in COPIES if scenario.nodes % copies == 0] or [scenario.copies]
    choices = [replace(scenario, copies=copies, spares=0) for copies in fitting]
    usd = [predict(choice, "peer-memory").usd for choice in choices]
    enough = next(i for i, price in enumerate(usd) if price <= min(usd) * (1 + TIE))
    return replace(scenario, copies=choices[enough].copies)


def _quantities(at: BestSettings, settings: TunedSettings) -> list[Quantity]:
    """Return the quantities, with settings fixed over the rate's band.

    The true rate is unknown when settings are chosen.
    """
    here = with_settings(at.scenario, settings)
    predicted = partial(price_strategy, strategy=settings.strategy)
    make = partial(quantity_with_band, how=at.taken.how, source="", scenario=here)
    ideal = make_bill(at.scenario, at.taken).ideal
    return [
        make("finish", "s", function=lambda case: predicted(case).wall_s),
        make("cost", "USD", function=lambda case: predicted(case).usd),
        make(
            "cost of failures and saves", "USD", function=lambda case: predicted(case).usd - ideal
        ),
        make("goodput", "share", function=lambda case: predicted(case).outcome.goodput),
    ]


def _option(at: BestSettings, strategy: Strategy) -> StrategyOption:
    of = next((choice for choice in at.found if choice.strategy == strategy), None)
    if of is None:
        return StrategyOption(strategy=strategy, why_not=reason_impossible(at.scenario, strategy))
    low = high = None
    if at.scenario.failures.weight_failures != EXACT:
        kept = settings_of(at.scenario, of)
        ends = [
            price_strategy(with_settings(at_rate(at.scenario, end), kept), strategy).usd
            for end in (LOW, HIGH)
        ]
        low = min(ends)
        high = max(ends)
    more = of.usd - at.taken.usd if math.isfinite(of.usd) else math.inf
    return StrategyOption(
        strategy=strategy,
        usd=of.usd,
        low_usd=low,
        high_usd=high,
        more_usd=more,
        wall_s=of.wall_s,
        goodput=of.outcome.goodput,
        how=of.how,
    )


def _current_cost(
    scenario: Scenario, in_use: Strategy | None, at: BestSettings
) -> CurrentCost | None:
    if in_use is None and scenario.interval_s is None:
        if scenario.memory_interval_s is None or reason_impossible(scenario, "peer-memory"):
            return None
        in_use = "peer-memory"
    strategy = in_use or "checkpoint-restart"
    spares = scenario.spares if scenario.spares is not None else at.scenario.spares
    here = price_strategy(replace(scenario, spares=spares), strategy)
    spent = make_bill(scenario, here)
    saves = here.usd - at.taken.usd if math.isfinite(here.usd) else math.inf
    if not math.isfinite(at.taken.usd):
        saves = 0.0
    return CurrentCost(
        strategy=strategy,
        interval_s=here.interval_s,
        wall_s=here.wall_s,
        goodput=here.outcome.goodput,
        bill=spent,
        saves_usd=saves,
        how=here.how,
        text=advice_text.describe_current(
            scenario, here, spent, saves, at.taken.usd, named=in_use is not None
        ),
    )


def _items(
    scenario: Scenario, in_use: Strategy | None, at: BestSettings, settings: TunedSettings
) -> list[AdviceItem]:
    how = at.taken.how
    saves = next((row.usd - at.taken.usd for row in at.found if row.strategy == in_use), None)
    items = [
        AdviceItem(
            what="strategy",
            set_to=settings.strategy,
            value=None,
            unit="",
            how=how,
            why=advice_text.describe_strategy(at),
            saves_usd=None if saves is None else max(0.0, saves),
        ),
        _interval(scenario, at, settings),
    ]
    if settings.memory_interval_s is not None:
        items += [
            AdviceItem(
                what="memory-interval",
                set_to=format_quantity(settings.memory_interval_s, "s"),
                value=settings.memory_interval_s,
                unit="s",
                how=how,
                why=advice_text.describe_memory(scenario),
            ),
            AdviceItem(
                what="copies",
                set_to=f"{settings.copies}",
                value=settings.copies,
                unit="nodes",
                how=how,
                why=advice_text.describe_copies(scenario, settings),
            ),
        ]
    return [*items, _spares(scenario, at, settings)]


def _policy(at: BestSettings, policy: ProposedPolicy) -> AdviceItem:
    return AdviceItem(
        what="policy",
        set_to=", ".join(one.rung for one in policy.rungs),
        value=None,
        unit="",
        how=at.taken.how,
        why=describe_policy(policy),
    )


def _interval(scenario: Scenario, at: BestSettings, settings: TunedSettings) -> AdviceItem:
    kept = with_settings(at.scenario, settings)
    best_s = settings.interval_s
    saves = None
    # The closed form does not hold for a strategy that is simulated.
    zone = None if at.taken.how == "simulated" else flat_zone(at.scenario, at.taken)
    if scenario.interval_s is not None:
        memory_s = settings.memory_interval_s and min(
            settings.memory_interval_s, scenario.interval_s
        )
        there = replace(kept, interval_s=scenario.interval_s, memory_interval_s=memory_s)
        saves = price_strategy(there, settings.strategy).usd - at.taken.usd
    return AdviceItem(
        what="interval",
        set_to=format_quantity(best_s, "s"),
        value=best_s,
        unit="s",
        why=advice_text.describe_interval(scenario, settings, zone, saves),
        saves_usd=saves,
        how=at.taken.how,
    )


def _spares(scenario: Scenario, at: BestSettings, settings: TunedSettings) -> AdviceItem:
    """Choose the number of spares; another number may call for another strategy."""
    stock = cheapest_spares(scenario)
    there = best_settings(replace(at.scenario, spares=stock.best), stocked=True)
    if there.taken.strategy == settings.strategy == "drop":
        return AdviceItem(
            what="spares", set_to="0", value=0, unit="nodes", why=advice_text.NO_SPARES, how="exact"
        )
    kept = with_settings(there.scenario, settings_of(there.scenario, there.taken))
    trap = replace(kept, spares=round(stock.in_repair))
    saves = None if scenario.spares is None else max(0.0, at.taken.usd - there.taken.usd)
    trap_usd = price_strategy(trap, there.taken.strategy).usd - there.taken.usd
    return AdviceItem(
        what="spares",
        set_to=f"{stock.best:,}",
        value=stock.best,
        unit="nodes",
        saves_usd=saves,
        why=advice_text.describe_spares(scenario, stock, there.taken, trap_usd, saves, settings),
        how="first order" if stock.racks else formula_domain.of_repairs(scenario),
    )


def _doubts(
    open_: Scenario, levers: list[InputSensitivity], settings: TunedSettings
) -> tuple[list[AdviceDoubt], float]:
    """Return the inputs that would call for other settings, the costliest first.

    Also returns the largest cost of not knowing all other inputs, as a share of the price.
    """
    turns: list[tuple[str, InputVariation]] = []
    if open_.failures.weight_failures != EXACT:
        levers = [lever for lever in levers if lever.key != "failures"]  # covered by the band
        for end in (LOW, HIGH):
            there = at_rate(open_, end)
            times = there.failures.per_gpu_s / open_.failures.per_gpu_s
            turns.append(
                (advice_text.describe_rate(times, end), vary_scenario(there, times, settings))
            )
    for lever in levers:
        sides = (lever.half, lever.double)
        turns += [(advice_text.describe_input(lever, turn), turn) for turn in sides if turn]
    if "replica-gpus" in open_.assumed and open_.replicas > 1:
        turns.append(
            (advice_text.ONE_REPLICA, vary_scenario(replace(open_, replicas=1), 1.0, settings))
        )
    doubts: list[AdviceDoubt] = []
    rest = 0.0
    for unknown, turn in turns:
        if turn.regret_usd < FRAGILE * turn.usd:
            rest = max(rest, turn.regret_usd / turn.usd) if turn.regret_usd else rest
            continue
        doubts.append(
            AdviceDoubt(
                unknown=unknown,
                strategy=turn.settings.strategy,
                regret_usd=turn.regret_usd,
                text=advice_text.describe_doubt(unknown, turn, settings),
            )
        )
    return sorted(doubts, key=lambda doubt: -doubt.regret_usd), rest
