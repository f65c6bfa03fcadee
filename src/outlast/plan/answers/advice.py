"""Contents of advice: bill, items, options, doubts, measures."""

from __future__ import annotations

from typing import Literal

import msgspec

from outlast.plan.answers.extra_costs import ExtraCost
from outlast.plan.answers.input_sensitivity import InputSensitivity
from outlast.plan.model.answer_values import Answer, How, Unit
from outlast.plan.model.ladder_costs import Strategy


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars. `ideal`: the work alone, where nothing fails and nothing is saved; the others are
    what comes on top, and sum with it to `total`."""

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
    said: str


class AdviceItem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to set. `value`: None for words. `saves_usd`: on what is said to be set now, with
    all else as advised; None where nothing is said."""

    what: Literal["strategy", "interval", "memory-interval", "copies", "spares"]
    set_to: str
    value: float | None
    unit: Unit
    why: str
    saves_usd: float | None = None
    how: How


class StrategyOption(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy at its best for the mean rate. `low_usd`, `high_usd`: with the same settings at
    the ends of the rate's 90 % band; None where it has none. `why_not`: it cannot be had, and has
    no figures."""

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
    """Something that is not known; if it is as `unknown` says, the advice costs `regret_usd` more
    than the best advice would, which is `strategy`."""

    unknown: str
    strategy: Strategy
    regret_usd: float
    said: str


class NextMeasure(msgspec.Struct, frozen=True, kw_only=True):
    """An unknown to measure next, and its effect on the advice."""

    what: str
    why: str


class Advice(Answer, frozen=True, kw_only=True):
    """For one scenario. Where no run ends there are no items, and prices are infinite. `sure`: how
    little the advice may be wrong by, besides `doubts`. `extras`: what was asked for besides
    failures."""

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
    extras: tuple[ExtraCost, ...] = ()
