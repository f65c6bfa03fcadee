"""Advice: its figures against independent predictions, and its sentences."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.plan.plan_command import Plan

from outlast.plan.answers.advice import (
    Advice,
    best_settings,
    settings_of,
    with_settings,
)
from outlast.plan.answers.advice_text import failures_to_halve
from outlast.plan.answers.advisor import advise
from outlast.plan.answers.spare_nodes import cheapest_spares
from outlast.plan.answers.strategy_price import price_strategy
from outlast.plan.model.answer_values import at_rate
from outlast.plan.model.ladder_costs import STRATEGIES, Strategy, kinds_of
from outlast.plan.model.scenario import Scenario, scenario_of
from outlast.plan.model.strategy_prediction import predict, reason_impossible
from outlast.plan.simulate.replications import simulate
from outlast.plan.simulate.simulated_job import job_of
from outlast.theory import numerics
from outlast.theory.spares import StalledShares


def told(in_use: Strategy | None = None, **said: str) -> Advice:
    return advise(scenario_of({"gpus": "16384", **said}), in_use)


def least_usd(scenario: Scenario) -> float:
    """Of strategies that need their spares, of which migrate is taken where one that drops replicas
    costs as much with spares in place of all of them."""
    can: list[Strategy] = [
        one for one in STRATEGIES if one != "drop" and not reason_impossible(scenario, one)
    ]
    return min(predict(scenario, one).usd for one in can)


@pytest.mark.extended
def test_it_costs_what_its_settings_are_predicted_to() -> None:
    found = told(failures="50kh")
    set_to = {one.what: one for one in found.items}
    said = {"gpus": "16384", "failures": "50kh", "spares": set_to["spares"].set_to}
    interval_s = set_to["interval"].value
    scenario = replace(scenario_of(said), interval_s=interval_s)
    there = predict(scenario, "migrate")
    assert set_to["strategy"].set_to == "migrate"
    assert found.bill.total == pytest.approx(there.usd, rel=1e-9)
    bill = found.bill
    on_top = (bill.save, bill.redo, bill.detect, bill.recover, bill.wait, bill.slow, bill.spares)
    assert bill.ideal + math.fsum(on_top) == pytest.approx(bill.total, rel=1e-9)
    assert bill.ideal == pytest.approx(16384 * 720 * 2.5)
    for way in found.strategies:
        stocked = said if way.strategy != "drop" else {**said, "spares": "0"}
        assert way.usd == pytest.approx(predict(scenario_of(stocked), way.strategy).usd)


def test_no_other_interval_or_number_of_spares_is_better() -> None:
    found = told(failures="50kh")
    best_usd = found.bill.total
    spares = int(found.items[-2].set_to)
    for other in (spares - 2, spares - 1, spares + 1, spares + 2):
        assert predict(scenario_of({"gpus": "16384", "failures": "50kh", "spares": f"{other}"}),
                       "migrate").usd >= best_usd  # fmt: skip


@pytest.mark.parametrize("gpus", ["8", "1024", "16384", "1M"])
def test_spares_are_those_of_an_independent_computation(gpus: str) -> None:
    """By what goes up and comes down past each number in repair, without Erlang's formula."""
    scenario = scenario_of({"gpus": gpus})
    rates = [at_rate(scenario, (stratum + 0.5) / 16) for stratum in range(16)]
    assert cheapest_spares(scenario).best == min(_cheapest(rates), scenario.nodes)
    assert cheapest_spares(scenario).known == min(_cheapest([scenario]), scenario.nodes)


def _cheapest(rates: list[Scenario]) -> int:
    nodes, most = rates[0].nodes, 2000
    away = [StalledShares(kinds_of(one), one.repair_s, most) for one in rates]
    return min(range(most), key=lambda s: sum((nodes + s) / (1 - one.share(s)) for one in away))


def test_versions_in_the_memory_of_one_node_are_not_in_use() -> None:
    found = advise(scenario_of({"gpus": "8", "memory-interval": "1min"}))
    assert found.now is None and found.items


def test_bands_of_strategies_keep_their_settings() -> None:
    """By predictions with the intervals and spares that each was told with."""
    scenario = scenario_of({"gpus": "16384"})
    at = best_settings(scenario)
    for one in advise(scenario).strategies:
        assert one.usd is not None and one.low_usd is not None and one.high_usd is not None
        assert one.low_usd < one.usd < one.high_usd, one.strategy
        of = next(each for each in at.found if each.strategy == one.strategy)
        dear = with_settings(at_rate(at.scenario, 0.95), settings_of(at.scenario, of))
        assert one.high_usd == pytest.approx(price_strategy(dear, one.strategy).usd)


FAR_OUT = {"gpus": "4096", "failures": "5kh", "spares": "1"}


