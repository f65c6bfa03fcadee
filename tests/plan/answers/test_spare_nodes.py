"""Prices of spares and copies against strategies, sums and simulation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests.plan.plan_command import Plan

from outlast.plan.answers.copy_counts import exposed_s, losses, memory_copies
from outlast.plan.answers.spare_nodes import SpareModel, cheapest, plain_usd, spare_nodes
from outlast.plan.model.ladder_costs import kinds_of
from outlast.plan.model.scenario import scenario_of
from outlast.plan.model.strategy_prediction import predict
from outlast.theory import replicas
from outlast.theory.spares import StalledShares

# 20 failures an hour that each take a node for a day: 480 in repair.
TRAP = {"gpus": "1M", "failures": "50kh", "transient": "0%", "fatal": "0%"}
RACKS = {
    "gpus": "1024", "failures": "3kh", "rack-mtbf": "40d", "transient": "0%", "fatal": "0%",
    "work": "200d",
}  # fmt: skip


def test_the_mean_is_a_trap() -> None:
    found = spare_nodes(scenario_of(TRAP))
    mean = next(one for one in found.rows if "the mean" in one.names)
    assert mean.spares == 480 and mean.short == pytest.approx(0.488, abs=0.001)
    enough = next(one for one in found.rows if "99.9 %" in one.names)
    assert enough.spares == 549
    assert (
        "480 spares, as many as are in repair" in found.conclusions[0]
        and "48.8 %" in found.conclusions[0]
    )
    assert "a net saving of $" in found.conclusions[1]
    best = next(one for one in found.rows if "best: waits" in one.names)
    assert best.spares == pytest.approx(555, abs=3)  # by theory.spares, which prices lost time only


@pytest.mark.parametrize("count", [2, 6, 15])
def test_dollars_are_those_of_the_strategy(count: int) -> None:
    scenario = scenario_of({"gpus": "16384", "spares": str(count)})
    given = next(one for one in spare_nodes(scenario).rows if "given" in one.names)
    usd = predict(scenario, "outlast").usd
    assert given.stalling_usd + plain_usd(scenario, SpareModel(scenario)) == pytest.approx(
        usd, rel=1e-6
    )


BROKEN = {"gpus": "256", "failures": "300h", "repair": "50d"}  # few spares: nobody ever works


@pytest.mark.parametrize("said", [RACKS, {"gpus": "8192", "repair": "3d"}, BROKEN])
@pytest.mark.parametrize("dropping", [False, True])
def test_the_cheapest_is_cheapest(said: dict[str, str], dropping: bool) -> None:
    stocks = SpareModel(scenario_of(said))
    prices = [stocks.price(count, dropping=dropping) for count in range(stocks.most)]
    best = cheapest([stocks], dropping=dropping)
    assert prices[best] == min(prices) < math.inf


def test_going_on_without() -> None:
    """Two replicas of one node, no spare: each is up whatever the other is."""
    scenario = scenario_of(
        {"gpus": "16", "replica-gpus": "8", "failures": "1kh", "transient": "0%", "fatal": "0%"}
    )
    stocks, mean = SpareModel(scenario), 16 / 1000 * 24
    points = [math.exp(-mean) * mean**k / math.factorial(k) for k in range(30)]
    for count in (0, 1, 3):
        right = math.fsum(p * 0.5 ** max(0, k - count) for k, p in enumerate(points))
        assert stocks.up(count) == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("count", [0, 3, 14])
def test_racks_stall_as_simulated(count: int) -> None:
    """The kernel knows nodes, racks and repairs one by one, and none of this formula."""
    pytest.importorskip("numba", reason="the simulator is compiled")
    from outlast.plan.simulate.replications import simulate
    from outlast.plan.simulate.simulated_job import job_of

    scenario = scenario_of({**RACKS, "spares": str(count)})
    rows = simulate(job_of(scenario, "checkpoint-restart"), 100, seed=count)
    waited = rows["wait_s"] / rows["wall_s"]
    right = StalledShares(kinds_of(scenario), scenario.repair_s, count).share(count)
    assert abs(waited.mean() - right) < 4 * waited.std() / math.sqrt(len(waited))


def test_a_run_that_never_ends_is_warned_about(plan: Plan) -> None:
    asked = ("--gpus", "1M", "--failures", "1kh", "--json")
    found = plan("spares", *asked)
    assert any("no run ends here" in one for one in found.json["warnings"])
    assert found.json["rows"][0]["stalling_usd"] is None
    found = plan("replicas", *asked)
    assert any("no end with some" in one for one in found.json["warnings"])


def test_spares_command(plan: Plan, tmp_path: Path) -> None:
    drawn = tmp_path / "spares.svg"
    asked = ("--gpus", "16384", "--spares", "8")
    found = plan("spares", *asked, "--figure", str(drawn), "--json")
    assert found.code == 0
    mean = found.named("nodes in repair, mean")
    assert mean["low"] < mean["value"] < mean["high"]
    assert [one["spares"] for one in found.json["rows"] if "given" in one["names"]] == [8]
    for text in ("the mean in repair", "replicas of 64 nodes", "16,384 GPUs"):
        assert f"<!-- {text}" in drawn.read_text(), text
    text = plan("spares", *asked).out
    assert "best: uncertain rate" in text and "The mean is too small" in text
    assert "--spares 9,999" in plan("spares", "--gpus", "16384", "--spares", "9999").err


def test_copies() -> None:
    scenario = scenario_of({"gpus": "16384", "failures": "50kh", "fatal": "0%", "state": "2TB"})
    rows = memory_copies(scenario).rows
    node, window_s = 8 / (50_000 * 3600), exposed_s(scenario)
    assert window_s == 30 + 120 + 60
    pairs = 1024 * 2 * node * (1 - math.exp(-node * window_s))
    assert rows[1].lost_every_s == pytest.approx(1 / pairs, rel=1e-4)
    assert rows[0].lost_every_s == pytest.approx(1 / (2048 * node))
    epoch = 30 * 8640 * 16384 / 2 * (node * 10) ** 2
    assert rows[1].epoch_losses == pytest.approx(epoch, rel=1e-9)
    assert rows[1].memory_per_gpu_bytes == 2 * 2 * 2e12 / 16384  # two versions of two copies
    held = predict(scenario, "peer-memory")
    assert rows[1].network_per_gpu_bytes_per_s == pytest.approx(
        2e12 / 16384 / (held.memory_interval_s or math.nan)
    )
    assert rows[1].goodput == held.outcome.goodput and rows[1].losses == losses(scenario, 2)
    assert len(memory_copies(scenario_of({"gpus": "16"})).rows) == 2


def test_half_is_left_at_the_limit() -> None:
    scenario = scenario_of({"gpus": "16384", "failures": "50kh"})
    limits = {one.name: one.value for one in memory_copies(scenario).quantities}
    gpus = limits["half goodput, storage"]
    at = replicas.best_efficiency(
        5 * math.sqrt(gpus / 16384), 50_000 * 3600 / gpus, restart_s=630.0
    )  # fmt: skip
    assert at == pytest.approx(0.5, rel=1e-9)
    gpus = limits["half goodput, memory, R not counted"]
    at = replicas.best_efficiency(1 * math.sqrt(16384 / gpus), 50_000 * 3600 / gpus)
    assert at == pytest.approx(0.5, rel=1e-9)
    gpus = limits["half goodput, memory"]
    at = replicas.best_efficiency(
        1 * math.sqrt(16384 / gpus), 50_000 * 3600 / gpus, restart_s=150.0
    )  # fmt: skip
    assert at == pytest.approx(0.5, rel=1e-9)
    assert limits["half goodput, storage"] < limits["half goodput, storage, R not counted"]
    assert limits["half goodput, memory"] < limits["half goodput, memory, R not counted"]


def test_a_missing_limit_is_warned_about() -> None:
    free = scenario_of({"gpus": "16384", "memory-cost": "0"})
    assert any("has no limit" in one for one in memory_copies(free).warnings)
    assert not memory_copies(scenario_of({"gpus": "16384"})).warnings


def test_replicas_command(plan: Plan) -> None:
    found = plan("replicas", "--gpus", "16384", "--json")
    assert found.code == 0 and [one["copies"] for one in found.json["rows"]] == [1, 2, 3, 4]
    assert found.json["rows"][1]["losses_low"] < found.json["rows"][1]["losses"]
    assert {"key": "state", "text": "1.5TB"} in found.json["assumed"]
    assert "network a GPU" in plan("replicas", "--gpus", "16384").out
    alone = plan("replicas", "--gpus", "8")
    assert alone.code == 0 and "there is one node" in alone.out
