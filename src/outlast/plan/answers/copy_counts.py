"""Copies of state in memory: losses of the last copy, memory and network use, scaling limits."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
from msgspec.structs import asdict, replace

from outlast.errors import UsageError
from outlast.plan.model import formula_domain
from outlast.plan.model.answer_values import (
    HIGH,
    LOW,
    Answer,
    How,
    Quantity,
    answer,
    at_rate,
    quantity_with_band,
)
from outlast.plan.model.ladder_costs import (
    fatal_rate_per_s,
    kinds_of,
    matters,
    node_rate_per_s,
    spares_of,
)
from outlast.plan.model.rates import EXACT
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import Prediction, predict
from outlast.theory import replicas

COPIES_MAX = 4
VERSIONS = 2  # a new version is received before the old one is released
HALF = 0.5
GROWS = "state grows as sqrt(GPUs), Chinchilla"


class CopiesRow(msgspec.Struct, frozen=True, kw_only=True):
    """Figures for a number of nodes that hold each part, the rank's own among them.

    `lost_every_s`: between losses of the last copy of a part; `losses` of a run, with the 90 % band
    from the failure rate. `epoch_losses`: by Epoch AI's formula. `goodput`: of peer-memory; with
    one copy, of checkpoint-restart.
    """

    copies: int
    lost_every_s: float
    losses: float
    losses_low: float | None
    losses_high: float | None
    epoch_losses: float
    memory_per_gpu_bytes: float
    network_per_gpu_bytes_per_s: float
    goodput: float


class Replicas(Answer, frozen=True, kw_only=True):
    """Answer of `outlast plan replicas`; `rows` by number of copies."""

    rows: list[CopiesRow]


def memory_copies(scenario: Scenario) -> Replicas:
    """Return the figures for 1 to 4 copies, as far as there are nodes, and scaling limits.

    A limit is the size at which saves to storage or to memory leave half of the time.
    """
    scenario = replace(scenario, spares=spares_of(scenario, "peer-memory"))  # at any rate
    most = min(COPIES_MAX, scenario.nodes)
    rows = [_row(scenario, copies) for copies in range(1, most + 1)]
    quantities = [
        Quantity(
            name="a part lacks a copy for",
            value=exposed_s(scenario),
            unit="s",
            how="given",
            source="detect + restore + window",
        ),
        Quantity(
            name="state a GPU",
            value=scenario.state_bytes / scenario.gpus,
            unit="bytes",
            how="given",
            source="without copies",
        ),
        quantity_with_band(
            "failures beyond any copy",
            "times",
            _how,
            "fatal ones, per run",
            scenario,
            lambda case: _of_a_run(case, fatal_rate_per_s(case), scenario.copies),
        ),
        quantity_with_band(
            f"losses of all of {scenario.copies}",
            "times",
            _how_losses,
            "docs/theory.md, of a run",
            scenario,
            lambda case: losses(case, scenario.copies),
        ),
        *(limits := _limits(scenario)),
    ]
    warnings = _warnings(scenario, rows)
    if any(math.isinf(limit.value) for limit in limits):
        warnings.append(
            "where neither saves nor the counted parts of restarts take time, the number of GPUs"
            " has no limit"
        )
    about = matters("peer-memory") | {"state", "step"}
    base = answer("How many copies in memory?", scenario, quantities, warnings, about)
    return Replicas(**asdict(base), rows=rows)


def exposed_s(scenario: Scenario) -> float:
    """Return the seconds from a node's failure until its parts have all their copies again."""
    return scenario.detect_s + scenario.restore_s + scenario.window_s


def losses(scenario: Scenario, copies: int) -> float:
    """Return the mean number of losses of the last copy of a part during a run."""
    return _of_a_run(scenario, loss_rate_per_s(scenario, copies), copies)


def _of_a_run(scenario: Scenario, rate_per_s: float, copies: int) -> float:
    """Return the count of events in a run, 0 at a rate of 0 even if the run never ends."""
    return rate_per_s * _predicted(scenario, copies).wall_s if rate_per_s else 0.0


def memory_per_gpu_bytes(scenario: Scenario, copies: int) -> float:
    """Return the memory for so many copies of two versions each."""
    return replicas.memory_per_gpu_bytes(
        scenario.state_bytes, scenario.gpus, copies, versions=VERSIONS
    )


