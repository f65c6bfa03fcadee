"""Measured ETTR of runs, by hand and against the exact form."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.job_attempts import attempt, failed, of

from outlast.errors import UsageError
from outlast.fleet.analysis.job_runs import node_fails
from outlast.fleet.analysis.measured_ettr import (
    ettr_by_size,
    measured_ettr,
    t_95,
    top_qos,
)
from outlast.fleet.record_tables import Tables
from outlast.log_records import JobEnded
from outlast.theory.ettr import exact

RATE = 6.5 / 1000 / 86_400


def run_of(hours: list[float], *, wait_h: float = 0.0, job: str = "1", **more: Any) -> Tables:
    return of(*pieces(hours, wait_h=wait_h, job=job, **more))


def pieces(
    hours: list[float], *, wait_h: float = 0.0, job: str = "1", **more: Any
) -> list[JobEnded]:
    made, t_h = [], 0.0
    for number, held_h in enumerate(hours):
        state = "COMPLETED" if number == len(hours) - 1 else "NODE_FAIL"
        made.append(
            attempt(
                job, t_h + wait_h, t_h + wait_h + held_h, eligible_h=t_h, attempt=number,
                state=state, **more,
            )
        )  # fmt: skip
        t_h += wait_h + held_h
    return made


def test_by_hand() -> None:
    """10.5 h, a failure, 20 h, with an hour in the queue each: two starts, and 25 min again."""
    broken = run_of([10.5, 20], wait_h=1)
    (run,) = measured_ettr(broken, node_fails(broken)).iter_rows(named=True)
    lost_s = 300 + (300 + 25 * 60)
    assert run["ettr"] == pytest.approx((30.5 * 3600 - lost_s) / (32.5 * 3600))
    assert run["ettr_kept"] == pytest.approx(run["ettr"])


def test_nothing_more_is_lost_than_an_attempt_held() -> None:
    """Of three short attempts the sum of the paper forgets what was not caught up."""
    loop = run_of([0.5, 20 / 60, 24])
    (run,) = measured_ettr(loop, node_fails(loop)).iter_rows(named=True)
    wall_s = (0.5 + 20 / 60 + 24) * 3600
    assert run["ettr"] == pytest.approx(1 - (300 + 1200 + 300 + 900) / wall_s)
    assert run["ettr_kept"] == pytest.approx((24 * 3600 - 300) / wall_s)


def test_short_runs_are_left_out() -> None:
    two = of(*pieces([12, 11], job="1"), *pieces([12, 12.1], job="2"))
    assert measured_ettr(two, node_fails(two))["job"].to_list() == ["2"]
    assert len(measured_ettr(two, node_fails(two), least_s=0)) == 2


def test_top_priority_is_a_choice() -> None:
    some = of(
        *pieces([30], job="1", qos="high", priority=100),
        *pieces([30], job="2", qos="low", priority=1),
        *pieces([30], job="3", qos="low", priority=200),
        *pieces([30], job="4", qos="low", priority=2),
    )
    assert top_qos(some) == "high"
    assert measured_ettr(some, failed(), qos=["high"])["job"].to_list() == ["1"]
    assert sorted(measured_ettr(some, failed(), priority_min=50)["job"].to_list()) == ["1", "3"]
    assert top_qos(of()) is None


def test_runs_across_ids() -> None:
    again = of(
        attempt("7", 0, 20, state="NODE_FAIL"),
        attempt("8", 20.5, 40, eligible_h=20.25),
    )
    assert len(measured_ettr(again, node_fails(again))) == 0
    (run,) = measured_ettr(again, node_fails(again), across_s=3600).iter_rows(named=True)
    assert (run["attempts"], run["wait_s"]) == (2, 900)


def test_measured_and_exact_agree_on_long_runs() -> None:
    """Failures of a 128-node job at RSC-1's rate, 20 min in the queue each: within a point."""
    rng = np.random.default_rng(5)
    nodes, queue_s = 128, 1200.0
    mtbf_s = 1 / (RATE * nodes)
    made = []
    for job in range(40):
        hours = (rng.exponential(mtbf_s, 200) / 3600).tolist()
        made += pieces(hours, wait_h=queue_s / 3600, job=str(job), nodes=nodes, gpus=1024)
    some = of(*made)
    (row,) = ettr_by_size(measured_ettr(some, node_fails(some)), RATE).iter_rows(named=True)
    assert (row["bucket"], row["runs"], row["nodes"]) == (1024, 40, 128)
    truth = exact(3600, mtbf_s, init_s=300, queue_s=queue_s)
    assert row["exact"] == pytest.approx(truth)
    assert abs(row["ettr"] - truth) < 0.01
    assert abs(row["ettr_kept"] - truth) < 0.01
    assert row["low"] < truth < row["high"]
    assert abs(row["expected"] - truth) < 0.02 and row["in_regime"]


def test_no_interval_of_one_run() -> None:
    one = run_of([30])
    (row,) = ettr_by_size(measured_ettr(one, failed()), 0.0).iter_rows(named=True)
    assert row["low"] is None and row["high"] is None
    assert row["mtbf_s"] == math.inf
    assert row["exact"] == 1 and row["expected"] == pytest.approx(row["ettr"])


def test_runs_of_each_size_have_a_row() -> None:
    some = of(*pieces([30], job="1"), *pieces([15, 15], job="2", gpus=64))
    runs = measured_ettr(some, node_fails(some))
    rows = ettr_by_size(runs, RATE)
    assert rows["runs"].to_list() == [1, 1] and rows["bucket"].is_sorted()
    assert sorted(rows["ettr"]) == pytest.approx(sorted(runs["ettr"]))


def test_empty_windows_have_no_rows() -> None:
    empty = measured_ettr(of(), failed())
    assert len(ettr_by_size(empty, RATE)) == 0


@pytest.mark.parametrize(
    ("given_", "name"),
    [({"interval_s": 0}, "interval_s"), ({"init_s": -1}, "init_s"), ({"least_s": -1}, "least_s")],
)
def test_impossible_assumptions_are_refused(given_: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=name):
        measured_ettr(of(), failed(), **given_)


@pytest.mark.parametrize(
    ("freedom", "point"),
    [(1, 6.313752), (2, 2.919986), (3, 2.353363), (4, 2.131847), (10, 1.812461), (100, 1.660234)],
)
def test_student(freedom: float, point: float) -> None:
    """Against the printed table."""
    assert t_95(freedom) == pytest.approx(point, rel=3e-3)


@settings(max_examples=40)
@given(
    hours=st.lists(st.floats(0, 50), min_size=1, max_size=8),
    interval_s=st.floats(60, 20_000),
    init_s=st.floats(0, 5000),
)
def test_a_share_and_never_below_what_was_kept(
    hours: list[float], interval_s: float, init_s: float
) -> None:
    broken = run_of(hours, wait_h=0.5)
    found = measured_ettr(
        broken, node_fails(broken), interval_s=interval_s, init_s=init_s, least_s=0
    )
    for run in found.iter_rows(named=True):
        assert -1e-9 <= run["ettr_kept"] <= run["ettr"] + 1e-9 <= 1 + 2e-9
        caught_up = all(
            after * 3600 >= init_s + max(0.0, before * 3600 - init_s) % interval_s
            for before, after in itertools.pairwise(hours)
        )
        if caught_up and hours[0] * 3600 >= init_s:
            assert run["ettr"] == pytest.approx(run["ettr_kept"], abs=1e-6)
