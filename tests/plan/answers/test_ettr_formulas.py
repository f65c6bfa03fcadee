"""ETTR answers against the formula, published figures, and inverses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests.plan.plan_command import Plan

from outlast.errors import UsageError
from outlast.plan.answers.formula_answers import ettr
from outlast.plan.model.answer_values import Answer
from outlast.plan.model.ladder_costs import mtbf_s
from outlast.plan.model.scenario import scenario_of

HOUR_S = 3600.0
RSC = {"detect": "0", "cost": "0", "flush": "0", "work": "300d"}


def value(found: Answer, name: str) -> float:
    (one,) = [one for one in found.quantities if one.name == name]
    return one.value


def test_against_its_formula() -> None:
    """Written out: L tau/(e^(L (tau + C)) - 1) e^(-L u0)/(1 + L q), a failure every 2 h."""
    said = {"gpus": "1000", "failures": "2kh", "interval": "30min", "cost": "20s"}
    found = ettr(scenario_of(said), queue_s=600.0)
    rate, tau, cost, start, queue = 1 / (2 * HOUR_S), 1800.0, 20.0, 630.0, 600.0
    right = rate * tau / math.expm1(rate * (tau + cost)) * math.exp(-rate * start)
    assert value(found, "ETTR") == pytest.approx(right / (1 + rate * queue), rel=1e-12)
    assert value(found, "equations 2 and 8") == pytest.approx(1 - rate * (start + tau / 2))
    assert value(found, "failures of the run") == pytest.approx(
        rate * (30 * 24 * HOUR_S + start) / (1 - rate * (start + tau / 2))
    )
    assert all(one.low is None for one in found.quantities)  # a rate as given is exact
    (goodput,) = [one for one in found.quantities if one.name == "goodput"]
    assert "without --queue" in goodput.source


@pytest.mark.parametrize(("interval", "says"), [("60min", 0.70), ("5min", 0.93)])
def test_the_papers_ettr_of_16000_gpus(interval: str, says: float) -> None:
    scenario = scenario_of(
        {"gpus": "16000", "failures": "rsc-1", "restart": "5min", "interval": interval, **RSC}
    )
    assert value(ettr(scenario), "equations 1 and 7") == pytest.approx(says, abs=0.02)


def test_settings_for_a_target_ettr_reach_it() -> None:
    """Each answer, put in, is the target again; none alone gives what only all together give."""
    said = {"gpus": "16384", "failures": "40kh", "interval": "30min", "detect": "0"}
    scenario = scenario_of(said)
    found = ettr(scenario, 0.85)

    def seconds(name: str) -> str:
        return f"{value(found, name):.9f}s"

    both = seconds("interval and start at most")
    tried = (
        {"interval": seconds("interval at most")},
        {"restart": seconds("start at most")},
        {"interval": both, "restart": both},
        {"failures": f"{40_000 * HOUR_S / value(found, 'failure rate at most'):.6f}s"},
    )
    for instead in tried:
        again = value(ettr(scenario_of({**said, **instead})), "ETTR")
        assert again == pytest.approx(0.85, abs=1e-8), instead
    waiting = ettr(scenario_of(said), 0.85, queue_s=120.0)
    start = {"detect": "0", "restart": f"{value(waiting, 'start at most'):.9f}s"}
    again = ettr(scenario_of({**said, **start}), queue_s=120.0)
    assert value(again, "ETTR") == pytest.approx(0.85, abs=1e-8)
    job_mtbf_s = value(found, "between failures at least")
    assert mtbf_s(scenario) / job_mtbf_s == pytest.approx(value(found, "failure rate at most"))


def test_an_unreachable_target_states_the_best_value() -> None:
    scenario = scenario_of({"gpus": "100k", "failures": "rsc-2", "interval": "21min"})
    found = ettr(scenario, 0.9)
    names = {one.name for one in found.quantities}
    assert "interval at most" not in names and "interval and start at most" in names
    said = " ".join(found.warnings)
    assert "no interval alone gives 0.9" in said and "the best is 0." in said
    assert "L (u0 + tau/2) is 0.43, above 0.3: equations 1 to 8 do not hold here; ETTR" in said
    lost = ettr(scenario_of({"gpus": "16384", "failures": "100h"}))
    assert value(lost, "failures of the run") == math.inf
    assert any("equation 4 counts failures without end" in one for one in lost.warnings)
    for target in (0.0, 1.0):
        with pytest.raises(UsageError, match="--target"):
            ettr(scenario, target)


def test_omissions_of_the_formula_are_warned_about() -> None:
    found = ettr(scenario_of({"gpus": "16384", "shape": "0.7", "lemons": "5%"}), 0.9)
    hows = {one.name: one.how for one in found.quantities}
    assert hows["ETTR"] == hows["goodput"] == "first order"
    said = " ".join(found.warnings)
    assert "nodes are assumed not to age" in said and "lemons" in said
    slow = ettr(scenario_of({"gpus": "16384", "flush": "30min"}), 0.905)
    assert value(slow, "interval at most") < 1800
    assert any("interval at most" in one and "a flush takes 30 min" in one for one in slow.warnings)


def test_ettr_command(plan: Plan, tmp_path: Path) -> None:
    drawn = tmp_path / "ettr.svg"
    asked = ("--gpus", "16384", "--target", "90%", "--queue", "2min")
    found = plan("ettr", *asked, "--figure", str(drawn), "--json")
    assert found.code == 0
    exact, free = found.named("ETTR"), found.named("ETTR with free saves")
    assert exact["low"] < exact["value"] < exact["high"] and exact["how"] == "exact"
    assert exact["value"] < free["value"] and exact["unit"] == "share"
    shown = drawn.read_text()
    for text in ("rsc-1", "0.95", "this scenario", "ETTR of 16,384 GPUs"):
        assert f"<!-- {text}" in shown, text
    assert "equations 4 to 6" in plan("ettr", *asked).out
    assert "--target 2" in plan("ettr", "--gpus", "8", "--target", "2").err
    assert "--queue 5" in plan("ettr", "--gpus", "8", "--queue", "5").err


def test_presets(plan: Plan) -> None:
    """The figures that the paper projects from RSC-1's rate."""
    found = plan("presets", "--json")
    rates = {one["name"]: one for one in found.json}
    assert len(rates) == 6 and all(one["source"] for one in rates.values())
    hours = {gpus: one / HOUR_S for gpus, one in rates["rsc-1"]["job_mtbf_s"].items()}
    assert hours["16384"] == pytest.approx(1.80, abs=0.01)
    assert hours["131072"] == pytest.approx(0.225, abs=0.001)
    assert rates["50000-hours"]["gpu_mtbf_s"] == 50_000 * HOUR_S
    text = plan("presets").out
    assert "arXiv 2410.21680" in text and "19-fold" in text