def loss_rate_per_s(scenario: Scenario, copies: int) -> float:
    """Return the rate at which the last copy of some part is lost."""
    return replicas.loss_rate_per_s(
        scenario.nodes, copies, node_rate_per_s(scenario), exposed_s(scenario)
    )


def _predicted(scenario: Scenario, copies: int) -> Prediction:
    strategy = "peer-memory" if copies > 1 else "checkpoint-restart"
    return predict(replace(scenario, copies=copies), strategy)


def _how(scenario: Scenario) -> How:
    """Return how the duration of the run, and so its counts, are known."""
    return _predicted(scenario, scenario.copies).how


def _how_losses(scenario: Scenario) -> How:
    domain = formula_domain.of_losses(scenario, exposed_s(scenario))
    return domain if domain != "exact" else _how(scenario)


def _row(scenario: Scenario, copies: int) -> CopiesRow:
    low = high = None
    if scenario.failures.weight_failures != EXACT:
        low, high = (losses(at_rate(scenario, end), copies) for end in (LOW, HIGH))
    rate = loss_rate_per_s(scenario, copies)
    at = _predicted(scenario, copies)
    state = scenario.state_bytes
    gpus = scenario.gpus
    network = 0.0
    if at.memory_interval_s is not None:
        network = replicas.network_per_gpu_bytes_per_s(
            state, gpus, copies - 1, at.memory_interval_s
        )
    return CopiesRow(
        copies=copies,
        lost_every_s=1 / rate if rate else math.inf,
        losses=losses(scenario, copies),
        losses_low=low,
        losses_high=high,
        epoch_losses=replicas.epoch_losses(
            scenario.work_s,
            scenario.step_s,
            gpus,
            copies,
            scenario.failures.per_gpu_s * scenario.gpus_per_node,
        ),
        memory_per_gpu_bytes=memory_per_gpu_bytes(scenario, copies),
        network_per_gpu_bytes_per_s=network,
        goodput=at.outcome.goodput,
    )


def _limits(scenario: Scenario) -> list[Quantity]:
    """Return the number of GPUs at which each kind of checkpoint leaves half of the time.

    The model is as large as these GPUs train best in the same time.
    """

    def stored(gpus: float) -> float:
        return scenario.cost_s * math.sqrt(gpus / scenario.gpus)

    def sent(gpus: float) -> float:
        return scenario.memory_cost_s * math.sqrt(scenario.gpus / gpus)

    kinds: tuple[tuple[str, Callable[[float], float], float], ...] = (
        ("storage", stored, scenario.detect_s + scenario.restart_s),
        ("memory", sent, scenario.detect_s + scenario.restore_s),
    )
    limits: list[Quantity] = []
    for kind, cost_s, back_s in kinds:
        for name, restart_s in (("", back_s), (", R not counted", 0.0)):
            limits.append(
                quantity_with_band(
                    f"half goodput, {kind}{name}",
                    "GPUs",
                    "first order",
                    GROWS,
                    scenario,
                    lambda case, cost_s=cost_s, restart_s=restart_s: _half(case, cost_s, restart_s),
                )
            )
    return limits


def _half(scenario: Scenario, cost_s: Callable[[float], float], restart_s: float) -> float:
    try:
        return replicas.gpus_at(HALF, 1 / scenario.failures.per_gpu_s, cost_s, restart_s=restart_s)
    except UsageError:  # not even one
        return 0.0


def _warnings(scenario: Scenario, rows: list[CopiesRow]) -> list[str]:
    racks = any(kind.name == "rack" and kind.rate_per_s for kind in kinds_of(scenario))
    texts = {
        "there is one node: no other holds a copy": scenario.nodes == 1,
        "no two copies of a part are assumed to be in one rack": racks,
        "no end with some numbers of copies: failures come faster than the run makes progress": any(
            math.isinf(row.losses) for row in rows
        ),
        "nodes are assumed not to age": scenario.shape != 1,
        "lemons are treated as ordinary nodes with the mean rate": scenario.lemons > 0,
    }
    return [text for text, here in texts.items() if here]
