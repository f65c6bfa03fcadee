"""Domain of the closed forms against the simulator, over the whole field space."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("numba", reason="the simulator is compiled: pip install 'outlast[plan]'")

from tests.plan.plan_command import Plan
from tests.plan.random_scenarios import Drawn, can_be_simulated, draw, simulate

from outlast.plan.model.formula_domain import EXACT_TO
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.scenario import scenario_of
from outlast.plan.model.strategy_prediction import predict

ERRORS = 5.0  # standard errors: chance exceeds them once in two million scenarios
FAST, SOAK = 20, 2000


def _differs(of: Drawn, failures: int = 200_000) -> float:
    """Return by which share of the wall time runs differ from theory beyond chance."""
    runs, predicted_s = simulate(of, failures), of.predicted.wall_s
    return max(0.0, abs(runs.wall_s - predicted_s) - ERRORS * runs.error_s) / predicted_s


def _hold(first: int, scenarios: int, failures: int) -> None:
    """Hold so many scenarios whose prediction is called exact to the simulator."""
    exact = (
        (seed, one)
        for seed in itertools.count(first)
        if (one := draw(seed)) and one.predicted.how == "exact" and can_be_simulated(one)
    )
    wrong = [
        f"seed {seed}, {one.strategy}: {differs:.2%} {one.fields}"
        for seed, one in itertools.islice(exact, scenarios)
        if (differs := _differs(one, failures)) > EXACT_TO
    ]
    assert wrong == []


def test_exact_answers_agree_with_simulated_runs() -> None:
    _hold(0, FAST, 50_000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_exact_answers_agree_with_thousands_of_runs() -> None:
    _hold(1_000_000, SOAK, 200_000)


@pytest.mark.parametrize("seed", [1_011_224, 1_024_479])
def test_shares_that_are_rounded_above_one_are_no_error_of_the_user(seed: int) -> None:
    assert draw(seed).predicted.wall_s > 0


FEW = {"gpus": "64", "gpus-per-node": "8", "spares": "8", "repair": "1h", "work": "20d"}


@pytest.mark.parametrize("minutes", [10, 5, 3])
@pytest.mark.parametrize("strategy", ["outlast", "peer-memory", "migrate"])
def test_few_replicas_and_failures_that_come_fast(strategy: Strategy, minutes: int) -> None:
    """Copies that lie on the nodes of the replicas never help, and failures follow each other
    before the state is protected again: 5 to 207 % off, and called exact."""
    fields = FEW | {"failures": f"{64 * minutes}min", "replica-gpus": "32"}
    scenario = scenario_of(fields)
    of = Drawn(fields, scenario, strategy, predict(scenario, strategy))
    if of.predicted.how == "exact":
        assert _differs(of) <= EXACT_TO
    else:
        assert of.predicted.warnings


def test_copies_on_the_nodes_of_the_replicas_are_no_source() -> None:
    """With two replicas and two copies the same two nodes hold both."""
    shared = scenario_of(FEW | {"failures": "640h", "replica-gpus": "32", "copies": "2"})
    apart = scenario_of(FEW | {"failures": "640h", "replica-gpus": "32", "copies": "4"})
    for scenario, helped in ((shared, False), (apart, True)):
        fixed = scenario_of(
            FEW | {"failures": "640h", "replica-gpus": "32", "copies": f"{scenario.copies}",
                   "interval": "1h", "memory-interval": "1min"}
        )  # fmt: skip
        rungs = predict(fixed, "outlast").outcome.recover_by_rung
        assert (rungs["snapshot, node lost"] > 0) is helped


def test_answers_are_first_order_where_the_formula_omits_effects(plan: Plan) -> None:
    """Also where only an end of the failure rate's band is outside of the formula's domain."""
    said = {"lemons": ("--lemons", "5%"), "ages": ("--shape", "0.7"), "short": ("--work", "2h")}
    for flags in said.values():
        for question in ("interval", "ettr", "spares", "replicas"):
            found = plan(question, "--gpus", "16384", *flags, "--json").json["quantities"]
            exact = [one["name"] for one in found if one["how"] == "exact"]
            rate_only = {"between failures of the job"} if flags[0] == "--work" else set[str]()
            assert set(exact) <= rate_only, (question, flags)