def test_strategies_outside_the_formula_regime_are_simulated() -> None:
    """Against other runs, at the settings that were advised: to some standard errors."""
    scenario = scenario_of(FAR_OUT)
    found = advise(scenario)
    drop = next(one for one in found.strategies if one.strategy == "drop")
    assert found.items[0].set_to == "drop" and drop.how == found.quantities[0].how == "simulated"
    assert "loses at most" not in found.items[1].why and any(
        "some per cent" in text for text in found.warnings
    )
    there = replace(scenario, interval_s=found.items[1].value)
    wall_s = simulate(job_of(there, "drop"), 100, seed=7)["wall_s"]
    error = wall_s.std() / math.sqrt(50)  # of either
    assert abs(wall_s.mean() - found.quantities[0].value) < 4 * error < 0.1 * wall_s.mean()
    parts = [getattr(found.bill, name) for name in found.bill.__struct_fields__ if name != "total"]
    assert math.fsum(parts) == pytest.approx(found.bill.total, rel=1e-9)


def test_a_simulated_strategy_has_an_interval_that_suits_it() -> None:
    """By prices at the interval that its formula would have taken, and at others."""
    scenario = scenario_of(FAR_OUT)
    taken = price_strategy(scenario, "drop")
    others = [predict(scenario, "drop").interval_s, 4 * taken.interval_s, 16 * taken.interval_s]
    dearer = [price_strategy(replace(scenario, interval_s=other), "drop").usd for other in others]
    assert min(dearer) > taken.usd


def test_a_price_is_the_same_whatever_was_priced_before() -> None:
    scenario = scenario_of(FAR_OUT)
    assert price_strategy(scenario, "drop") == price_strategy(
        replace(scenario, detect_s=30.0), "drop"
    )
    rough = price_strategy(scenario, "drop", beside_usd=1.0)
    assert rough.how == "simulated"
    assert rough.usd == pytest.approx(price_strategy(scenario, "drop").usd, rel=0.4)


def test_without_a_simulator_strategies_outside_the_regime_are_not_advised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outlast.plan.answers.strategy_price.find_spec", lambda _: None)
    found = advise(scenario_of({**FAR_OUT, "failures": "4500h"}))
    usd = {one.strategy: one.usd or math.inf for one in found.strategies}
    assert found.items[0].set_to == "migrate" and 0.8 < usd["drop"] / usd["migrate"] < 0.9
    assert "drop may cost" in found.items[0].why and "outlast[plan]" in found.items[0].why


def test_levers_are_tuned_anew_and_sorted() -> None:
    scenario = scenario_of({"gpus": "16384", "failures": "50kh", "spares": "20"})
    found = advise(scenario)
    swings = [one.swing_usd for one in found.levers]
    assert swings == sorted(swings, reverse=True) and swings[-1] > 0
    (detect,) = [one for one in found.levers if one.key == "detect"]
    half, double = replace(scenario, detect_s=15.0), replace(scenario, detect_s=60.0)
    assert detect.half and detect.double
    assert detect.half.usd == pytest.approx(least_usd(half), rel=1e-9)
    assert detect.double.usd == pytest.approx(least_usd(double), rel=1e-9)
    assert detect.buy == "half"
    assert detect.saves_usd == pytest.approx(found.bill.total - least_usd(half), rel=1e-9)
    (mtbf,) = [one for one in found.levers if one.key == "failures"]
    assert mtbf.buy == "double" and mtbf.given and not detect.given
    assert mtbf.value == pytest.approx(50_000 * 3600)


def test_a_doubt_is_what_not_knowing_costs() -> None:
    scenario = scenario_of({"gpus": "1M"})
    found = advise(scenario)
    (doubt,) = [one for one in found.doubts if "95 %" in one.unknown]
    at = best_settings(scenario)
    there = at_rate(scenario, 0.95)
    kept = price_strategy(with_settings(there, settings_of(at.scenario, at.taken)), "migrate").usd
    assert doubt.regret_usd == pytest.approx(kept - best_settings(there).taken.usd, rel=1e-9)
    assert "2.4 times as often" in doubt.text
    (held,) = [one for one in found.doubts if "hold one replica" in one.unknown]
    assert held.strategy == "peer-memory" and "migrate is impossible" in held.text


@pytest.mark.parametrize("weight", [1.0, 2.0, 40.0])
def test_failures_that_halve_a_band(weight: float) -> None:
    def width(shape: float) -> float:
        return (numerics.gamma_quantile(shape, 0.95) - numerics.gamma_quantile(shape, 0.05)) / shape

    more = failures_to_halve(weight)
    assert width(weight + more) <= width(weight) / 2 < width(weight + more - 1)


