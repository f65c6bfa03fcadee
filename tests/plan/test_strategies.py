"""What theory predicts of a strategy on a scenario, and what is simulated of the same."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("numba", reason="the simulator is compiled: pip install 'outlast[plan]'")

from outlast.errors import UsageError
from outlast.plan.ladders import STRATEGIES, Strategy, mtbf_s
from outlast.plan.scenario import scenario_of
from outlast.plan.simulate import simulate
from outlast.plan.simulated import job_of
from outlast.plan.strategies import predict

Z_MAX, REPLICATIONS = 4.0, 200
SCENARIOS = (
    {"gpus": "16384"},
    {"gpus": "131072", "work": "20d", "memory-interval": "1min", "interval": "20min"},
    {"gpus": "1024", "failures": "5kh", "work": "60d", "transient": "0%", "fatal": "10%"},
)


@pytest.mark.parametrize("said", SCENARIOS, ids=lambda said: said["gpus"])
@pytest.mark.parametrize("strategy", [one for one in STRATEGIES if one != "drop"])
def test_the_tiers_agree(strategy: Strategy, said: dict[str, str]) -> None:
    scenario = scenario_of(said)
    predicted = predict(scenario, strategy)
    wall_s = simulate(job_of(scenario, strategy), REPLICATIONS, seed=3)["wall_s"]
    error_s = wall_s.std() / math.sqrt(REPLICATIONS)
    assert predicted.how == "exact"
    assert abs(wall_s.mean() - predicted.wall_s) < Z_MAX * error_s


def test_steps_that_a_flush_slows_down() -> None:
    """By half for 10 minutes: 5 of them are lost, and nothing is flushed for longer."""
    said = {"gpus": "16384", "interval": "30min", "flush": "10min", "drag": "50%"}
    scenario = scenario_of(said)
    predicted = predict(scenario, "checkpoint-restart")
    wall_s = simulate(job_of(scenario, "checkpoint-restart"), 1000, seed=3)["wall_s"]
    error_s = wall_s.std() / math.sqrt(1000)
    assert predicted.how == "exact"
    assert abs(wall_s.mean() - predicted.wall_s) < Z_MAX * error_s


@pytest.mark.parametrize(("strategy", "spares"), [("peer-memory", "300"), ("migrate", "6")])
def test_racks_leave_what_other_racks_hold(strategy: Strategy, spares: str) -> None:
    """Most failures are of racks here, each of which takes 8 nodes at once."""
    said = {"gpus": "8192", "failures": "500kh", "rack-mtbf": "30d", "spares": spares}
    scenario = scenario_of({**said, "repair": "6h"})
    predicted = predict(scenario, strategy)
    wall_s = simulate(job_of(scenario, strategy), REPLICATIONS, seed=3)["wall_s"]
    error_s = wall_s.std() / math.sqrt(REPLICATIONS)
    assert abs(wall_s.mean() - predicted.wall_s) < Z_MAX * error_s


def test_lemons_fail_more_often_and_the_others_less() -> None:
    """All together as often as the rate says, whether they age or not."""
    said = {"gpus": "8192", "failures": "20kh", "lemons": "10%", "lemon-factor": "10"}
    scenario = scenario_of({**said, "transient": "100%", "fatal": "0", "interval": "1h"})
    rows = simulate(job_of(scenario, "checkpoint-restart"), 50, seed=3)
    failures = rows["failures"].sum()
    expected = (rows["wall_s"] - rows["wait_s"]).sum() / mtbf_s(scenario)
    assert abs(failures - expected) < Z_MAX * math.sqrt(expected)
    job = job_of(scenario_of({**said, "shape": "0.5"}), "checkpoint-restart")
    lives_s = [job.scale_s * math.gamma(1 + 1 / 0.5) / often for often in (1, 10)]
    assert 0.9 / lives_s[0] + 0.1 / lives_s[1] == pytest.approx(0.99 * 8 / (20_000 * 3600))


def test_dropped_replicas_agree_in_the_long_run() -> None:
    """They begin whole, which a long run forgets."""
    scenario = scenario_of({"gpus": "16384", "work": "600d", "fatal": "0%", "transient": "0%"})
    predicted = predict(scenario, "drop")
    wall_s = simulate(job_of(scenario, "drop"), REPLICATIONS, seed=3)["wall_s"]
    assert abs(wall_s.mean() / predicted.wall_s - 1) < 0.005


def test_dropped_replicas_by_the_hundred_are_not_the_loss_of_everything() -> None:
    """Some 400 nodes are missing at a time, each part of which the other 2,047 replicas have."""
    scenario = scenario_of({"gpus": "1048576", "work": "10d"})
    predicted = predict(scenario, "drop")
    rows = simulate(job_of(scenario, "drop"), 3, seed=3)
    assert rows["from_storage"].sum() < 0.02 * rows["incidents"].sum()
    assert predicted.how == "first order" and not predicted.outcome.in_regime
    assert abs(rows["wall_s"].mean() / predicted.wall_s - 1) < 0.15


def test_several_nodes_of_a_replica_that_are_out_at_once_are_beyond_first_order() -> None:
    assert predict(scenario_of({"gpus": "1024"}), "drop").outcome.in_regime
    assert not predict(scenario_of({"gpus": "1024", "failures": "5kh"}), "drop").outcome.in_regime


def test_the_best_interval_is_the_best() -> None:
    scenario = scenario_of({"gpus": "16384"})
    best = predict(scenario, "checkpoint-restart")
    for factor in ("0.7", "1.4"):
        said = f"{float(factor) * best.interval_s / 60:.3f}min"
        other = predict(scenario_of({"gpus": "16384", "interval": said}), "checkpoint-restart")
        assert other.outcome.goodput < best.outcome.goodput


@pytest.mark.parametrize("flush", ["2min", "40min"])
def test_versions_in_memory_come_as_often_as_is_said(flush: str) -> None:
    """The best durable interval is a whole number of them; the numbers beside it are no better."""
    said = {"gpus": "16384", "failures": "50kh", "memory-interval": "10min", "flush": flush}
    best = predict(scenario_of(said), "peer-memory")
    assert best.memory_interval_s == pytest.approx(600)
    many = round(best.interval_s / 600)
    for other in (many - 1, many + 1):
        if other * 10 >= float(flush[:-3]):
            there = predict(scenario_of({**said, "interval": f"{10 * other}min"}), "peer-memory")
            assert there.outcome.goodput < best.outcome.goodput


def test_outlast_is_never_behind_what_it_contains() -> None:
    for gpus in ("1024", "16384", "262144"):
        scenario = scenario_of({"gpus": gpus})
        ours = predict(scenario, "outlast").outcome.goodput
        for other in ("checkpoint-restart", "peer-memory", "migrate"):
            assert ours >= predict(scenario, other).outcome.goodput - 1e-9


def test_a_strategy_that_cannot_be_had_says_why() -> None:
    with pytest.raises(UsageError, match="migrate needs two replicas"):
        predict(scenario_of({"gpus": "8"}), "migrate")
