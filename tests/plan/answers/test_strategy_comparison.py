"""Comparison of strategies on equal failures, and of a run with its prediction."""

from __future__ import annotations

import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from tests.plan.plan_command import Plan

pytest.importorskip("numba", reason="the simulator is compiled: pip install 'outlast[plan]'")

from tests.telemetry.synthetic_run import SyntheticRun

from outlast.errors import UsageError
from outlast.plan.answers.run_comparison import compare_run
from outlast.plan.answers.strategy_comparison import (
    ComparedStrategy,
    ComparisonRequest,
    StrategyComparison,
    compare,
)
from outlast.plan.model.answer_values import at_rate
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.measured_run import read_measured_run
from outlast.plan.model.scenario import resize, scenario_of
from outlast.plan.model.strategy_prediction import at_other_rate, predict, tuned_job
from outlast.plan.simulate.replications import (
    ENSEMBLE_FAILURES_MAX,
    STRATA,
    affordable,
    at_factor,
    draws,
    run_ensemble,
)
from outlast.plan.simulate.simulated_job import job_of
from outlast.process_pool import PartExecutor
from outlast.theory.strategies import RecoveryJob

BEGINS = datetime(2027, 1, 31, tzinfo=UTC)


def of(found: StrategyComparison, strategy: Strategy) -> ComparedStrategy:
    return next(one for one in found.contenders if one.strategy == strategy)


def test_it_agrees_with_theory() -> None:
    scenario = scenario_of({"gpus": "8192", "failures": "20kh", "work": "60d"})
    found = compare(scenario, ComparisonRequest(replications=320, seed=5))
    assert found.runs == 384 and found.rates == 1
    for one in found.contenders:
        assert math.fsum(one.shares.values()) == pytest.approx(1)
        if one.theory.how == "exact":
            assert one.theory.z is not None and abs(one.theory.z) < 4
            assert abs(one.theory.differs or 0.0) < 0.005
            outcome = predict(scenario, one.strategy).outcome
            lost = outcome.redo + outcome.recover  # which has the step that is broken off
            assert one.shares["redo"] + one.shares["restart"] == pytest.approx(lost, rel=0.05)
            assert one.shares["detect"] == pytest.approx(outcome.detect, rel=0.05)
    assert [one.costs.value for one in found.contenders] == sorted(
        one.costs.value for one in found.contenders
    )


def test_theory_waits_for_the_last_flush_as_runs_do() -> None:
    said = {"gpus": "8", "failures": "1000y", "work": "1d", "interval": "6h", "flush": "2h"}
    one = of(
        compare(scenario_of({**said, "drag": "50%"}), ComparisonRequest(replications=16)), "outlast"
    )
    assert abs(one.theory.differs or 0.0) < 1e-3


def test_bands_are_those_of_the_rate() -> None:
    """Where luck averages out, what is left is how unsure the rate is."""
    scenario = scenario_of({"gpus": "65536", "spares": "1000"})
    one = of(compare(scenario, ComparisonRequest(replications=640)), "checkpoint-restart")
    job = tuned_job(scenario, "checkpoint-restart")
    for quantity, share in (
        (one.goodput.high, 0.05),
        (one.goodput.value, 0.5),
        (one.goodput.low, 0.95),
    ):
        expected = at_other_rate(at_rate(scenario, share), "checkpoint-restart", job).goodput
        assert quantity == pytest.approx(expected, abs=0.03)


def test_the_same_failures() -> None:
    """Where no node is ever lost, three strategies are one and the same."""
    scenario = scenario_of({"gpus": "16384", "transient": "100%", "fatal": "0%"})
    found = compare(scenario, ComparisonRequest(replications=160))
    for name in ("drop", "migrate"):
        other = of(found, name).dearer
        assert (other.low, other.value, other.high) == (0, 0, 0)
    best = of(found, "outlast")
    assert best.memory_interval_s is None
    dearer = of(found, "checkpoint-restart").dearer
    assert dearer.low is not None and dearer.low > 0


def test_truncated_runs_are_scaled_up() -> None:
    scenario = scenario_of({"gpus": "1048576", "failures": "50kh", "work": "365d"})
    name: Strategy = "migrate"
    found = run_ensemble({name: job_of(scenario, name)}, draws(scenario, 1))
    runs = found.runs[name]
    assert runs.capped.all() and len(found.draw_of) == STRATA
    assert runs.wall_s.mean() == pytest.approx(predict(scenario, name).wall_s, rel=0.02)
    assert (runs.failures > 5 * ENSEMBLE_FAILURES_MAX).all()


def test_a_run_without_an_end_is_warned_about(plan: Plan) -> None:
    said = plan("compare", "--gpus=131072", "--failures=1%/day", "--json", "--within=90d")
    assert said.code == 0
    found = {one["strategy"]: one for one in said.json["contenders"]}
    hopeless = found["checkpoint-restart"]
    assert hopeless["takes"]["value"] is None and hopeless["endless"] == 1
    assert hopeless["in_time"] == 0 and hopeless["goodput"]["value"] == 0
    assert any("checkpoint-restart: no run will end" in one for one in said.json["warnings"])
    text = plan("compare", "--gpus=131072", "--failures=1%/day").out
    assert "never" in text and "nan" not in text


