"""Recovery ladder of each strategy, and the failure rates of a scenario."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from msgspec.structs import replace

from outlast.plan.model.scenario import NEVER_S, Scenario
from outlast.theory import failures, replicas, spares
from outlast.theory.strategies import Loses, Rung

Strategy = Literal["checkpoint-restart", "peer-memory", "migrate", "drop", "outlast"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
_ALWAYS = frozenset(
    {
        "gpus-per-node",
        "failures",
        "transient",
        "fatal",
        "rack-mtbf",
        "repair",
        "work",
        "interval",
        "cost",
        "flush",
        "drag",
        "detect",
        "restart",
        "overhead",
    }
)
_LIVE = frozenset({"replica-gpus", "pause", "step", "window"})
_MEMORY = frozenset({"memory-interval", "memory-cost", "copies", "restore", "window"})
_MATTERS: dict[Strategy, frozenset[str]] = {
    "checkpoint-restart": _ALWAYS | {"spares"},
    "peer-memory": _ALWAYS | {"spares"} | _MEMORY,
    "migrate": _ALWAYS | {"spares"} | _LIVE,
    "drop": _ALWAYS | {"spares"} | _LIVE,
    "outlast": _ALWAYS | {"spares"} | _LIVE | _MEMORY,
}
ENOUGH = 0.999  # of time, repairs take no more than the spares there are


def matters(strategy: Strategy) -> frozenset[str]:
    """Return the keys of a scenario that affect the outcome of a run."""
    return _MATTERS[strategy]


def node_rate_per_s(scenario: Scenario) -> float:
    """Return failures of one node a second that leave more than storage, on average.

    Lemons and other nodes together.
    """
    return scenario.failures.per_gpu_s * scenario.gpus_per_node * (1 - scenario.fatal)


def pace_of(scenario: Scenario, strategy: Strategy) -> float:
    """Return the seconds that a second of work takes with this strategy, without failures."""
    return 1 / (1 - dict(scenario.overhead).get(strategy, 0.0))


def stays_share(scenario: Scenario) -> float:
    """Return the share of `node_rate_per_s` after which the node itself continues.

    `transient` is a share of all failures, the fatal ones included.
    """
    beside = 1 - scenario.fatal
    return min(1.0, scenario.transient / beside) if beside > 0 else 0.0


def fatal_rate_per_s(scenario: Scenario) -> float:
    """Return failures a second after which only storage is left."""
    return scenario.failures.per_gpu_s * scenario.gpus * scenario.fatal


def mtbf_s(scenario: Scenario) -> float:
    """Return the mean seconds between failures of the whole job, of every kind."""
    return 1 / failures.rate_per_s(kinds_of(scenario))


def spares_of(scenario: Scenario, strategy: Strategy) -> int:
    """Return the number of spare nodes.

    A strategy that continues without a replica has only those that the scenario states.
    """
    if scenario.spares is not None:
        return scenario.spares
    if strategy == "drop":
        return 0
    if scenario.rack_mtbf_s == NEVER_S:
        mean = spares.in_repair(taking_rate_per_s(scenario), scenario.repair_s)
        return int(spares.quantile(ENOUGH, mean))
    return spares.repair_distribution(kinds_of(scenario), scenario.repair_s).quantile(ENOUGH)


def taking_rate_per_s(scenario: Scenario) -> float:
    """Return failures a second of single nodes that take the node."""
    return node_rate_per_s(scenario) * scenario.nodes * (1 - stays_share(scenario))


def kinds_of(scenario: Scenario) -> list[failures.FailureKind]:
    """Return the kinds of failures; `devices` are nodes."""
    rate = node_rate_per_s(scenario)
    taken = 1 - stays_share(scenario)
    racks = math.ceil(scenario.nodes / scenario.rack_nodes)
    return [
        failures.FailureKind(name="node", rate_per_unit_s=rate * taken, units=scenario.nodes),
        failures.FailureKind(
            name="transient",
            rate_per_unit_s=rate * (1 - taken),
            units=scenario.nodes,
            devices_killed=0,
        ),
        failures.FailureKind(
            name="fatal", rate_per_unit_s=fatal_rate_per_s(scenario), devices_killed=0
        ),
        failures.FailureKind(
            name="rack",
            rate_per_unit_s=1 / scenario.rack_mtbf_s,
            units=racks,
            devices_killed=min(scenario.rack_nodes, scenario.nodes),
        ),
    ]


def sources(
    scenario: Scenario, strategy: Strategy, *, memory: bool
) -> Sequence[tuple[Loses, float]]:
    """Return the sources of recovery, cheapest first, with the time that each takes.

    `memory`: there are versions in memory.
    """
    live: tuple[Loses, float] = ("nothing", scenario.pause_s + scenario.step_s / 2)
    from_memory: tuple[Loses, float] = ("snapshot", scenario.restore_s)
    storage: tuple[Loses, float] = ("checkpoint", scenario.restart_s)
    has_live = strategy in ("migrate", "drop", "outlast") and scenario.replicas > 1
    return [*[live] * has_live, *[from_memory] * memory, storage]


def rungs(scenario: Scenario, strategy: Strategy, *, memory: bool) -> list[Rung]:
    """Return the share of failures for each source; those that take a node separately."""
    every = 1 / mtbf_s(scenario)
    rate = node_rate_per_s(scenario)
    stays = stays_share(scenario)
    racks = next(kind.rate_per_s for kind in kinds_of(scenario) if kind.name == "rack")
    remaining: float = min(1.0, rate * scenario.nodes / every)  # of rounding
    ladder: list[Rung] = []
    holders = 0  # nodes that have to be lost for the sources so far
    for at, (loses, recover_s) in enumerate(sources(scenario, strategy, memory=memory)):
        lost = 1.0
        window_s = scenario.detect_s + recover_s + scenario.window_s
        if loses == "checkpoint":
            lost = 0.0
        elif loses == "nothing":
            holders = scenario.replicas
            lost = _lost_share(scenario, holders, window_s)
        elif (every_one := _holders(scenario, holders)) > holders:
            before = _lost_share(scenario, holders, window_s) if holders else 1.0
            lost = min(1.0, _lost_share(scenario, every_one, window_s) / before) if before else 0.0
        here = remaining * (1 - lost)
        remaining -= here
        taking = min(1.0, here * (1 - stays) + (racks / every if at == 0 else 0.0))
        staying = here * stays
        if loses == "checkpoint":
            staying += fatal_rate_per_s(scenario) / every
        ladder += [
            Rung(name=f"{loses}, node lost", share=taking, recover_s=recover_s, loses=loses),
            Rung(
                name=f"{loses}, node kept",
                share=staying,
                recover_s=recover_s,
                loses=loses,
                takes_node=False,
            ),
        ]
    short = 1 - math.fsum(rung.share for rung in ladder)
    ladder[-1] = replace(ladder[-1], share=max(0.0, ladder[-1].share + short))  # of rounding
    return ladder


def _holders(scenario: Scenario, live: int) -> int:
    """Return the number of nodes that hold a part of the state, live or in memory, each once.

    `live`: number of live holders, 0 for none. Both are placed as many nodes apart as possible, so
    that some hold both.
    """
    if not live:
        return scenario.copies
    period = math.lcm(scenario.nodes // live, scenario.nodes // scenario.copies)
    return live + scenario.copies - scenario.nodes // period


def _lost_share(scenario: Scenario, members: int, window_s: float) -> float:
    """Return the share of node failures that take the last of `members` holding a part."""
    rate = node_rate_per_s(scenario)
    if members < 2 or not rate:
        return float(members == 1)
    lost = replicas.loss_rate_per_s(scenario.nodes, members, rate, window_s)
    return min(1.0, lost / (rate * scenario.nodes))
