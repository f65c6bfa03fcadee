"""Best save intervals in boundary cases."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plan.plan_command import Plan

from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.scenario import scenario_of
from outlast.plan.model.strategy_prediction import predict
from outlast.theory import intervals

HOUR_S = 3600.0


def test_against_the_formula(plan: Plan) -> None:
    flags = ("--gpus", "10000", "--gpus-per-node", "8", "--failures", "50kh", "--interval", "10min")
    found = plan("interval", *flags, "--json")
    best = intervals.optimum(5.0, 5 * HOUR_S)
    assert found.named("best interval")["value"] == pytest.approx(best, rel=1e-5)
    assert found.named("best interval")["how"] == "exact"
    low, high = found.named("flat zone from")["value"], found.named("flat zone to")["value"]
    for end in (low, high):
        there = {"gpus": "10000", "failures": "50kh", "interval": f"{end:.6f}s"}
        lost = found.named("goodput at the best")["value"]
        lost -= predict(scenario_of(there), "checkpoint-restart").outcome.goodput
        assert lost == pytest.approx(0.01, abs=1e-4) or end == pytest.approx(120)


@pytest.mark.parametrize(
    ("said", "value", "source"),
    [
        ({"gpus": "1M"}, 120.0, "bounded by a flush"),
        ({"gpus": "16384", "cost": "0", "flush": "0"}, 10.0, "bounded by a step"),
        ({"gpus": "8", "work": "1h"}, 3600.0, "once, at the end of the run"),
    ],
)
def test_a_bound_is_named(plan: Plan, said: dict[str, str], value: float, source: str) -> None:
    found = plan("interval", *(f"--{key}={text}" for key, text in said.items()), "--json")
    best = found.named("best interval")
    assert (best["value"], best["source"]) == (pytest.approx(value), source)
    assert found.named("flat zone from")["value"] <= value * (1 + 1e-6)
    assert found.named("flat zone to")["value"] >= value * (1 - 1e-9)


def test_a_run_without_an_end_has_no_flat_zone(plan: Plan) -> None:
    found = plan("interval", "--gpus", "16384", "--cost", "10d")
    assert found.code == 0
    assert "no interval ends this run: failures come every 3.09 h" in found.out
    assert "flat zone" not in found.out and "<0.001 %" in found.out


@pytest.mark.parametrize("strategy", ["checkpoint-restart", "outlast", "drop", "migrate"])
@pytest.mark.parametrize(
    "said",
    [
        {"transient": "100%", "fatal": "0"},
        {"transient": "0", "fatal": "100%"},
        {"failures": "1y", "spares": "0"},
        {"shape": "0.5", "lemons": "100%", "rack-mtbf": "1y"},
        {"interval": "1s", "flush": "0"},
        {"memory-cost": "0", "cost": "0"},
    ],
    ids=str,
)
def test_odd_scenarios_are_answered(plan: Plan, strategy: str, said: dict[str, str]) -> None:
    flags = (f"--{key}={text}" for key, text in {"gpus": "16384", **said}.items())
    found = plan("interval", "--strategy", strategy, *flags, "--json")
    assert found.code == 0
    best = found.named("goodput at the best")
    assert 0 < best["value"] <= 1
    assert found.named("flat zone from")["value"] <= found.named("flat zone to")["value"]
    if "shape" in said:
        assert best["how"] == "first order" and len(found.json["warnings"]) >= 3
    if "interval" in said:
        assert any("within steps" in one for one in found.json["warnings"])


@pytest.mark.parametrize("strategy", ["checkpoint-restart", "outlast"])
def test_bands_keep_intervals_and_spares(plan: Plan, strategy: Strategy) -> None:
    """More failures than were thought find no more spares than were bought."""
    pytest.importorskip("numba")
    from outlast.plan.simulate.replications import at_factor, simulate
    from outlast.plan.simulate.simulated_job import job_of

    said = {"gpus": "64", "failures": "rsc-1", "work": "3y", "repair": "7d"}
    flags = (f"--{key}={text}" for key, text in said.items())
    found = plan("interval", "--strategy", strategy, *flags, "--json")
    band = found.named("goodput at the best")
    assert band["low"] < band["value"] < band["high"]
    scenario = scenario_of(said)
    often = scenario.failures.at(0.95) / scenario.failures.per_gpu_s
    job = at_factor(job_of(scenario, strategy), often)
    goodput = job.work_s / simulate(job, 300)["wall_s"]
    assert abs(goodput.mean() - band["low"]) < 4 * goodput.std() / 300**0.5


def test_a_value_lies_in_its_band(plan: Plan) -> None:
    """A best interval need not rise or fall with the rate: a flush bounds it, and memory helps."""
    flags = ("--gpus=524288", "--spares=5", "--cost=10ms", "--window=80min")
    found = plan("interval", "--strategy=peer-memory", *flags, "--json")
    best = found.named("best interval")
    assert best["low"] == pytest.approx(120) and best["value"] > 121
    assert all(one["low"] is None or one["low"] <= one["value"] <= one["high"]
               for one in found.json["quantities"])  # fmt: skip


def test_versions_in_memory_that_do_not_pay_at_every_rate(plan: Plan) -> None:
    flags = ("--gpus=512", "--failures=500h", "--failures-seen=3", "--cost=60s", "--copies=4")
    found = plan("interval", "--strategy=outlast", *flags, "--json")
    memory = found.named("best interval in memory")
    assert 0 < memory["low"] <= memory["value"] and memory["high"] is None  # never
    assert any("no versions in memory" in one for one in found.json["warnings"])
    given = plan("interval", "--strategy=outlast", *flags, "--memory-interval=1h", "--json")
    memory = given.named("interval in memory")
    assert memory["how"] == "given" and memory["value"] == pytest.approx(3600, rel=0.3)


def test_impossible_scenarios_are_refused(plan: Plan) -> None:
    found = plan("interval", "--gpus", "8", "--strategy", "peer-memory")
    assert found.code == 2 and "needs at least two nodes" in found.err
    found = plan("interval", "--gpus", "16384", "--interval", "1s")
    assert found.code == 2 and "--flush is longer than --interval" in found.err


def test_a_picture_of_a_run_without_an_end_takes_no_ages(plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    path = tmp_path / "interval.svg"
    assert plan("interval", "--gpus", "16384", "--cost", "10d", "--figure", str(path)).code == 0
    text = path.read_text()
    assert "within one point" in text and "simulated" not in text
