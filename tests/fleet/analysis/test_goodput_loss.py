"""Goodput loss of failed and preempted jobs, by hand and on constructed cascades."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.job_attempts import attempt, failed, of

from outlast.errors import UsageError
from outlast.fleet.analysis.goodput_loss import (
    PreemptionRule,
    loss_by_size,
    lost_goodput,
    preemption_cascades,
    restarted_attempts,
    total_loss,
)
from outlast.fleet.analysis.job_runs import node_fails
from outlast.log_records import JobEnded

BIG: dict[str, Any] = {"nodes": 4, "gpus": 32, "hosts": "n[1-4]", "priority": 100}


def cascade(*others: JobEnded, again_h: float = 10.1) -> list[JobEnded]:
    """A job of four nodes fails at 10 h, and begins again on others at `again_h`."""
    return [
        attempt("big", 0, 10, state="NODE_FAIL", **{**BIG, "hosts": "n[11-14]"}),
        attempt("big", again_h, 20, eligible_h=10, attempt=1, **BIG),
        *others,
    ]


def victim(job: str, end_h: float = 10.08, **more: Any) -> JobEnded:
    given_: dict[str, Any] = {"hosts": "n1", "priority": 1, "state": "PREEMPTED", **more}
    return attempt(job, 4, end_h, **given_)


def test_either_order_by_hand() -> None:
    made = of(*cascade(victim("a"), victim("b", hosts="n[2-3]", nodes=2, gpus=16)))
    found = lost_goodput(made, node_fails(made))
    assert found.select("job", "order", "by_job", "by_attempt", "lost_gpu_s").rows() == [
        ("big", 1, None, None, 1800 * 32),
        ("a", 2, "big", 1, 1800 * 8),
        ("b", 2, "big", 1, 1800 * 16),
    ]
    total = total_loss(made, found)
    assert (total.first_gpu_s, total.second_gpu_s) == (1800 * 32, 1800 * 24)
    assert total.second_share == pytest.approx(24 / 56)
    assert total.held_gpu_s == pytest.approx(3600 * (32 * 19.9 + 24 * 6.08))
    table = loss_by_size(found)
    assert table["bucket"].to_list() == [8, 16, 32]
    assert table["share"].to_list() == pytest.approx([8 / 56, 16 / 56, 32 / 56])


def test_short_attempts_lose_what_they_held() -> None:
    made = of(attempt("1", 0, 0.25, state="NODE_FAIL"), attempt("2", None, 1, state="NODE_FAIL"))
    assert lost_goodput(made, node_fails(made))["lost_gpu_s"].to_list() == [0.25 * 3600 * 8, 0]
    with_more = lost_goodput(made, node_fails(made), interval_s=360)
    assert with_more["lost_gpu_s"].to_list() == [180 * 8, 0]


@pytest.mark.parametrize(
    "other",
    [
        victim("a", hosts="n9"),  # other nodes
        victim("a", end_h=9.9),  # before it failed
        victim("a", end_h=10.13),  # after it had begun again
        victim("a", priority=100),  # not above it
        victim("a", state="CANCELLED"),
        victim("a", cluster="d"),
        victim("a", hosts=""),
    ],
)
def test_attempts_that_ended_for_another_cause_are_not_charged(other: JobEnded) -> None:
    made = of(*cascade(other))
    assert lost_goodput(made, node_fails(made))["job"].to_list() == ["big"]


def test_a_job_that_was_new_is_its_own_instigator() -> None:
    """Who takes the most of the nodes has instigated it, even if a requeued job took some."""
    new = attempt("new", 10.1, 20, priority=50, nodes=4, gpus=32, hosts="n[5-8]")
    made = of(*cascade(victim("a", hosts="n[4-8]", nodes=5, gpus=40), new))
    assert lost_goodput(made, node_fails(made))["job"].to_list() == ["big"]


def test_ties_go_to_the_nearest_then_the_highest() -> None:
    near = attempt("near", 10.09, 20, priority=5, hosts="n1")
    made = of(*cascade(victim("a"), near))
    assert "a" not in lost_goodput(made, node_fails(made))["job"].to_list()
    tied = attempt("low", 10.1, 20, priority=5, hosts="n1")
    made = of(*cascade(victim("a"), tied))
    assert "a" in lost_goodput(made, node_fails(made))["job"].to_list()


def test_a_qos_can_rank_above_a_priority() -> None:
    made = of(*cascade(victim("a", priority=1000, qos="low")))
    rank = {"low": 0, "high": 1}
    assert len(lost_goodput(made, node_fails(made))) == 1
    assert len(lost_goodput(made, node_fails(made), rule=PreemptionRule(qos_rank=rank))) == 2
    rule = PreemptionRule(qos_rank={"low": 1, "high": 0})
    assert len(lost_goodput(made, node_fails(made), rule=rule)) == 1
    assert (
        len(lost_goodput(made, node_fails(made), rule=PreemptionRule(qos_rank={"low": 0}))) == 1
    )  # "high" is not ranked


def test_without_priorities_no_victim_is_excluded() -> None:
    made = of(
        attempt("big", 0, 10, state="NODE_FAIL", hosts="n1", priority=0),
        attempt("big", 10.1, 20, attempt=1, hosts="n1", priority=0),
        victim("a", priority=0),
    )
    assert len(lost_goodput(made, node_fails(made))) == 2


def test_the_next_start_counts_even_after_one_that_never_was() -> None:
    made = of(
        attempt("big", 0, 10, state="NODE_FAIL"),
        attempt("big", None, 11, attempt=1, state="REQUEUED"),
        attempt("big", 12, 13, attempt=2),
        attempt("well", 0, 1, state="REQUEUED"),
        attempt("well", 1, 2, attempt=1),
    )
    again = restarted_attempts(made, failed(("big", 0))).collect()
    assert again.rows() == [("c", "big", 2)]


def test_nothing_lost_has_no_share() -> None:
    empty = of(attempt("1", 0, 1))
    found = lost_goodput(empty, failed())
    assert len(found) == 0 and len(loss_by_size(found)) == 0
    assert total_loss(empty, found).second_share is None
    assert total_loss(of(), lost_goodput(of(), failed())).held_gpu_s == 0


def test_impossible_windows_are_refused() -> None:
    with pytest.raises(UsageError, match="before_s"):
        lost_goodput(of(), failed(), rule=PreemptionRule(before_s=-1))
    with pytest.raises(UsageError, match="interval_s"):
        lost_goodput(of(), failed(), interval_s=0)


@settings(max_examples=25)
@given(
    starts=st.lists(
        st.tuples(st.integers(0, 900), st.integers(0, 3), st.integers(1, 3)), max_size=8
    ),
    ends=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 3)), max_size=8),
)
def test_the_best_of_all_pairs(
    starts: list[tuple[int, int, int]], ends: list[tuple[int, int]]
) -> None:
    """Against a plain search: seconds around each other, nodes from 0 to 3."""
    second_h = 1 / 3600
    begun = [
        attempt(f"s{n}", 5 + at * second_h, 9, hosts=f"n[{node}-{node + 1}]", priority=rank + 1)
        for n, (at, node, rank) in enumerate(starts)
    ]
    gone = [
        attempt(f"v{n}", 1, 5 + at * second_h, hosts=f"n[{node}-{node + 1}]", priority=1,
                state="PREEMPTED")
        for n, (at, node) in enumerate(ends)
    ]  # fmt: skip
    ours = {one.job for one in begun[::2]}
    expected = {}
    for v, (end, v_node) in zip(gone, ends, strict=True):
        fit = [
            (-(2 - abs(node - v_node)), abs(at - end), -s.priority, s.job)
            for s, (at, node, _) in zip(begun, starts, strict=True)
            if abs(node - v_node) < 2 and -60 <= at - end <= 300
        ]
        if fit and min(fit)[3] in ours:
            expected[v.job] = min(fit)[3]
    found = preemption_cascades(of(*begun, *gone), failed(*((job, 0) for job in ours)))
    assert dict(found.select("job", "by_job").iter_rows()) == expected
