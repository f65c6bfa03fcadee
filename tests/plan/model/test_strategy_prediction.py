"""Predictions of a strategy on a scenario against simulation."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("numba", reason="the simulator is compiled: pip install 'outlast[plan]'")

from outlast.errors import ConfigError, UsageError
from outlast.plan.answers.strategy_price import price_strategy
from outlast.plan.model.ladder_costs import STRATEGIES, Strategy, kinds_of, mtbf_s
from outlast.plan.model.scenario import OVERHEAD_OF, scenario_of
from outlast.plan.model.strategy_prediction import predict
from outlast.plan.reproduce import strategy_experiment
from outlast.plan.simulate import replications
from outlast.plan.simulate.replications import simulate
from outlast.plan.simulate.simulated_job import job_of
from outlast.theory import replicas

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
def test_memory_snapshots_have_the_given_interval(flush: str) -> None:
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


def test_an_impossible_strategy_states_the_reason() -> None:
    with pytest.raises(UsageError, match="migrate needs at least two replicas"):
        predict(scenario_of({"gpus": "8"}), "migrate")


def test_shares_of_failures_sum_to_all_of_them() -> None:
    """Half of them transient and half fatal leave none that takes a node."""
    scenario = scenario_of({"gpus": "1024", "transient": "50%", "fatal": "50%"})
    by_name = {one.name: one.rate_per_s * mtbf_s(scenario) for one in kinds_of(scenario)}
    assert by_name == pytest.approx({"node": 0, "transient": 0.5, "fatal": 0.5, "rack": 0})
    assert predict(scenario, "checkpoint-restart").spares == 0
    assert job_of(scenario, "checkpoint-restart").stay_share == 1
    third = scenario_of({"gpus": "1024", "transient": "30%", "fatal": "20%"})
    rates = [one.rate_per_s * mtbf_s(third) for one in kinds_of(third)]
    assert rates == pytest.approx([0.5, 0.3, 0.2, 0])
    with pytest.raises(ConfigError, match=r"sum to 100\.0100%"):
        scenario_of({"gpus": "8", "transient": "50.01%", "fatal": "50%"})


def test_strategies_without_an_end_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred million GPUs fail each 2 s: nothing comes out of a recovery of 30 s."""
    monkeypatch.setattr(replications, "run_part", lambda _: pytest.fail("simulated"))
    scenario = scenario_of({"gpus": "100M"})
    for strategy in ("checkpoint-restart", "peer-memory", "migrate", "outlast"):
        assert math.isinf(price_strategy(scenario, strategy).usd)


def test_a_part_with_very_many_holders_is_counted_at_once() -> None:
    """The sum over holders ends where nothing is added any more: -ln(1 - u) in the limit."""
    gone = -math.expm1(-1e-3)
    most = replicas.loss_rate_per_s(10**7, 10**7, 1e-6, 1e3)
    assert most == 0
    two = replicas.loss_rate_per_s(2, 2, 1e-6, 1e3)
    assert two == pytest.approx(1e-6 * gone / (1 / 2 + gone), rel=1e-12)


@pytest.mark.parametrize("spares", ["0", "2", "40"])
def test_spares_stand_in_for_replicas_that_would_be_dropped(spares: str) -> None:
    """They were passed over without a word."""
    said = {"gpus": "16384", "work": "600d", "fatal": "0%", "transient": "0%", "spares": spares}
    scenario = scenario_of(said)
    predicted = predict(scenario, "drop")
    assert predicted.spares == int(spares)
    wall_s = simulate(job_of(scenario, "drop"), 50, seed=3)["wall_s"]
    assert abs(wall_s.mean() / predicted.wall_s - 1) < 0.01


@pytest.mark.parametrize("strategy", ["checkpoint-restart", "migrate", "drop"])
def test_steps_that_a_strategy_always_slows_down(strategy: Strategy) -> None:
    said = {"gpus": "16384", "work": "60d", "spares": "40", "transient": "0%", "fatal": "0%"}
    slow = scenario_of({**said, "overhead": f"{strategy}=20%"})
    predicted = predict(slow, strategy)
    assert predicted.how == predict(scenario_of(said), strategy).how
    rows = simulate(job_of(slow, strategy), REPLICATIONS, seed=3)
    assert abs(rows["wall_s"].mean() / predicted.wall_s - 1) < 0.01
    slower_s = rows["slow_s"].mean()  # of work that is done again, too, and of missing replicas
    assert 0.99 < slower_s / (slow.work_s / 4) < (1.05 if strategy != "drop" else 1.3)
    other = next(one for one in STRATEGIES if one != strategy)
    assert predict(slow, other) == predict(scenario_of(said), other)


def test_an_overhead_names_its_strategies() -> None:
    assert OVERHEAD_OF == STRATEGIES
    assert scenario_of({"gpus": "8", "overhead": "drop=4%, outlast=1%"}).overhead == (
        ("drop", 0.04), ("outlast", 0.01),
    )  # fmt: skip
    for text in ("torchft=4%", "drop=4%,drop=5%", "drop", "drop=100%"):
        with pytest.raises(ConfigError, match="overhead"):
            scenario_of({"gpus": "8", "overhead": text})


def test_failures_at_even_gaps_are_those_of_document_003() -> None:
    """Every 45 to 75 min for 405 min of work, each a pause of 100 s: by recursion, and by runs."""
    said = {
        "gpus": "64", "failures": "64h", "gap-spread": "25%", "work": "405min", "transient": "0%",
        "fatal": "0%", "detect": "0", "pause": "100s", "step": "1ms", "replica-gpus": "8",
        "interval": "405min", "cost": "0", "flush": "0", "window": "0", "spares": "8",
    }  # fmt: skip
    scenario = scenario_of(said)
    rows = simulate(job_of(scenario, "migrate"), 4000, seed=3)
    expected = strategy_experiment.mean_failures(
        strategy_experiment.UniformGaps(45 * 60.0, 75 * 60.0), 405 * 60.0, pause=100.0
    )
    assert rows["failures"].mean() == pytest.approx(expected, abs=0.05)
    assert rows["failures"].std() < 1
    predicted = predict(scenario, "migrate")
    assert predicted.how == "first order" and "even gaps" in predicted.warnings[0]
