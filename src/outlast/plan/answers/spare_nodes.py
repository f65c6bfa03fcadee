"""Number of spare nodes: waiting, degraded running and dollars, at uncertain rates."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from functools import cached_property

import msgspec
from msgspec.structs import asdict, replace

from outlast.plan.model import formula_domain
from outlast.plan.model.answer_values import (
    Answer,
    How,
    Quantity,
    answer,
    at_rate,
    format_count,
    format_quantity,
    quantity_with_band,
)
from outlast.plan.model.ladder_costs import kinds_of
from outlast.plan.model.rates import EXACT
from outlast.plan.model.scenario import NEVER_S, Scenario
from outlast.plan.model.strategy_prediction import GOODPUT_MIN, predict
from outlast.theory import failures, spares
from outlast.theory import spares as erlang
from outlast.theory.costs import HOUR_S
from outlast.theory.failures import FailureKind

QUANTILES = (0.5, 0.95, 0.999)
SPREADS = 8  # standard deviations above the mean
MEAN = "the mean"
WAITING = "best: waits"
GOING_ON = "best: continues"
UNSURE = "best: uncertain rate"
STRATA = 16  # equally likely rates
ABOUT = frozenset(
    {
        "gpus-per-node",
        "failures",
        "transient",
        "fatal",
        "rack-mtbf",
        "repair",
        "work",
        "replica-gpus",
        "gpu-hour",
    }
)


class SparesRow(msgspec.Struct, frozen=True, kw_only=True):
    """Results with this many spares; `names` label special numbers.

    `short`: share of time with more nodes in repair than spares, where failures go on. `stalled`:
    share of time in which a job waits that needs all its nodes. `up`: mean share of replicas at
    work where a job continues without the others. Dollars: spares and waiting or idle nodes
    together.
    """

    spares: int
    names: list[str]
    short: float
    stalled: float
    stalling_usd: float
    up: float
    dropping_usd: float


class Spares(Answer, frozen=True, kw_only=True):
    """Answer of `outlast plan spares`; `rows` by number of spares, `conclusions`: in words."""

    rows: list[SparesRow]
    conclusions: list[str] = msgspec.field(name="said")


class SpareModel:
    """Effect of any number of spares at one failure rate.

    `size` nodes stand by and are replaced together: 1, or the nodes of a replica.
    """

    def __init__(self, scenario: Scenario, size: int = 1) -> None:
        self._scenario = scenario
        self._size = size
        self._taking = [_grouped(kind, size) for kind in kinds_of(scenario)]
        self._one_by_one = all(kind.devices_killed < 2 for kind in self._taking if kind.rate_per_s)
        self.mean = failures.devices_killed_per_s(self._taking) * scenario.repair_s
        spread = math.sqrt(self.mean * failures.burstiness(self._taking)) if self.mean else 0.0
        reach = max(kind.devices_killed for kind in self._taking)
        self.most = math.ceil(self.mean + SPREADS * (spread + reach))  # more have no effect

    @cached_property
    def in_repair(self) -> spares.InRepair:
        """Distribution of nodes in repair where failures go on."""
        return spares.repair_distribution(self._taking, self._scenario.repair_s)

    @cached_property
    def _stalled_shares(self) -> spares.StalledShares:
        return spares.StalledShares(self._taking, self._scenario.repair_s, self.most)

    @cached_property
    def _up(self) -> list[float]:
        return _whole_replicas_share(
            self.in_repair.points, self.most, 1 - 1 / self._scenario.replicas
        )

    def stalled(self, count: int) -> float:
        """Return the share of time in which a job that needs all its nodes waits."""
        if self._one_by_one:
            return erlang.stalled_share(count, self.mean)  # the same, at once
        return self._stalled_shares.share(min(count, self.most))

    def up(self, count: int) -> float:
        """Return the mean share of the replicas at work."""
        return self._up[min(count, self.most)]

    def price(self, count: int, *, dropping: bool) -> float:
        """Return the price of a unit of work over that of a job without failures and spares.

        Infinite where almost no work gets done.
        """
        works = self.up(count) if dropping else 1 - self.stalled(count)
        return (
            (1 + count * self._size / self._scenario.nodes) / works
            if works >= GOODPUT_MIN
            else math.inf
        )


def spare_nodes(scenario: Scenario) -> Spares:
    """Return quantiles of nodes in repair, the cheapest numbers of spares, and their costs."""
    here = SpareModel(scenario)
    rates = equally_likely(scenario)
    points = {
        "none": 0,
        MEAN: round(here.mean),
        **{f"{100 * share:g} %": here.in_repair.quantile(share) for share in QUANTILES},
        WAITING: cheapest([here]),
        GOING_ON: cheapest([here], dropping=True),
    }
    if len(rates) > 1:
        points[UNSURE] = cheapest([SpareModel(rate) for rate in rates])
    if scenario.spares is not None:
        points["given"] = scenario.spares
    once_usd = plain_usd(scenario, here)
    rows = [_row(here, once_usd, count, names) for count, names in _merged(points)]
    base = answer(
        "How many spares?", scenario, _quantities(scenario), _warnings(scenario, once_usd), ABOUT
    )
    return Spares(**asdict(base), rows=rows, conclusions=_conclusions(scenario, here, rows))


def plain_usd(scenario: Scenario, stocks: SpareModel) -> float:
    """Return the cost of the run if a replacement were always there, without spares."""
    plenty = replace(scenario, spares=stocks.most)
    wall_s = predict(plenty, "outlast").wall_s
    if math.isinf(wall_s):
        return math.inf
    return scenario.gpus * scenario.usd_per_gpu_hour / HOUR_S * wall_s


def cheapest(stocks: Sequence[SpareModel], *, dropping: bool = False) -> int:
    """Return the number of spares with the least mean cost over the rates of `stocks`.

    Up to it, one more saves more than it costs.
    """

    def price(count: int) -> float:
        return math.fsum(stock.price(count, dropping=dropping) for stock in stocks)

    def enough(count: int) -> bool:
        return price(count) <= price(count + 1) < math.inf

    return bisect.bisect_left(range(max(stock.most for stock in stocks)), True, key=enough)


def whole_replicas(scenario: Scenario) -> SpareModel:
    """Return the model in which replicas stand by as units, and repairs idle the rest of one.

    First order: two nodes of one replica count as two replicas.
    """
    return SpareModel(scenario, scenario.nodes // scenario.replicas)


def _row(stocks: SpareModel, once_usd: float, count: int, names: list[str]) -> SparesRow:
    more = [stocks.price(count, dropping=dropping) - 1 for dropping in (False, True)]
    stalling_usd, dropping_usd = (once_usd * extra if extra else 0.0 for extra in more)
    return SparesRow(
        spares=count,
        names=names,
        short=stocks.in_repair.short_share(count),
        stalled=stocks.stalled(count),
        stalling_usd=stalling_usd,
        up=stocks.up(count),
        dropping_usd=dropping_usd,
    )


def _grouped(kind: FailureKind, size: int) -> FailureKind:
    return replace(kind, devices_killed=math.ceil(kind.devices_killed / size))


def _whole_replicas_share(points: Sequence[float], most: int, stays: float) -> list[float]:
    """Return the mean share of complete replicas, by number of spares.

    A missing node leaves a given replica complete with probability `stays`.
    """
    shares = [1.0] * (most + 1)
    padded = [*points, *[0.0] * (most + 2 - len(points))]
    beyond = math.fsum(
        point * stays ** (count - most) for count, point in enumerate(padded) if count > most
    )
    enough = math.fsum(padded[: most + 1])
    for count in range(most, -1, -1):
        shares[count] = min(1.0, enough + beyond)
        enough -= padded[count]
        beyond = stays * (padded[count] + beyond)
    return shares


def equally_likely(scenario: Scenario) -> list[Scenario]:
    """Return the scenario at each of several equally likely failure rates."""
    if scenario.failures.weight_failures == EXACT:
        return [scenario]
    return [at_rate(scenario, (stratum + 0.5) / STRATA) for stratum in range(STRATA)]


def _merged(points: dict[str, int]) -> list[tuple[int, list[str]]]:
    """Merge equal numbers with all their names, in ascending order."""
    return [
        (count, [name for name, other in points.items() if other == count])
        for count in sorted(set(points.values()))
    ]


def _quantities(scenario: Scenario) -> list[Quantity]:
    stocks: dict[float, SpareModel] = {}

    def at(scenario: Scenario) -> SpareModel:
        return stocks.setdefault(scenario.failures.per_gpu_s, SpareModel(scenario))

    racks = scenario.rack_mtbf_s < NEVER_S

    def how(scenario: Scenario) -> How:
        return "first order" if racks else formula_domain.of_repairs(scenario)

    law = "racks return together" if racks else "Poisson, any law of repairs"
    waits = "racks return one by one" if racks else "Erlang's B of s + 1"
    return [
        quantity_with_band(
            "nodes in repair, mean",
            "nodes",
            formula_domain.of_repairs,
            "Little 1961",
            scenario,
            lambda case: at(case).mean,
        ),
        *(
            quantity_with_band(
                f"enough {100 * share:g} % of the time",
                "nodes",
                how,
                law,
                scenario,
                lambda case, share=share: at(case).in_repair.quantile(share),
            )
            for share in QUANTILES
        ),
        quantity_with_band(
            "cheapest for a job that waits",
            "nodes",
            how,
            waits,
            scenario,
            lambda case: cheapest([at(case)]),
        ),
        quantity_with_band(
            "cheapest for a job that continues",
            "nodes",
            "first order",
            "each missing node idles its replica",
            scenario,
            lambda case: cheapest([at(case)], dropping=True),
        ),
    ]


def _row_named(rows: Sequence[SparesRow], name: str) -> SparesRow:
    return next(row for row in rows if name in row.names)


NO_END = "no run ends here with any spares: failures come faster than it makes progress"


def _warnings(scenario: Scenario, once_usd: float) -> list[str]:
    unsettled = scenario.work_s < formula_domain.REPAIRS_MIN * scenario.repair_s
    has_racks = scenario.rack_mtbf_s < NEVER_S
    texts = {
        "nodes are assumed not to age": scenario.shape != 1,
        "lemons are treated as ordinary nodes with the mean rate": scenario.lemons > 0,
        "figures hold for a long run: this one ends before the steady state of repairs": unsettled,
        "a rack's nodes are assumed to return together, or one by one where a job waits": has_racks,
        NO_END: math.isinf(once_usd),
    }
    return [text for text, here in texts.items() if here]


def _conclusions(scenario: Scenario, stocks: SpareModel, rows: Sequence[SparesRow]) -> list[str]:
    mean = stocks.mean
    average, best = (_row_named(rows, name) for name in (MEAN, WAITING))
    sentences: list[str] = []
    if average.spares:
        saved = average.stalling_usd - best.stalling_usd
        waited, waits = (format_quantity(row.stalled, "share") for row in (average, best))
        sentences = [
            f"The mean is too small: with {format_count(average.spares, 'spare')}, as many as"
            f" are in repair on average ({format_quantity(mean, 'nodes')}), more are in repair"
            f" {format_quantity(average.short, 'share')} of the time, where failures continue.",
            f"A job that needs all its nodes then waits {waited} of the time; with"
            f" {format_count(best.spares, 'spare')} it waits {waits}"
            + (f", a net saving of {format_quantity(saved, 'USD')}." if saved > 0 else "."),
        ]
    unsure = [row for row in rows if UNSURE in row.names and row is not best]
    if unsure:
        sentences.append(
            f"The rate is uncertain: on average over its distribution,"
            f" {format_count(unsure[0].spares, 'spare')} would be cheapest for a job that waits."
        )
    size = scenario.nodes // scenario.replicas
    if scenario.replicas > 1 and size > 1:
        groups = whole_replicas(scenario).in_repair.quantile(QUANTILES[-1])
        sentences.append(
            f"As whole spare replicas of {size:,} nodes, it takes"
            f" {format_count(groups, 'replica')} for {100 * QUANTILES[-1]:g} % of the time:"
            f" {format_count(groups * size, 'node')}."
        )
    return sentences


class CheapestSpares(msgspec.Struct, frozen=True, kw_only=True):
    """The cheapest number of spares.

    `best`: least mean cost over the possible rates; `known`: the same if the rate were known to be
    its mean. `in_repair`: mean number of nodes at that rate. `racks`: whole racks fail, too.
    """

    best: int
    known: int
    in_repair: float
    racks: bool


def cheapest_spares(scenario: Scenario) -> CheapestSpares:
    """Return the cheapest spares for a job that waits for repairs without a spare.

    No more than there are nodes. Exact at each of the equally likely rates.
    """
    here = SpareModel(scenario)
    nodes = scenario.nodes
    best = cheapest([SpareModel(case) for case in equally_likely(scenario)])
    return CheapestSpares(
        best=min(best, nodes),
        known=min(cheapest([here]), nodes),
        in_repair=here.mean,
        racks=scenario.rack_mtbf_s < NEVER_S,
    )
