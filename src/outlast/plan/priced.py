"""What becomes of a strategy, to compare its price: by its closed form where that holds, by runs
where it does not."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from outlast.plan.ladders import Strategy, mtbf_s, sources
from outlast.plan.scenario import Scenario
from outlast.plan.strategies import GOODPUT_MIN, Prediction, cost_usd, predict
from outlast.theory import intervals
from outlast.theory.strategies import Outcome

if TYPE_CHECKING:
    from outlast.plan.ensemble import Cause

FIRST, MANY = 20_000, 150_000  # failures that a first look simulates, and one that must be right
FAR = 1.3  # times another price: so far from it a first look is enough
RUNS_MAX = 64
KEPT = 4096


class _Met(NamedTuple):
    """What runs came to: mean wall time, infinite where one does not end; a second of it, failures
    and falls back to storage; and the share of each of `ensemble.CAUSES`."""

    wall_s: float
    failures_per_s: float
    falls_per_s: float
    shares: dict[Cause, float]

    @property
    def between_falls_s(self) -> float:
        """Of a job at full speed that should save as often: a slower one falls more often in the
        same work, and takes longer to redo it. Recoveries and waits add nothing that is lost."""
        running = math.fsum(self.shares[one] for one in ("work", "save", "redo", "slow"))
        speed = self.shares["work"] / (self.shares["work"] + self.shares["slow"])
        return speed**2 * running / self.falls_per_s


def priced(scenario: Scenario, strategy: Strategy, *, beside_usd: float = math.inf) -> Prediction:
    """As `predict`, but simulated where a formula is outside its regime and Numba is there: at the
    interval that suits the falls back to storage that were met, with an error of some per cent. A
    price far above `beside_usd` is known less well.

    The same scenario has the same price, and all of them meet the same failures: what a change of
    the scenario does not touch is not changed by chance. Raises UsageError naming what cannot be.
    """
    said = predict(scenario, strategy)
    if said.outcome.in_regime or _is_hopeless(scenario, strategy) or find_spec("numba") is None:
        return said
    met = _met(scenario, strategy, FIRST)
    if math.isinf(met.wall_s) or _usd(scenario, said, met) > FAR * beside_usd:
        return _simulated(scenario, said, met)
    open_ = scenario.interval_s is None and said.memory_interval_s is None
    if open_ and met.falls_per_s and math.isfinite(met.wall_s):
        best_s = _interval_s(scenario, met.between_falls_s)
        scenario = replace(scenario, interval_s=best_s)
        said = replace(said, interval_s=best_s)
    return _simulated(scenario, said, _met(scenario, strategy, MANY))


def _is_hopeless(scenario: Scenario, strategy: Strategy) -> bool:
    """Return whether no run ends, whatever is saved: the job works for M on the average, and then
    even its shortest recovery L takes M (e^(L/M) - 1), so that goodput is at most e^(-L/M).
    Replicas that are dropped fail no more, and are no such case."""
    if strategy == "drop":
        return False
    shortest_s = min(takes for _, takes in sources(scenario, strategy, memory=True))
    return math.exp(-(scenario.detect_s + shortest_s) / mtbf_s(scenario)) < GOODPUT_MIN


@lru_cache(KEPT)
def _met(scenario: Scenario, strategy: Strategy, failures: int) -> _Met:
    # Only where it is needed: Numba and the compiled kernel take a second to load.
    from outlast.plan.ensemble import CAUSES, FAILURES_MAX, of_rows
    from outlast.plan.parts import Part, run_part
    from outlast.plan.simulated import job_of

    job = job_of(scenario, strategy)._replace(failures_max=FAILURES_MAX)
    first = run_part(Part(job, 0, 0, 1))
    runs = math.ceil(failures / max(1.0, float(first["failures"][0])))
    rows = run_part(Part(job, 0, 0, min(RUNS_MAX, runs)))
    found = of_rows(job, rows)
    wall_s = float(found.wall_s.mean())
    elapsed_s = found.spent_s.sum(axis=0)
    # What was simulated of a run stands for the whole of it.
    whole = found.wall_s / elapsed_s if math.isfinite(wall_s) else 1.0
    spent_s = (found.spent_s * whole).sum(axis=1)
    falls = float(rows["from_storage"].sum() / elapsed_s.sum())
    shares = dict(zip(CAUSES, (spent_s / spent_s.sum()).tolist(), strict=True))
    often = float((rows["failures"] / elapsed_s).mean())
    return _Met(wall_s, often, falls, shares)


def _interval_s(scenario: Scenario, between_falls_s: float) -> float:
    best_s = intervals.optimum_async(
        scenario.cost_s, scenario.flush_s, between_falls_s, drag=scenario.drag
    )
    return min(max(best_s, scenario.flush_s, scenario.step_s), scenario.work_s)


def _usd(scenario: Scenario, said: Prediction, met: _Met) -> float:
    return cost_usd(scenario, met.wall_s, said.spares)


def _simulated(scenario: Scenario, said: Prediction, met: _Met) -> Prediction:
    of = met.shares
    outcome = Outcome(
        goodput=of["work"], save=of["save"], redo=of["redo"], detect=of["detect"],
        recover=of["restart"], wait=of["wait"], degraded=of["slow"], recover_by_rung={},
        falls_back=met.falls_per_s / met.failures_per_s if met.failures_per_s else 0.0,
        failures_per_s=met.failures_per_s, exact=False, in_regime=True,
    )  # fmt: skip
    ends = outcome.goodput >= GOODPUT_MIN
    return replace(
        said, outcome=outcome, wall_s=met.wall_s if ends else math.inf,
        usd=_usd(scenario, said, met) if ends else math.inf, how="simulated", warnings=[],
    )  # fmt: skip