def test_rates_are_stratified_and_paid_for() -> None:
    scenario = scenario_of({"gpus": "1024"})
    factors = np.array([one.factor for one in draws(scenario, 8)])
    assert factors.mean() == pytest.approx(1, rel=0.02)  # Gamma with mean 1 and shape 2
    assert factors.std() == pytest.approx(1 / math.sqrt(2), rel=0.1)
    firsts = [one.first for one in draws(scenario, 20)]
    assert firsts == sorted(set(firsts))


def test_a_rate_is_that_of_everything_but_racks() -> None:
    said = {"gpus": "1024", "shape": "0.7", "fatal": "10%", "lemons": "5%", "rack-mtbf": "1y"}
    scenario = scenario_of({**said, "interval": "1h", "spares": "20"})
    there = at_rate(scenario, 0.95)
    job = job_of(scenario, "checkpoint-restart")
    turned = at_factor(job, there.failures.per_gpu_s / scenario.failures.per_gpu_s)
    for one, other in zip(turned, job_of(there, "checkpoint-restart"), strict=True):
        assert one == pytest.approx(other, rel=1e-12)
    assert turned.scale_s < job.scale_s and turned.rack_rate == job.rack_rate


def test_the_number_of_simulated_runs_is_bounded() -> None:
    counts: list[int] = []
    for gpus in ("1024", "131072", "1048576", "8388608"):
        scenario = scenario_of({"gpus": gpus})
        tuned: dict[Strategy, RecoveryJob] = {"migrate": tuned_job(scenario, "migrate")}
        counts.append(affordable(scenario, tuned, scenario.work_s))
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] >= 3
    assert sum(one.runs for one in draws(scenario_of({"gpus": "1024"}), 20)) >= 20 * STRATA


def test_dates(plan: Plan) -> None:
    found = compare(scenario_of({"gpus": "1024"}), ComparisonRequest(replications=16, start=BEGINS))
    best = found.contenders[0]
    assert best.finish is not None and best.finish.middle is not None
    days = (best.finish.middle - BEGINS).total_seconds() / 86400
    assert days == pytest.approx(best.takes.value / 86400)
    asked = ("compare", "--gpus=1024", "--replications=16", "--start=2027-01-31")
    assert plan(*asked, "--by=2027-02-28", "--json").json["contenders"][0]["in_time"] == 0
    assert plan(*asked, "--by=2027-12-31", "--json").json["contenders"][0]["in_time"] == 1
    text = plan(*asked, "--by=2027-12-31").out
    assert "in 334 d" in text and "2027-03-02" in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--by=2027-02-28"], "needs --start"),
        (["--by=2027-02-28", "--within=30d"], "exclude each other"),
        (["--start=soon"], "--start soon is not a date"),
        (["--start=2027-02-28", "--by=2027-02-28"], "is not after"),
        (["--start=2027-02-28T00:00+00:00", "--by=2027-03-28"], "a time zone"),
        (["--within=30"], "--within 30"),
        (["--replications=0"], "--replications 0"),
        (["--workers=0"], "--workers 0"),
        (["--figure=x.gif"], "x.gif"),
        (["--costs=3s"], "did you mean --cost?"),
    ],
)
def test_bad_input(plan: Plan, flags: list[str], says: str) -> None:
    said = plan("compare", "--gpus=1024", *flags)
    assert said.code == 2 and says in said.err and not said.out


def test_unsupported_simulations_are_refused_before_they_run() -> None:
    """Racks so large that the random numbers of their nodes would be those of other failures."""
    said = {"gpus": "2048", "rack-nodes": "200", "step": "5s"}
    with pytest.raises(UsageError, match="rack_nodes is at most 120"):
        compare(scenario_of({**said, "rack-mtbf": "1y"}), ComparisonRequest(replications=16))
    assert (
        compare(scenario_of(said), ComparisonRequest(replications=16)).runs == 16
    )  # they never fail


def test_nodes_that_never_fail_do_not_age() -> None:
    scenario = scenario_of({"gpus": "1024", "fatal": "100%", "transient": "0", "shape": "0.7"})
    one = of(compare(scenario, ComparisonRequest(replications=16)), "checkpoint-restart")
    assert one.shares["wait"] == 0 and one.failures.value > 0


def test_impossible_strategies_are_named(plan: Plan) -> None:
    said = plan("compare", "--gpus=8", "--replications=16", "--json").json
    assert {one["strategy"] for one in said["impossible"]} >= {"migrate", "drop"}
    assert {one["strategy"] for one in said["contenders"]} >= {"checkpoint-restart", "outlast"}


