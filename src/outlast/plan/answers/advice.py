"""Contents of advice: bill, items, options, doubts, measures."""

from __future__ import annotations

from typing import Literal

import msgspec

from outlast.plan.answers.extra_costs import ExtraCost
from outlast.plan.answers.input_sensitivity import InputSensitivity
from outlast.plan.model.answer_values import Answer, How, Unit
from outlast.plan.model.ladder_costs import Strategy


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

    what: Literal["strategy", "interval", "memory-interval", "copies", "spares"]
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
    extras: tuple[ExtraCost, ...] = ()
