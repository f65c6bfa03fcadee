"""Crash loops: jobs that fail and are requeued repeatedly."""

from __future__ import annotations

import itertools
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.job_attempts import T0_NS, at_ns, attempt, failed, of

from outlast.errors import UsageError
from outlast.fleet.analysis import goodput_loss
from outlast.fleet.analysis.goodput_loss import (
    attempts_in_loops,
    find_crash_loops,
    preemption_cascades,
)
from outlast.fleet.analysis.job_runs import node_fails
from outlast.log_records import JobEnded


def failing(job: str, ends_h: list[float], *, held_h: float = 0.1, **more: Any) -> list[JobEnded]:
    """It fails at these hours, and is still there in the end."""
    made = [
        attempt(job, end_h - held_h, end_h, attempt=n, state="NODE_FAIL", **more)
        for n, end_h in enumerate(ends_h)
    ]
    last = ends_h[-1] + 0.1
    return [*made, attempt(job, last, last + 1, attempt=len(ends_h), **more)]


def test_a_loop_and_what_it_took_from_others() -> None:
    """As in the paper: begun again 35 times, and every time two others make room."""
    ends = [10 + 0.5 * n for n in range(35)]
    big = failing("big", ends, nodes=128, gpus=1024, hosts="n[1-128]", priority=100)
    others = [
        attempt(f"{node}-{n}", 0, end + 0.09 if n == 34 else end + 0.39, hosts=node, priority=1,
                state="PREEMPTED")
        for n, end in enumerate(ends)
        for node in ("n1", "n128")
    ]  # fmt: skip
    made = of(*big, *others)
    (loop,) = find_crash_loops(made, node_fails(made)).iter_rows(named=True)
    assert (loop["job"], loop["failures"], loop["infra"], loop["gpus"]) == ("big", 35, 35, 1024)
    assert (loop["since_ns"], loop["until_ns"]) == (at_ns(10), at_ns(27))
    assert (loop["preempted"], loop["preempted_gpus"]) == (70, 560)
    assert loop["preempted_gpu_s"] == 560 * 1800
    assert loop["lost_gpu_s"] == pytest.approx(35 * 360 * 1024)


def test_preemptors_are_searched_once_for_loops_and_goodput() -> None:
    ends = [10 + 0.5 * n for n in range(6)]
    made = of(
        *failing("big", ends, hosts="n1", priority=100),
        attempt("once", 0, 30, hosts="n5", priority=100, state="NODE_FAIL"),
        attempt("once", 30.1, 40, hosts="n2", priority=100, attempt=1),
        *(attempt(f"v{end}", 0, end + 0.39, hosts="n1", priority=1, state="PREEMPTED")
          for end in ends[:-1]),
        attempt("w", 0, 30.05, hosts="n2", priority=1, state="PREEMPTED"),
    )  # fmt: skip
    infra = failed(("big", 0), ("once", 0))
    both = pl.concat([attempts_in_loops(made, infra), goodput_loss.restarted_attempts(made, infra)])
    shared = preemption_cascades(made, both)
    assert len(shared) == 6
    assert find_crash_loops(made, infra, preempted=shared).equals(find_crash_loops(made, infra))
    assert goodput_loss.lost_goodput(made, infra, preempted=shared).equals(
        goodput_loss.lost_goodput(made, infra)
    )


def test_too_few_or_too_slow_is_no_loop() -> None:
    made = of(*failing("few", [1, 2]), *failing("slow", [0.5, 30, 60, 90]))
    assert len(find_crash_loops(made, node_fails(made))) == 0
    assert find_crash_loops(made, node_fails(made), times=2)["job"].to_list() == ["few"]


def test_a_job_that_gives_up_made_one_failure_less() -> None:
    """Its last failure was followed by nothing."""
    made = of(*failing("1", [1, 2, 3])[:-1])
    assert len(find_crash_loops(made, failed())) == 0


def test_users_failures_loop_as_well() -> None:
    made = of(*(attempt("1", n, n + 0.5, attempt=n, state="FAILED") for n in range(5)))
    (loop,) = find_crash_loops(made, failed(("1", 1))).iter_rows(named=True)
    assert (loop["failures"], loop["infra"], loop["preempted"]) == (4, 1, 0)


def test_two_loops_of_one_job() -> None:
    made = of(*failing("1", [1, 2, 3, 200, 201, 202, 203]))
    assert find_crash_loops(made, failed())["failures"].to_list() == [4, 3]


def test_empty_and_impossible() -> None:
    assert len(find_crash_loops(of(), failed())) == 0
    with pytest.raises(UsageError, match="times"):
        find_crash_loops(of(), failed(), times=1)
    with pytest.raises(UsageError, match="window_s"):
        find_crash_loops(of(), failed(), window_s=0)


@settings(max_examples=25)
@given(
    ends=st.lists(st.integers(1, 100), min_size=1, max_size=12, unique=True),
    times=st.integers(2, 4),
    window_h=st.integers(1, 30),
)
def test_against_a_plain_search(ends: list[int], times: int, window_h: int) -> None:
    ends = sorted(ends)
    made = of(*failing("1", [float(one) for one in ends]), *failing("2", [50.0, 50.5, 51.0]))
    closing = [
        set(range(n - times + 1, n + 1))
        for n in range(times - 1, len(ends))
        if ends[n] - ends[n - times + 1] <= window_h
    ]
    found = find_crash_loops(made, failed(), times=times, window_s=window_h * 3600)
    mine = found.filter(found["job"] == "1").sort("since_ns")
    told = [
        ((low - T0_NS) // (3600 * 10**9), (high - T0_NS) // (3600 * 10**9), count)
        for low, high, count in mine.select("since_ns", "until_ns", "failures").iter_rows()
    ]
    covered = set().union(*closing) if closing else set()
    assert sum(count for _, _, count in told) == len(covered)
    for low, high, count in told:
        inside = [n for n, end in enumerate(ends) if low <= end <= high]
        assert len(inside) == count and set(inside) <= covered
        assert all(any({a, b} <= one for one in closing) for a, b in itertools.pairwise(inside))