def test_threads_give_the_same_and_an_interruption_keeps_whole_rounds() -> None:
    scenario = scenario_of({"gpus": "1024"})
    here = compare(scenario, ComparisonRequest(replications=64))
    with ThreadPoolExecutor(2) as pool:
        there = compare(scenario, ComparisonRequest(replications=64), place=PartExecutor(pool, 8))
    assert here == there

    def stop(done: int, whole: int) -> None:
        assert whole == 4 * STRATA * 5
        if done == (2 * STRATA + 3) * 5 + 2:
            os.kill(os.getpid(), signal.SIGINT)

    cut = compare(scenario, ComparisonRequest(replications=64), on_progress=stop)
    assert cut.interrupted and cut.runs == 2 * STRATA
    assert math.isfinite(cut.contenders[0].takes.value)


# --- a real run beside its prediction ---


def test_a_run_beside_its_prediction(tmp_path: Path, plan: Plan) -> None:
    SyntheticRun(tmp_path).start().steps(50).killed(2).steps(50).end()
    said = plan("compare", f"--run={tmp_path}", "--replications=16", "--json")
    found = said.json["observed"]
    assert (found["devices"], found["steps"], found["incidents"]) == (4, 100, {"killed": 1})
    rows = {one["observed"]["name"]: one for one in found["rows"]}
    rate = rows["failures a GPU-year"]
    whole_s = 4 * found["wall_s"]
    assert rate["observed"]["value"] == pytest.approx(365 * 86400 / whole_s)
    assert rate["verdict"] == "more" and rate["predicted"]["high"] < 1
    spent = math.fsum(one["observed"]["value"] for one in found["rows"][1:])
    assert spent == pytest.approx(1)
    assert rows["restart"]["verdict"] == "more" and rows["goodput"]["at_its_rate"]
    believed = found["believed"]["value"]  # a single failure overturns little
    assert rate["predicted"]["value"] < believed < rate["observed"]["value"]
    text = plan("compare", f"--run={tmp_path}", "--replications=16").out
    assert "100 steps on 4 ranks" in text and "1 killed" in text and "more" in text


def test_a_run_without_failures_is_within(tmp_path: Path) -> None:
    SyntheticRun(tmp_path).start().steps(50, script_ms=0).end()
    scenario = scenario_of(
        {"gpus": "4", "gpus-per-node": "1", "cost": "0", "flush": "0", "memory-cost": "0"}
    )
    found = compare_run(scenario, read_measured_run(tmp_path))
    assert found.rows[0].observed.low == 0 and found.rows[0].at_its_rate is None
    assert {one.verdict for one in found.rows} == {"within"}


def test_a_run_that_is_not_there(tmp_path: Path, plan: Plan) -> None:
    said = plan("compare", f"--run={tmp_path / 'none'}")
    assert said.code == 1 and "holds no events" in said.err
    SyntheticRun(tmp_path).start().steps(3).close()  # its launcher died: what is known is said
    assert plan("compare", f"--run={tmp_path}", "--replications=16").code == 0


# --- pictures ---


@pytest.mark.parametrize("picture", ["waterfall", "fan"])
def test_pictures(tmp_path: Path, plan: Plan, picture: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "drawn.svg"
    asked = ("compare", "--gpus=1024", "--replications=16", f"--figure={path}")
    assert plan(*asked, f"--picture={picture}", "--start=2027-01-31").code == 0
    text = path.read_text()
    assert "<!-- 1,024 GPUs, llama3-405b" in text and "checkpoint-restart" in text


def test_phases_are_won_by_the_cheapest() -> None:
    pytest.importorskip("matplotlib")
    from outlast.plan.figures.scale_figures import SIMPLE, strategy_phases

    scenario = scenario_of({"gpus": "16384", "fatal": "10%", "pause": "3min"})
    found = strategy_phases(scenario, rows=2)
    column = found.gpus.index(1_048_576)
    here = resize(
        scenario_of({"gpus": "16384", "fatal": "10%", "pause": "3min", "restart": "10s"}), 1_048_576
    )
    usd = {one: predict(here, one).usd for one in SIMPLE}
    assert SIMPLE[found.winner[0, column]] == min(usd, key=lambda one: usd[one])
    assert found.winner[1, found.gpus.index(8_388_608)] == -1  # none ends


def test_where_lines_cross() -> None:
    pytest.importorskip("matplotlib")
    from outlast.plan.figures.scale_figures import ScaleLine, crossings, scale_line

    gpus = np.array([10.0, 100.0, 1000.0])
    falls, flat = np.array([0.9, 0.7, 0.1]), np.array([0.5, 0.5, 0.5])
    (found,) = crossings(ScaleLine(gpus, falls, falls, falls), ScaleLine(gpus, flat, flat, flat))
    assert found == pytest.approx((100 * 10 ** (1 / 3), 0.5))
    assert not crossings(ScaleLine(gpus, falls, falls, falls), ScaleLine(gpus, falls, falls, falls))
    at = [resize(scenario_of({"gpus": "16384"}), many) for many in (8, 1024)]
    (only,) = scale_line(at, "migrate").gpus
    assert only == 1024
    drawn = scale_line(at, "checkpoint-restart")
    assert drawn.middle[1] == pytest.approx(predict(at[1], "checkpoint-restart").outcome.goodput)
    assert (drawn.low < drawn.middle).all() and (drawn.middle < drawn.high).all()
