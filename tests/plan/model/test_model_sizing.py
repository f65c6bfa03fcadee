"""Scenarios from model and machine, and costs of a run besides failures."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.plan.plan_command import Plan

from outlast.errors import UsageError
from outlast.plan.answers.extra_costs import ExtraInputs, extra_costs
from outlast.plan.model.answer_values import format_quantity
from outlast.plan.model.model_sizing import peak_flops
from outlast.plan.model.scenario import Scenario, scenario_of
from outlast.plan.model.strategy_prediction import Prediction, predict
from outlast.theory import costs, intervals

LLAMA = ("--gpus", "16384", "--parameters", "405B", "--tokens", "15.6T", "--replica-gpus", "128")


def test_a_model_and_a_machine_are_a_scenario(plan: Plan, tmp_path: Path) -> None:
    """Llama 3 405B took 54 days at 38 to 43 % (arXiv 2407.21783): 68 of pre-training FLOP at 40 %,
    of which 54 were counted."""
    path = tmp_path / "run.toml"
    said = plan("size", *LLAMA, "--storage-bandwidth", "2TB/s", "--out", str(path), "--json")
    assert said.named("state")["value"] == pytest.approx(14 * 405e9)
    work_s = 6 * 405e9 * 15.6e12 / (16384 * 989e12 * 0.4)
    assert said.named("work")["value"] == pytest.approx(work_s)
    assert said.named("flush")["value"] == pytest.approx(14 * 405e9 / 2e12)
    assert said.named("restart")["value"] == pytest.approx(300 + 128 * 14 * 405e9 / 2e12)
    assert all(one["how"] == "given" for one in said.json["quantities"])
    scenario = scenario_of({}, path)
    assert (scenario.replicas, scenario.work_s) == (128, pytest.approx(work_s))
    again = plan("size", *LLAMA, "--out", str(path))
    assert again.code == 2 and "exists already" in again.err
    text = plan("size", *LLAMA)
    assert text.code == 0 and "computed from bandwidth alone" in text.out


def test_half_the_active_parameters_are_half_the_work(plan: Plan) -> None:
    whole = plan("size", "--gpus", "64", "--parameters", "70B", "--json")
    half = plan("size", "--gpus", "64", "--parameters", "70B", "--active", "35B", "--json")
    assert half.named("work")["value"] == pytest.approx(whole.named("work")["value"] / 2)
    assert half.named("state") == whole.named("state")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--gpus", "0", "--parameters", "1B"), "--gpus 0"),
        (("--gpus", "8", "--parameters", "many"), "--parameters many"),
        (("--gpus", "8", "--parameters", "1B", "--mfu", "0"), "--mfu 0"),
        (("--gpus", "8", "--parameters", "1B", "--replica-gpus", "3"), "--replica-gpus 3"),
        (("--gpus", "8", "--parameters", "405"), "give a unit, as in 405B"),
        (("--gpus", "8", "--parameters", "1B", "--tokens", "15.6"), "as in 15.6B"),
        (("--gpus", "8", "--parameters", "1B", "--active", "2B"), "--active 2G is more"),
        (("--gpus", "8", "--parameters", "1B", "--tokens", "1M"), "--batch-tokens 4M is more"),
        (("--gpus", "8", "--parameters", "1B", "--mfu", "1"), "1% or 100%"),
        (("--gpus", "1,5k", "--parameters", "1B"), "whole number"),
        (("--gpus", "64", "--parameters", "1B", "--replica-gpus", "4"), "whole nodes of 8"),
        (("--gpus", "8", "--parameters", "1B", "--storage-bandwidth", "9B"), "longer than"),
        (("--gpus", "8", "--parameters", "1B", "--bytes-per-parameter", "0"), "at most 64"),
        (("--gpus", "8", "--parameters", "1B", "--storage-bandwidth", "9"), "storage-bandwidth"),
    ],
)
def test_impossible_models_are_refused_by_name(
    plan: Plan, flags: tuple[str, ...], told: str
) -> None:
    said = plan("size", *flags)
    assert said.code == 2 and told in said.err


def test_assumed_values_are_named(plan: Plan) -> None:
    """DeepSeek-V3: 2.664 million GPU-hours for 14.8T tokens (arXiv 2412.19437) are 35 % of the peak
    in bf16, and half as much of that in fp8, which a default of 40 % would make 24 days."""
    run = ("--gpus", "2048", "--parameters", "671B", "--active", "37B", "--tokens", "14.8T")
    said = plan("size", *run, "--precision", "fp8", "--mfu", "17.3%", "--json")
    assert said.named("work")["value"] == pytest.approx(2.664e6 * 3600 / 2048, rel=0.01)
    assert "6 x 37G parameters x 14.8T tokens" in said.named("work")["source"]
    assert "17.3 % of 1,978 TFLOP/s; no attention" in said.named("work")["source"]
    assumed = {one["key"]: one["text"] for one in said.json["assumed"]}
    assert assumed["device"] == "h100" and assumed["batch-tokens"] == "4M"
    assert not {"mfu", "tokens", "precision"} & assumed.keys()
    small = plan(
        "size", "--gpus", "4", "--parameters", "7B", "--bytes-per-parameter", "6", "--json"
    )
    assert small.named("state")["value"] == pytest.approx(42e9)
    assert {"tokens": "140G", "gpus-per-node": "4"}.items() <= {
        one["key"]: one["text"] for one in small.json["assumed"]
    }.items()


def test_a_state_that_does_not_fit_and_a_network_that_bounds(plan: Plan) -> None:
    said = plan("size", "--gpus", "1", "--parameters", "70B", "--json")
    assert "does not fit" in said.json["warnings"][0]
    assert said.named("flush")["value"] == pytest.approx(14 * 70e9 / 25e9)
    assert "network" in said.named("flush")["source"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--network-price", "$0.09"), "--network-price needs --storage-price"),
        (("--keep", "9"), "--keep needs --storage-price"),
        (("--notice", "2min"), "--notice needs --preempted-every"),
        (("--verify", "1min"), "--verify needs --silent-every"),
        (("--local-restore", "1h"), "--local-restore needs --local-cost"),
        (("--failures", "0.5/day"), "50%/day"),
        (("--step", "60d", "--work", "30d"), "--step is longer than --work"),
    ],
)
def test_flags_that_would_price_nothing_are_refused(
    plan: Plan, flags: tuple[str, ...], told: str
) -> None:
    said = plan("advise", "--gpus", "1024", *flags)
    assert said.code == 2 and told in said.err


def test_a_gpu_without_an_arithmetic() -> None:
    with pytest.raises(UsageError, match="fp8"):
        peak_flops("a100", "fp8")
    assert peak_flops("h100", "fp8") == 2 * peak_flops("h100", "bf16")


def _advised(gpus: str = "16384") -> tuple[Scenario, Prediction]:
    scenario = scenario_of({"gpus": gpus, "failures": "50kh"})
    return scenario, predict(scenario, "migrate")


def test_extra_costs_agree_with_their_formulas() -> None:
    scenario, taken = _advised()
    asked = ExtraInputs(
        silent_mtbf_s=20 * 86400.0, verify_s=60.0, straggler_share=1e-6, straggler_factor=3.0,
        maintenance_every_s=30 * 86400.0, preempted_every_s=43_200.0, notice_s=300.0,
        usd_per_spot_hour=1.0, usd_per_gb_month=0.02, local_cost_s=2.0,
    )  # fmt: skip
    found = {one.what: one for one in extra_costs(scenario, taken, asked)}
    assert set(found) == {"silent errors", "stragglers", "planned stops", "spot prices", "storage",
                          "levels of saves"}  # fmt: skip
    assert all(one.how == "first order" for one in found.values())
    slower = costs.step_slowdown(1e-6, 16384, 3.0) - 1
    assert found["stragglers"].usd == pytest.approx(taken.usd * slower)
    cost_s = costs.preemption_s(300, 125, taken.interval_s, restart_s=600)
    spot_usd = taken.usd / 2.5 * (1 + cost_s / 43_200)
    assert found["spot prices"].usd == pytest.approx(spot_usd - taken.usd)
    assert "is enough for" in found["spot prices"].text and found["silent errors"].usd > 0
    assert found["levels of saves"].usd <= 0


def _wall_s(work_s: float, interval_s: float, every_s: float, *, seed: int) -> float:
    """Simulate preemptions that restart from the last flushed save: C 5 s, F 120 s, R 600 s."""
    drawn = random.Random(seed)
    now_s = done_s = saved_s = 0.0
    flushes: list[tuple[float, float]] = []  # when a save can be restored, and its work
    next_s = drawn.expovariate(1 / every_s)
    while done_s < work_s:
        end_s = now_s + interval_s + 5
        if end_s <= next_s:
            now_s, done_s = end_s, done_s + interval_s
            flushes.append((now_s + 120, done_s))
            continue
        saved_s = max([saved_s] + [work for at_s, work in flushes if at_s <= next_s])
        flushes, done_s, now_s = [], saved_s, next_s + 300 + 600  # the queue, then the restart
        while (next_s := now_s - 600 + drawn.expovariate(1 / every_s)) < now_s:
            now_s = next_s + 300 + 600
    return now_s


@pytest.mark.parametrize("every_s", [3600.0, 43_200.0])
def test_preemptions_without_notice_are_as_in_a_simulation(every_s: float) -> None:
    """The cost was half of the advised interval, of an hour, also where one came every hour."""
    scenario, taken = _advised("1024")  # nearly without failures
    inputs = ExtraInputs(preempted_every_s=every_s, notice_s=60.0, queue_s=300.0)
    (found,) = extra_costs(scenario, taken, inputs)
    best_s = float(intervals.optimum_async(5.0, 120.0, every_s))
    assert f"after {format_quantity(best_s, 's')} of work is best" in found.text
    walls = [_wall_s(500 * every_s, best_s, every_s, seed=seed) for seed in range(20)]
    longer = sum(walls) / len(walls) / (500 * every_s)
    plain = 1 + 5 / taken.interval_s
    assert 1 + found.usd / taken.usd == pytest.approx(longer / plain, rel=0.02)
    in_time = extra_costs(scenario, taken, replace(inputs, notice_s=3600.0))[0]
    assert 0 < in_time.usd < found.usd and "is enough for" in in_time.text


def test_preemptions_faster_than_a_restart_cost_without_bound() -> None:
    scenario, taken = _advised()
    (found,) = extra_costs(scenario, taken, ExtraInputs(preempted_every_s=0.5))
    assert math.isinf(found.usd)


def test_a_spot_price_needs_to_know_how_often(plan: Plan) -> None:
    said = plan("advise", "--gpus", "1024", "--spot-hour", "$1")
    assert said.code == 2 and "--preempted-every" in said.err
    said = plan("advise", "--gpus", "1024", "--silent-every", "0")
    assert said.code == 2 and "--silent-every 0 must be above 0" in said.err


def test_advice_has_requested_extra_costs_only(plan: Plan) -> None:
    assert "Besides failures" not in plan("advise", "--gpus", "1024").out
    said = plan("advise", "--gpus", "1024", "--maintenance-every", "30d", "--json").json
    assert [one["what"] for one in said["extras"]] == ["planned stops"]
    text = plan("advise", "--gpus", "1024", "--maintenance-every", "30d").out
    assert "Besides failures" in text and "planned stops: +$" in text
