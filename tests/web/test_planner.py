"""The planner's page: its answers are those of `outlast plan`, and bad queries are refused."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import cast
from urllib.parse import parse_qsl

import anyio
import numpy as np
import pytest
from starlette.datastructures import QueryParams
from starlette.requests import Request
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.plan.model.answer_values import format_quantity
from outlast.plan.model.ladder_costs import STRATEGIES, Strategy
from outlast.plan.model.measured_run import read_measured_run
from outlast.plan.model.scenario import Scenario, scenario_of
from outlast.plan.model.strategy_prediction import predict
from outlast.plan.simulate.replications import draws, run_ensemble
from outlast.plan.simulate.simulated_job import job_of
from outlast.web import planner_pages
from outlast.web.planner_answer import planner_answer
from outlast.web.planner_band import PlannerBand, SimulatedGoodput, simulated_goodput
from outlast.web.planner_curves import (
    HEIGHT,
    dollars_scale,
    draw_curves,
    goodput_scale,
    planner_curves,
)
from outlast.web.planner_link import measured_query, predicted_sentence
from outlast.web.planner_page import render_curves
from outlast.web.planner_pages import (
    SimulatedBands,
    answer_response,
    curves_response,
    page_response,
)
from outlast.web.planner_query import given_texts, parse_query

Pairs = list[tuple[str, str]]


def page(*pairs: tuple[str, str]) -> tuple[int, str]:
    response = page_response(list(pairs))
    return response.status_code, unescape(bytes(response.body).decode())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_figures_are_those_of_the_closed_forms(strategy: Strategy) -> None:
    texts = {"gpus": "4096", "failures": "20kh", "cost": "30s", "spares": "4", "restart": "20min"}
    predicted = predict(scenario_of(texts), strategy)
    found = planner_answer(parse_query({**texts, "strategy": strategy}))
    figures = {one.key: one.figure for one in found.answers}
    assert figures["goodput"] == format_quantity(predicted.outcome.goodput, "share")
    assert figures["finish"] == f"after {format_quantity(predicted.wall_s, 's')}"
    assert figures["dollars"] == format_quantity(predicted.usd, "USD")
    assert figures["interval"] == format_quantity(predicted.interval_s, "s")
    assert [line.predicted for line in found.lines if line.strategy == strategy] == [predicted]
    assert sum(row.width for row in found.shares) == pytest.approx(1.0)


def test_a_band_holds_intervals_and_spares() -> None:
    exact = planner_answer(parse_query({"failures": "50kh"}))
    assert exact.answers[0].lines[0] == "the failure rate is taken as exact"
    counted = planner_answer(parse_query({"failures": "50kh", "failures-seen": "40"}))
    low, high = re.findall(r"([0-9.]+) %", counted.answers[0].lines[0])[:2]
    assert float(low) < float(counted.answers[0].figure.split()[0]) < float(high)


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([("gpus", "nan")], "gpus nan' needs a whole number"),
        ([("cost", "1e309")], "cost 1e309' needs a number and one of ms"),
        ([("gpus", "-5")], "gpus -5' needs a whole number"),
        ([("gpus", "999999999999999")], "out of range"),
        ([("work", "999999y")], "longer than 1000y"),
        ([("gpus", "9" * 10_000)], "gpus has 10,000 characters"),
        ([("x" * 10_000, "1")], "is unknown; known are age"),
        ([("strategy", "luck")], "strategy luck is unknown; known are checkpoint-restart"),
        ([("over", "luck")], "over luck is unknown"),
        ([("gpus", "8"), ("gpus", "16")], "gpus is given twice"),
        ([("rates", "/etc/passwd")], "rates names a file"),
        ([("rack-mtbf", "1h")], "rack-mtbf takes seconds to compute"),
        ([("gpus", "1")] * 100, "100 values"),
        ([("cost", "<script>alert(1)</script>")], "needs a number"),
        ([("interval", "1min"), ("flush", "2min")], "longer than"),
        ([("failures", "1s"), ("gpus", "1M")], "into repair at once"),
    ],
)
def test_a_bad_query_is_refused_by_name(pairs: Pairs, why: str) -> None:
    status, text = page(*pairs)
    assert status == 400 and why in text and "Traceback" not in text
    raw = bytes(page_response(pairs).body)
    assert raw.count(b"<script>") == 2 and len(raw) < 40_000
    answered = answer_response(pairs)
    assert answered.status_code == 400 and b'role="alert"' in answered.body


def test_the_form_keeps_what_is_given() -> None:
    status, text = page(("gpus", "4096"), ("cost", "forever"), ("drag", "5%"))
    assert status == 400
    for value in ("4096", "forever", "5%"):
        assert f'value="{value}"' in text
    assert "<details open>" in text


def test_an_empty_value_is_the_default() -> None:
    assert given_texts([("gpus", " "), ("cost", ""), ("cost", "5s")]) == {"cost": "5s"}
    date = re.compile(r"<time .*?</time>")  # of the moment of the answer
    assert date.sub("", page(("gpus", ""))[1]) == date.sub("", page()[1])


def test_an_impossible_strategy_says_why() -> None:
    status, text = page(("gpus", "8"), ("strategy", "migrate"))
    assert status == 200 and "needs at least two replicas" in text


def test_a_run_without_end() -> None:
    pairs = [("gpus", "1M"), ("failures", "1kh"), ("strategy", "checkpoint-restart")]
    text = bytes(answer_response(pairs).body).decode()
    assert "<b>never</b>" in text
    assert not re.search(r"\b(nan|inf)\b", text)


def test_the_command_repeats_the_answer() -> None:
    _, text = page(("gpu-hour", "$3"), ("strategy", "drop"))
    assert "outlast plan compare --gpus 16384 --gpu-hour '$3'" in text


def test_the_page_loads_nothing() -> None:
    _, text = page()
    assert re.findall(r"https?://", text) == []
    assert " style=" not in text and not re.search(r"\son\w+=", text)


@pytest.mark.parametrize(
    ("over", "field", "text"), [("gpus", "gpus", "65,536"), ("failures", "failures", "20 kh")]
)
def test_curves_are_predictions_of_scenarios(over: str, field: str, text: str) -> None:
    curves = planner_curves(parse_query({"over": over, "cost": "30s"}))
    point = next(point for point in curves.points if point.text == text)
    plain = text.replace(" ", "").replace(",", "")
    scenario = scenario_of({"gpus": "16384", "cost": "30s", field: plain})
    for strategy in STRATEGIES:
        assert point.predicted[strategy].outcome.goodput == pytest.approx(
            predict(scenario, strategy).outcome.goodput, rel=1e-9
        )


@pytest.mark.parametrize(
    "texts",
    [
        {"spares": "100", "gpus": "4096"},  # more than the nodes of small jobs
        {"replica-gpus": "1024"},  # small jobs have no whole replica
        {"gpus": "8", "gpus-per-node": "8"},
        {"gpus": "999999000", "gpus-per-node": "1", "failures": "10000y"},
        {"failures": "1kh", "over": "failures"},
        {"failures": "900000y", "over": "failures"},
    ],
)
def test_curves_stay_inside_and_have_gaps(texts: dict[str, str]) -> None:
    curves = planner_curves(parse_query(texts))
    drawn = draw_curves(curves, goodput_scale()) + draw_curves(curves, dollars_scale(curves))
    places = [
        tuple(map(float, place.split(",")))
        for dots in re.findall(r'points="([^"]*)"', drawn)
        for place in dots.split()
    ]
    assert places and all(0 <= x <= 1000 and 0 <= y <= HEIGHT for x, y in places)
    assert "nan" not in drawn and "inf" not in drawn


def test_curves_have_their_table() -> None:
    text = bytes(curves_response([("spares", "100"), ("gpus", "4096")]).body).decode()
    rows = re.findall(r"<tr.*?</tr>", text, re.DOTALL)
    assert len(rows) == 11 and rows[2].count("<td") == 5 and "%" not in rows[2]
    assert "4,096" in rows[1] and rows[1].count(" %") == 5


@pytest.mark.parametrize("failures", [0, 2])
def test_the_rates_of_a_run(tmp_path: Path, failures: int) -> None:
    story = SyntheticRun(tmp_path, world=4).start().steps(50)
    for rank in range(failures):
        story.killed(rank).steps(50)
    story.end().close()
    texts = given_texts(parse_qsl(measured_query(tmp_path, price_per_hour=40.0)))
    scenario = parse_query(texts).scenario
    measured = read_measured_run(tmp_path)
    assert scenario.gpus == scenario.nodes == 4 and scenario.usd_per_gpu_hour == 10
    assert f"{scenario.step_s:.6f}s" == measured.fields["step"]
    if failures:
        own = measured.failures / measured.exposure_s
        assert scenario.failures.per_gpu_s == pytest.approx(own, rel=1e-3)
        assert scenario.failures.weight_failures == failures == measured.failures
        assert f"{scenario.pause_s:.6f}s" == measured.fields["pause"]
    else:
        published = scenario_of({"gpus": "8"}).failures.per_gpu_s
        assert 0.99 * published < scenario.failures.per_gpu_s <= published
    assert page(*texts.items())[0] == 200


def test_the_prediction_is_that_of_the_planner(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=4).start().steps(100)
    story.end().close()
    run = read_measured_run(tmp_path)
    query = parse_query(given_texts(parse_qsl(measured_query(tmp_path))))
    (shown,) = (one for one in planner_answer(query).answers if one.key == "goodput")
    measured = format_quantity(run.spent_s["work"] / sum(run.spent_s.values()), "share")
    assert predicted_sentence(run) == (
        f"plan: {shown.figure} with the rates of this run, 0 failures; without its start {measured}"
    )


def test_no_prediction_outside_the_regime(tmp_path: Path) -> None:
    SyntheticRun(tmp_path, world=4).start().steps(50).killed(1).steps(50).end().close()
    assert "outside the regime" in predicted_sentence(read_measured_run(tmp_path))


def test_a_band_is_that_of_simulated_runs() -> None:
    query = parse_query({"gpus": "4096", "failures": "50kh", "failures-seen": "40"})
    of = simulated_goodput(query.scenario, "outlast")
    assert of is not None and of.runs == 256 and of.low < of.middle < of.high < 1
    job = job_of(query.scenario, "outlast")
    ensemble = run_ensemble({"outlast": job}, draws(query.scenario, 16), seed=0)
    goodput = query.scenario.work_s / ensemble.runs["outlast"].wall_s
    assert of.low == np.quantile(goodput, 0.05, method="inverted_cdf")
    assert of.high == np.quantile(goodput, 0.95, method="inverted_cdf")
    predicted = predict(query.scenario, "outlast").outcome.goodput
    assert of.low < predicted < of.high
    small = parse_query({"gpus": "8"}).scenario
    assert simulated_goodput(small, "migrate") is None  # it needs two replicas


def test_a_band_is_drawn_behind_its_curve_and_has_gaps() -> None:
    curves = planner_curves(parse_query({"cost": "30s"}))
    texts = [point.text for point in curves.points]
    simulated = {text: SimulatedGoodput(0.2, 0.5, 1.0, 48) for text in texts if text != texts[4]}
    band = PlannerBand("drop", simulated)
    drawn = draw_curves(curves, goodput_scale(), band)
    areas = re.findall(r'<polygon class="band drop" points="([^"]*)"', drawn)
    assert len(areas) == 2 and drawn.index("<polygon") < drawn.index("<polyline")
    places = [tuple(map(float, place.split(","))) for area in areas for place in area.split()]
    assert len(places) == 2 * len(simulated)
    assert sorted({y for _, y in places}) == pytest.approx([0.0, 0.8 * HEIGHT])
    text = render_curves(curves, band, "a note")
    assert "P5 to P95 of 48 runs or more" in text and ">a note<" in text
    assert text.count("20 % to 100 %") == len(simulated) + (curves.here.text in simulated)


class _Page:
    """A request whose page leaves after some looks."""

    def __init__(self, query: str, looks: int = 1_000) -> None:
        self.query_params = QueryParams(query)
        self.looks = looks

    async def is_disconnected(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def band_of(query: str, looks: int = 1_000) -> tuple[int, str]:
    page = cast("Request", _Page(query, looks))
    response = anyio.run(SimulatedBands().band, page)
    return response.status_code, unescape(bytes(response.body).decode())


def test_a_page_that_asks_no_more_ends_its_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[Strategy] = []

    def simulate(_scenario: Scenario, strategy: Strategy) -> SimulatedGoodput:
        simulated.append(strategy)
        return SimulatedGoodput(0.2, 0.5, 1.0, 48)

    monkeypatch.setattr(planner_pages, "simulated_goodput", simulate)
    assert band_of("strategy=drop", looks=3) == (204, "")
    assert simulated == ["drop"] * 3
    status, text = band_of("strategy=drop")
    assert status == 200 and "simulated drop" in text and len(simulated) == 3 + 10
    monkeypatch.setattr(planner_pages, "BAND_S", -1.0)
    status, text = band_of("")
    assert status == 200 and "9 places not simulated" in text and "<polygon" not in text
    assert band_of("gpus=luck")[0] == 400


def test_without_numba_the_curves_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(_scenario: Scenario, _strategy: Strategy) -> None:
        raise ModuleNotFoundError(name="numba")

    monkeypatch.setattr(planner_pages, "simulated_goodput", simulate)
    status, text = band_of("")
    assert status == 200 and "it needs numba; pip install 'outlast[plan]'" in text
    assert "<polyline" in text
