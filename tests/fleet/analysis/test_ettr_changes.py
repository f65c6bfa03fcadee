"""Change of ETTR when one factor is halved."""

from __future__ import annotations

import math

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.fleet.analysis.measured_ettr import (
    AS_IS,
    counterfactual_ettr,
    rate_share_without_lemons,
)
from outlast.theory.ettr import exact

RATE = 6.5 / 1000 / 86_400


def sizes(*rows: tuple[int, float, float]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=["bucket", "nodes", "wait_s"], orient="row")


def by_change(found: pl.DataFrame) -> dict[str, float]:
    return dict(found.select("change", "ettr").iter_rows())


def test_the_papers_16000_gpus() -> None:
    """One run on 2,000 nodes at an hour's interval: about 0.7; at five minutes: 0.93."""
    hourly = by_change(counterfactual_ettr(sizes((16_384, 2000, 60)), RATE))
    often = by_change(counterfactual_ettr(sizes((16_384, 2000, 60)), RATE, interval_s=300))
    assert hourly[AS_IS] == pytest.approx(0.7, abs=0.03)
    assert often[AS_IS] == pytest.approx(0.93, abs=0.02)


def test_each_change_is_the_exact_form() -> None:
    found = by_change(counterfactual_ettr(sizes((1024, 128, 600)), RATE, cost_s=10))
    mtbf_s = 1 / (128 * RATE)
    terms = {"init_s": 300, "queue_s": 600, "cost_s": 10}
    assert found[AS_IS] == exact(3600, mtbf_s, **terms)
    assert found["half the failure rate"] == exact(3600, 2 * mtbf_s, **terms)
    assert found["half the start"] == exact(3600, mtbf_s, **{**terms, "init_s": 150})
    assert found["half the checkpoint interval"] == exact(1800, mtbf_s, **terms)
    assert found["half the wait"] == exact(3600, mtbf_s, **{**terms, "queue_s": 300})


def test_saving_too_often_loses() -> None:
    found = counterfactual_ettr(sizes((8, 1, 0)), RATE, cost_s=600)
    assert found.filter(pl.col("change") == "half the checkpoint interval")["gained"][0] < 0


def test_without_lemons() -> None:
    ranking = pl.DataFrame(
        {"lemon": [True, False, False], "failures": [9.0, 1, 0], "node_days": [20.0, 25, 25]}
    )
    left = rate_share_without_lemons(ranking)
    assert left == pytest.approx((1 / 50) / (10 / 70))
    found = by_change(counterfactual_ettr(sizes((1024, 128, 600)), RATE, without_lemons=left))
    mtbf_s = 1 / (128 * RATE * (left or 0))
    assert found["without the lemons"] == pytest.approx(
        exact(3600, mtbf_s, init_s=300, queue_s=600)
    )
    assert rate_share_without_lemons(ranking.filter("lemon")) is None
    assert rate_share_without_lemons(ranking.with_columns(failures=0.0)) is None


def test_without_failures_nothing_is_gained() -> None:
    found = counterfactual_ettr(sizes((8, 1, 60)), 0.0)
    assert found["ettr"].to_list() == [1.0] * 6 and found["gained"].to_list() == [0.0] * 6
    assert found["mtbf_s"].to_list() == [math.inf] * 6
    assert len(counterfactual_ettr(sizes().cast(pl.Float64), RATE)) == 0


def test_other_factors_are_named_in_the_rows() -> None:
    changes = counterfactual_ettr(sizes((8, 1, 60)), RATE, factor=0.25)["change"].to_list()
    assert "0.25 times the failure rate" in changes


@pytest.mark.parametrize("name", ["factor", "interval_s"])
def test_impossible_changes_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        counterfactual_ettr(sizes((8, 1, 60)), RATE, **{name: 0.0})


@settings(max_examples=30)
@given(
    nodes=st.integers(1, 20_000), wait_s=st.floats(0, 1e5), init_s=st.floats(0, 1e4),
    interval_s=st.floats(10, 1e5),
)  # fmt: skip
def test_where_saves_are_free_no_half_is_worse(
    nodes: int, wait_s: float, init_s: float, interval_s: float
) -> None:
    found = counterfactual_ettr(
        sizes((8, nodes, wait_s)), RATE, interval_s=interval_s, init_s=init_s
    )
    assert (found["gained"] >= -1e-12).all() and found["ettr"].is_between(0, 1).all()
    assert found["ettr"].to_list()[-1] >= max(found["ettr"]) - 1e-12  # all of them
