"""Boundaries of the analyses: windows, adjacent jobs, clusters and ties."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from msgspec.structs import replace
from tests.fleet.job_attempts import at_ns, attempt, failed, of
from tests.fleet.small_clusters import DAY_NS, HOUR, T0, S, cluster, finding, job

from outlast.fleet.analysis import failure_attribution
from outlast.fleet.analysis.confidence_intervals import bootstrap_interval
from outlast.fleet.analysis.exposure import node_inventory
from outlast.fleet.analysis.failure_attribution import (
    attribute_failures,
    attribute_to_nodes,
    merge_simultaneous,
    worst_nodes,
)
from outlast.fleet.analysis.failure_rates import (
    failure_rate,
    mttf,
    rates_by_cause,
    rates_of_new_checks,
)
from outlast.fleet.analysis.goodput_loss import loss_by_size, lost_goodput, restarted_attempts
from outlast.fleet.analysis.job_runs import job_runs, jobs_by_size, jobs_by_state
from outlast.fleet.analysis.measured_ettr import measured_ettr
from outlast.fleet.analysis.outages import down_times, outage_rate
from outlast.fleet.record_tables import NAMES, Tables
from outlast.fleet.synth import synthetic_cluster
from outlast.log_records import CheckAdded, NodeSeen, Outage


def named(found: failure_attribution.AttributedFailures) -> list[str]:
    return sorted(found.failures["job"].to_list())


def test_a_window_has_its_first_moment_and_not_its_last() -> None:
    ends = {"before": -1 / 3600, "first": 0.0, "last": 24 - 1 / 3600, "after": 24.0}
    jobs = [job(name, end=end, state="NODE_FAIL") for name, end in ends.items()]
    found = cluster(*jobs, days=1)
    infra = attribute_failures(found)
    assert named(infra) == ["first", "last"]
    assert jobs_by_state(found, infra).select("hw", "jobs").rows() == [(True, 2)]
    assert jobs_by_size(found)["jobs"].sum() == 2
    assert failure_rate(found, infra, above_gpus=0).failures == 2


def test_a_job_that_died_at_once_keeps_its_own_cause() -> None:
    """Of no length, or when the next one on the node began; that one is blamed alone."""
    short = job("short", hours=0, state="FAILED")
    assert named(attribute_failures(cluster(short, finding()))) == ["short"]
    first, second = job("1", state="FAILED"), job("2", end=2.05, hours=0.05, state="FAILED")
    assert named(attribute_failures(cluster(first, second, finding()))) == ["2"]
    assert named(attribute_failures(cluster(first, short, finding()))) == ["short"]


def test_the_windows_before_and_after_a_check_have_equal_length() -> None:
    check = CheckAdded(t_ns=T0 + 5 * DAY_NS, cluster="c", check="x", symptom="pcie")
    days = {1: "too early", 3: "first", 4: "second", 5: "third", 6: "fourth", 7: "too late"}
    jobs = [job(name, end=24 * day + 2, state="NODE_FAIL") for day, name in days.items()]
    found = cluster(*jobs, *(finding(at=24 * day + 2) for day in days), check)
    (told,) = rates_of_new_checks(found, attribute_failures(found), days=2).rows(named=True)
    assert (told["before_failures"], told["after_failures"]) == (2, 2)
    assert told["before"] == pytest.approx(1000 * 2 / (2 / 24))


def test_a_boot_that_failed_is_no_failure_of_running() -> None:
    found = cluster(job(end=20, hours=10, state="BOOT_FAIL"), job("2", end=40, state="NODE_FAIL"))
    infra = attribute_failures(found)
    assert named(infra) == ["1", "2"]
    assert failure_rate(found, infra, above_gpus=0).failures == 1


def test_the_projected_mttf_lies_in_its_interval() -> None:
    large = [
        job(str(nth), end=24 * nth + 24, hours=24, gpus=256, nodes=32, state="NODE_FAIL")
        for nth in range(4)
    ]
    found = cluster(*large)
    (row,) = mttf(found, attribute_failures(found)).rows(named=True)
    assert row["projected_low_h"] < row["projected_h"] == pytest.approx(24)
    assert row["projected_h"] < row["projected_high_h"]
    assert row["low_h"] < row["mttf_h"] < row["high_h"]


def test_dispersion_by_hand() -> None:
    """Three failures in one of three like clusters: C/(C - 1) sum (f - r x)^2 / (r sum x)."""
    found = bootstrap_interval(np.array([3.0, 0, 0]), np.array([10.0, 10, 10]))
    assert found.dispersion == pytest.approx(3 / 2 * (4 + 1 + 1) / 3)


def test_outages_and_nodes_reach_over_a_window() -> None:
    seen = NodeSeen(t_ns=T0 - DAY_NS, cluster="c", node="n1", kind="", gpus=8, rack="", pod="")
    out = Outage(
        t_ns=T0 + 9 * DAY_NS, cluster="c", node="n1", until_ns=T0 + 30 * DAY_NS, symptom="other",
        detail="",
    )  # fmt: skip
    found = cluster(seen, out)
    assert node_inventory(found)["days"].to_list() == [10]
    assert down_times(found).select(pl.col("end_ns") - pl.col("begin_ns")).item() == DAY_NS
    assert outage_rate(found).node_days == pytest.approx(9)


def test_one_runs_lost_work_is_not_the_next_ones() -> None:
    """A run of exactly a day counts, and begins with nothing to do again."""
    found = of(attempt("1", 0, 24.9), attempt("2", 30, 54), attempt("3", 60, 83.9))
    told = measured_ettr(found, failed()).sort("job")
    assert told["job"].to_list() == ["1", "2"]
    assert told["productive_s"].to_list() == pytest.approx([24.9 * 3600 - 300, 24 * 3600 - 300])


def test_a_job_waits_from_when_it_could_start() -> None:
    """Not from when it was submitted, where both are known."""
    held = replace(attempt("1", 10, 20, eligible_h=9), submit_ns=at_ns(2))
    assert job_runs(of(held), failed())["wait_s"].to_list() == [3600]
    queued = replace(held, eligible_ns=None)
    assert job_runs(of(queued), failed())["wait_s"].to_list() == [8 * 3600]


def test_the_next_job_is_not_the_next_attempt() -> None:
    two = of(attempt("1", 0, 1, state="NODE_FAIL"), attempt("2", 2, 3, state="NODE_FAIL"))
    assert restarted_attempts(two, failed(("1", 0), ("2", 0))).collect().is_empty()
    theirs = [attempt("1", 0, 1, cluster="d"), attempt("1", 2, 3, attempt=1, cluster="d")]
    infra = pl.concat([failed(("1", 0)), failed(("1", 1)).with_columns(cluster=pl.lit("d"))])
    made = of(attempt("1", 0, 1, state="NODE_FAIL"), *theirs)
    assert restarted_attempts(made, infra).collect().is_empty()


def test_work_lost_to_a_failure_and_a_preemption_counts_once() -> None:
    jobs = [
        attempt("big", 0, 10, priority=9, hosts="n1", state="NODE_FAIL"),
        attempt("big", 10.1, 20, attempt=1, priority=9, hosts="n1"),
        attempt("small", 5, 10.1, priority=1, hosts="n1", state="PREEMPTED"),
    ]
    assert lost_goodput(of(*jobs), failed(("big", 0)))["order"].to_list() == [1, 2]
    told = lost_goodput(of(*jobs), failed(("big", 0), ("small", 0)))
    assert told["order"].to_list() == [1, 1]


def test_a_start_in_another_cluster_preempts_no_job() -> None:
    jobs = [
        attempt("big", 0, 10, priority=9, hosts="n1", state="NODE_FAIL"),
        attempt("big", 10.1, 20, attempt=1, priority=9, hosts="n1"),
        attempt("small", 5, 10.1, priority=1, hosts="n[1-2]", nodes=2, state="PREEMPTED"),
    ]
    there = attempt("there", 10.1, 20, priority=50, hosts="n[1-2]", nodes=2)
    infra = failed(("big", 0))
    assert lost_goodput(of(*jobs, there), infra)["job"].to_list() == ["big"]
    theirs = [replace(one, cluster="d", hosts="n9") for one in jobs]
    either = pl.concat([infra, infra.with_columns(cluster=pl.lit("d"))])
    told = lost_goodput(of(*jobs, *theirs, replace(there, cluster="d")), either)
    assert told.select("cluster", "job", "by_job").rows() == [
        ("c", "big", None), ("d", "big", None), ("c", "small", "big"), ("d", "small", "big"),
    ]  # fmt: skip


def test_failures_ten_minutes_apart_are_one_and_later_ones_another() -> None:
    jobs = [
        job(str(at), end=2 + at / 3600, state="NODE_FAIL", failed_node="n1")
        for at in (0, 600, 1201)
    ]
    found = cluster(*jobs)
    told = (
        merge_simultaneous(attribute_to_nodes(found, worst_nodes(attribute_failures(found))))
        .collect()
        .sort("t_ns")
    )
    assert told["t_ns"].to_list() == [T0 + 2 * HOUR, T0 + 2 * HOUR + 1201 * S]


def test_the_node_with_the_worst_finding_is_to_blame_alone() -> None:
    found = cluster(
        job(hosts="n[1-3]", nodes=3, state="NODE_FAIL"),
        finding("n2", severity="drain"), finding("n1"), finding("n3", severity="warn"),
    )  # fmt: skip
    told = attribute_to_nodes(found, worst_nodes(attribute_failures(found))).collect()
    assert told.select("node", "weight", "named").rows() == [("n1", 1.0, True)]


def test_two_clusters_are_the_sum_of_both() -> None:
    """Nodes and jobs of both have the same names, and nothing of one is said of the other."""
    both: list[Tables] = []
    for name, seed in (("one", 3), ("two", 8)):
        made, _ = synthetic_cluster.make_cluster("rsc1-eventful", 6, seed=seed, nodes=96)
        told = {
            kind: getattr(made, kind).with_columns(cluster=pl.lit(name)) for kind in NAMES.values()
        }
        both.append(made._replace(**told))
    merged = {kind: pl.concat([getattr(one, kind) for one in both]) for kind in NAMES.values()}
    together = _figures(both[0]._replace(**merged))
    one, two = map(_figures, both)
    assert together.keys() == one.keys() | two.keys()
    for name, told in together.items():
        nothing = (0.0,) * len(told)
        pairs = zip(one.get(name, nothing), two.get(name, nothing), strict=True)
        assert told == pytest.approx([first + second for first, second in pairs]), name
    assert sum(told[2] for name, told in together.items() if name[0] == "lost") > 0


def _figures(made: Tables) -> dict[tuple[str, ...], tuple[float, ...]]:
    """What adds up."""
    found = attribute_failures(made)
    cost = loss_by_size(lost_goodput(made, worst_nodes(found).collect().lazy()))
    frames = {
        "state": jobs_by_state(made, found).select("state", "hw", "jobs", "gpu_hours"),
        "cause": rates_by_cause(made, found).select("cause", "failures"),
        "lost": cost.select("bucket", "first_gpu_s", "second_gpu_s", "second_attempts"),
    }
    told: dict[tuple[str, ...], tuple[float, ...]] = {}
    for key, frame in frames.items():
        many = 2 if key == "state" else 1
        for row in frame.iter_rows():
            told[(key, *map(str, row[:many]))] = tuple(map(float, row[many:]))
    return told