def test_the_current_setting_and_the_savings_of_a_change() -> None:
    found = told(interval="6h", failures="50kh")
    now = found.now
    assert now and now.strategy == "checkpoint-restart"
    assert "assumed without --strategy" in now.text
    there = {"gpus": "16384", "failures": "50kh", "interval": "6h", "spares": "15"}
    usd = predict(scenario_of(there), "checkpoint-restart").usd
    assert now.bill.total == pytest.approx(usd)
    assert now.saves_usd == pytest.approx(usd - found.bill.total)
    assert "which is within that" in found.items[1].why
    assert found.items[-2].set_to == "15"
    found = told("migrate", interval="20h", failures="50kh")
    assert found.now and "taken" not in found.now.text
    assert "within that" not in found.items[1].why and found.items[1].saves_usd
    assert told(gpus="8").now is None


ODD: list[tuple[dict[str, str], list[str], list[str]]] = [
    (
        {"gpus": "8"},
        ["strategy: checkpoint-restart", "one node:", "one spare would cost more", "After 7 more"],
        ["migrate", "peer-memory", "--spares 0"],
    ),
    (
        {"gpus": "1M", "failures": "50kh"},
        ["strategy: migrate", "2,500 replicas of 400 GPUs are assumed"],
        [],
    ),
    ({"failures": "50kh"}, ["--failures-seen", "with any input halved"], ["90 %:", "band and"]),
    (
        {"failures": "50kh", "failures-seen": "1"},
        ["as certain as 1 failure makes it"],
        ["1 failures"],
    ),
    (
        {"failures": "1h", "interval": "1h"},
        ["the run does not end", "no strategy ends this run", "times as rare, the run would end"],
        ["Set", "$inf", "nan"],
    ),
    ({"spares": "0"}, ["There are 0: the change, with migrate, saves $"], ["take none"]),
    (
        {"cost": "0", "flush": "2min", "failures": "50kh"},
        ["interval: 2 min", "As often as the flush allows"],
        [],
    ),
    (
        {"cost": "0", "flush": "0", "failures": "50kh"},
        ["interval: 10 s", "At every step, the shortest", "Any interval from 10 s"],
        [],
    ),
    (
        {"transient": "100%", "fatal": "0", "failures": "50kh"},
        ["One durable save, at the end", "No failure takes"],
        [],
    ),
    ({"transient": "0", "fatal": "100%"}, ["strategy: checkpoint-restart"], ["0 nodes are"]),
    ({"interval": "1s", "flush": "0"}, ["With the given 1 s, the run costs $150M more"], []),
    (
        {"replica-gpus": "16384"},
        ["memory-interval:", "copies: 2", "lost every"],
        ["migrate costs"],
    ),
    ({"lemons": "100%", "rack-mtbf": "1y"}, ["takes several at once", "first order"], []),
]


@pytest.mark.parametrize(("said", "has", "lacks"), ODD, ids=lambda one: str(one)[:30])
def test_texts_for_unusual_scenarios(
    plan: Plan, said: dict[str, str], has: list[str], lacks: list[str]
) -> None:
    flags = [part for key, text in {"gpus": "16384", **said}.items() for part in (f"--{key}", text)]
    found = plan("advise", *flags)
    assert found.code == 0
    for text in has:
        assert text in found.out
    for text in lacks:
        assert text not in found.out
    assert "-$0" not in found.out and "+-" not in found.out


def test_in_json(plan: Plan) -> None:
    found = plan("advise", "--gpus", "16384", "--strategy", "outlast", "--json").json
    assert found["finishes"] and found["now"]["strategy"] == "outlast"
    assert [one["what"] for one in found["items"]] == ["strategy", "interval", "spares", "policy"]
    assert all(one["why"] and one["how"] == "exact" for one in found["items"])
    assert found["items"][0]["saves_usd"] >= 0
    assert {one["key"] for one in found["assumed"]} >= {"failures", "gpu-hour", "restart"}
    endless = plan("advise", "--gpus", "16384", "--failures", "1h", "--json").json
    assert not endless["finishes"] and endless["bill"]["total"] is None
    assert any("no strategy ends this run" in one for one in endless["warnings"])


def test_bad_input(plan: Plan, tmp_path: Path) -> None:
    found = plan("advise", "--gpus", "8", "--strategy", "migrate")
    assert found.code == 2 and "needs at least two replicas" in found.err
    found = plan("advise", "--gpus", "8", "--figure", str(tmp_path / "no" / "f.png"))
    assert found.code == 2 and "there is no directory" in found.err


def test_the_tornado(plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "tornado.svg"
    for mtbf, shows in (("50kh", "difference to"), ("1h", "makes it end")):
        flags = ("--gpus", "64", "--failures", mtbf, "--replica-gpus", "64")
        assert plan("advise", *flags, "--figure", str(path)).code == 0
        assert shows in path.read_text()


def test_strategies_without_outlast_run_support_are_marked() -> None:
    found = advise(scenario_of(FAR_OUT))
    assert found.items[0].set_to == "drop"
    why = found.items[0].why
    assert "`outlast run` does this by a policy with the rung shrink" in why
    assert "outlast run" not in told(failures="50kh").items[0].why
