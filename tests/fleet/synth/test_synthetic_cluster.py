"""Synthetic clusters: consistent records and correct ground truth."""

import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.fleet.synth.cluster_checks import Seen, hosts, problems, seen

from outlast.errors import UsageError
from outlast.fleet.synth.cluster_shapes import EVENTFUL, FailureProcess, JobSize, RateEpisode
from outlast.fleet.synth.synthetic_cluster import RSC1, RSC2, make_cluster
from outlast.fleet.synth.synthetic_tables import host_lists, node_names

GPU_HOURS = pl.col("gpus") * (pl.col("t_ns") - pl.col("start_ns")) / 3.6e12


@pytest.fixture(scope="module")
def small() -> Seen:
    return seen(make_cluster("rsc1", 14, seed=3, nodes=256))


@pytest.fixture(scope="module")
def whole() -> Seen:
    return seen(make_cluster("rsc1", 7, seed=1))


def test_records_of_a_cluster_are_consistent(small: Seen) -> None:
    assert problems(small) == []


@settings(max_examples=12)
@given(
    st.integers(4, 40), st.sampled_from([0.2, 1.5]), st.integers(0, 10**6),
    st.sampled_from([RSC1, RSC2]), st.booleans(),
)  # fmt: skip
def test_any_small_cluster_is_possible(nodes, days, seed, shape, crowded) -> None:
    if crowded:
        shape = structs.replace(
            shape, utilization=1.0, preempt_share=0.8, r_f=0.3, excluding=0.3, loop_share=0.5,
            requeued=0.3, drains_per_day=0.5, resubmit_share=0.5, loop_length=4.0,
        )  # fmt: skip
    one = seen(make_cluster(shape, days, seed, nodes=nodes))
    if len(one.jobs):
        assert problems(one) == []


@pytest.mark.parametrize("gpus", [1, 8, 64])
def test_a_shape_may_have_jobs_of_one_size_and_no_failure(gpus: int) -> None:
    shape = structs.replace(RSC1, sizes=(JobSize(gpus, 1.0, 1.0),), r_f=0.0, drains_per_day=0.0)
    one = seen(make_cluster(shape, 1, 0, nodes=16))
    assert problems(one) == []
    assert set(one.jobs["gpus"]) == {gpus}
    assert len(one.outages) == len(one.truth.failed) == one.truth.r_f == 0


def test_the_same_seed_gives_the_same_cluster(small: Seen) -> None:
    again = seen(make_cluster("rsc1", 14, seed=3, nodes=256))
    assert all(mine.equals(theirs) for mine, theirs in zip(small[:6], again[:6], strict=True))
    assert again.truth == small.truth
    other = seen(make_cluster("rsc1", 14, seed=4, nodes=256))
    assert not other.jobs.equals(small.jobs)
    assert other.truth.lemons.keys() != small.truth.lemons.keys()


def test_failures_come_at_the_rate_that_is_true(whole: Seen) -> None:
    truth = whole.truth
    expected = truth.r_f * truth.node_days
    large = whole.jobs.filter(pl.col("gpus") > 128)
    start = pl.col("start_ns").clip(lower_bound=truth.since_ns)
    node_days = large.select((pl.col("nodes") * (pl.col("t_ns") - start)).sum()).item() / 86400e9
    assert node_days == pytest.approx(truth.node_days)
    failed = [one for one in truth.failed if one.gpus > 128]
    assert len(failed) == truth.failures_large
    assert abs(len(failed) - expected) < 4 * math.sqrt(expected)
    assert truth.r_f == pytest.approx(6.5e-3, rel=0.1)


def test_rates_of_all_nodes_add_up_over_clusters() -> None:
    """Many failures: a rate that is 10 % off would be seen."""
    shape = structs.replace(RSC2, r_f=0.1, lemon_share=0.05, lemon_factors=(4.0, 8.0))
    found = [make_cluster(shape, 28, seed, nodes=128)[1] for seed in range(3)]
    expected = sum(one.r_f * one.node_days for one in found)
    counted = sum(one.failures_large for one in found)
    assert expected > 250
    assert abs(counted - expected) < 4 * math.sqrt(expected)
    of_lemons = [one.node in truth.lemons for truth in found for one in truth.failed]
    share = 0.05 * 6 / 1.0  # 5 % of the nodes fail 6 times as often as the fleet
    assert np.mean(of_lemons) == pytest.approx(share, abs=0.1)


def test_shares_are_those_of_the_paper(whole: Seen) -> None:
    many = len(whole.jobs)
    states = {
        state: count / many for state, count in whole.jobs.group_by("state").len().iter_rows()
    }
    assert states["COMPLETED"] == pytest.approx(0.60, abs=0.03)
    assert states["FAILED"] == pytest.approx(0.24, abs=0.02)
    assert states["PREEMPTED"] == pytest.approx(0.10, abs=0.03)
    assert states["REQUEUED"] == pytest.approx(0.02, abs=0.005)
    assert states["TIMEOUT"] == pytest.approx(0.006, abs=0.002)
    assert states["OUT_OF_MEMORY"] == pytest.approx(0.001, abs=0.0005)
    assert states["NODE_FAIL"] == pytest.approx(0.001, abs=0.0006)
    gpus = whole.jobs["gpus"].to_numpy()
    hours = whole.jobs.select(GPU_HOURS).to_series().to_numpy()
    assert (gpus <= 8).mean() > 0.85
    assert hours[gpus <= 8].sum() < 0.10 * hours.sum()
    assert hours[gpus >= 256].sum() > 0.55 * hours.sum()
    assert (gpus == 1).mean() > 0.40
    submitted = whole.jobs.group_by("job").agg(pl.col("submit_ns").min())
    new = submitted.filter(pl.col("submit_ns") >= whole.truth.since_ns)
    assert len(new) / 7 == pytest.approx(7200, rel=0.1)
    assert set(whole.jobs["gpus"]) == {size.gpus for size in RSC1.sizes}
    assert hours.sum() / (7 * 24 * 16384) == pytest.approx(0.83, abs=0.15)


def test_each_failed_attempt_has_its_cause_and_its_findings(small: Seen) -> None:
    of = {(row["job"], row["attempt"]): row for row in small.jobs.iter_rows(named=True)}
    unseen = 0
    for one in small.truth.failed:
        row = of[one.job, one.attempt]
        assert (row["state"], row["gpus"], row["t_ns"]) == (one.state, one.gpus, one.t_ns)
        assert one.node in hosts(row["hosts"])
        assert row["failed_node"] == (one.node if one.state == "NODE_FAIL" else "")
        near = small.findings.filter(
            (pl.col("node") == one.node)
            & (pl.col("severity") == "now")
            & pl.col("t_ns").is_between(one.t_ns - 600 * 10**9, one.t_ns + 300 * 10**9)
        )
        unseen += not one.detected
        ends_with_it = one.t_ns + 300 * 10**9 < small.truth.until_ns
        if one.detected and ends_with_it:
            assert one.cause in near["symptom"].to_list()
        if not one.detected:
            assert one.cause not in near["symptom"].to_list()
    assert 0 < unseen < len(small.truth.failed) / 2


def test_a_new_check_sees_nothing_before_it_is_there(whole: Seen) -> None:
    (added,) = whole.checks.iter_rows(named=True)
    assert added["symptom"] == "services"
    found = whole.findings.filter(pl.col("symptom") == "services")
    assert len(found) > 0
    assert found["t_ns"].min() >= added["t_ns"] - 300 * 10**9
    before = [
        one for one in whole.truth.failed if one.cause == "services" and one.t_ns < added["t_ns"]
    ]
    assert not any(one.detected for one in before)
    hidden = [one for one in before if one.state == "FAILED"]
    assert not any(one.counted for one in hidden)


def test_causes_ebb_and_flow() -> None:
    shape = structs.replace(EVENTFUL, r_f=0.2, lemon_share=0.0)
    truth = make_cluster(shape, 20, 0, nodes=256)[1]
    links = [
        (one.t_ns - truth.since_ns) / 86400e9 for one in truth.failed if one.cause == "ib-link"
    ]
    spike = sum(15 <= day < 17 for day in links)
    assert spike > 2 * (len(links) - spike) / 9  # two days of twenty, six times as many
    mounts = [one for one in truth.failed if one.cause == "filesystem"]
    assert {one.detected for one in mounts if one.t_ns < truth.since_ns + 7 * 86400e9} == {False}
    assert {one.detected for one in mounts if one.t_ns > truth.since_ns + 7 * 86400e9} == {True}


def test_cascades_are_preemptions_by_what_failed_before(whole: Seen) -> None:
    of = {(row["job"], row["attempt"]): row for row in whole.jobs.iter_rows(named=True)}
    failed = {(one.job, one.attempt) for one in whole.truth.failed}
    assert len(whole.truth.cascades) > 50
    lost = 0.0
    for one in whole.truth.cascades:
        victim, by = of[one.job, one.attempt], of[one.by_job, one.by_attempt]
        assert victim["state"] == "PREEMPTED"
        assert (victim["qos"], by["qos"]) in (("low", "high"), ("normal", "high"))
        assert 0 <= by["start_ns"] - victim["t_ns"] <= 60 * 10**9
        assert by["attempt"] == 0 or (one.by_job, one.by_attempt - 1) in failed
        lost += victim["gpus"] * 0.5
    assert lost == pytest.approx(whole.truth.second_order_gpu_hours)
    first = sum(
        row["gpus"] * min(1800.0, (row["t_ns"] - row["start_ns"]) / 1e9) / 3600
        for row in map(of.__getitem__, failed)
    )
    assert first == pytest.approx(whole.truth.first_order_gpu_hours)
    assert 0.05 < whole.truth.second_order_share < 0.35


def test_victims_and_their_preemptors_share_a_node(small: Seen) -> None:
    of = {(row["job"], row["attempt"]): row for row in small.jobs.iter_rows(named=True)}
    shared = [
        bool(
            set(hosts(of[one.job, one.attempt]["hosts"]))
            & set(hosts(of[one.by_job, one.by_attempt]["hosts"]))
        )
        for one in small.truth.cascades
    ]
    assert len(shared) > 10
    assert np.mean(shared) > 0.95  # a node that was to be repaired goes to nobody


def test_runs_have_the_work_that_their_attempts_kept(whole: Seen) -> None:
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for row in whole.jobs.sort("start_ns").iter_rows(named=True):
        times = (row["eligible_ns"] / 1e9, row["start_ns"] / 1e9, row["t_ns"] / 1e9)
        rows.setdefault(row["job"], []).append(times)
    assert len(whole.truth.runs) > 20
    for run in whole.truth.runs:
        attempts = sorted((one for job in run.jobs for one in rows[job]), key=lambda one: one[1])
        assert len(attempts) == run.attempts
        kept = [max(0.0, end - start - 300) // 3600 * 3600 for _, start, end in attempts]
        kept[-1] = max(0.0, attempts[-1][2] - attempts[-1][1] - 300)
        assert run.productive_s == pytest.approx(sum(kept))
        assert run.wall_s == pytest.approx(attempts[-1][2] - attempts[0][0])
        assert run.ettr == pytest.approx(run.productive_s / run.wall_s)
        assert 0 <= run.ettr <= 1
    high = [run.ettr for run in whole.truth.runs if run.qos == "high"]
    assert whole.truth.ettr == pytest.approx(np.mean(high))
    assert whole.truth.ettr and whole.truth.ettr > 0.8


def test_loops_crash_soon_and_often() -> None:
    shape = structs.replace(RSC1, r_f=0.05, loop_share=0.5)
    one = seen(make_cluster(shape, 4, 0, nodes=256))
    assert one.truth.loops
    for loop in one.truth.loops:
        mine = one.jobs.filter(pl.col("job") == loop.job)
        assert mine.filter(pl.col("state") == "FAILED").height >= 1
        assert loop.attempts >= 1
        assert loop.preempted >= 0
    assert max(loop.attempts for loop in one.truth.loops) >= 5


def test_repairs_go_with_outages(small: Seen) -> None:
    assert len(small.outages) > 20
    swaps = small.repairs.filter(pl.col("kind") == "swap")
    ends = set(zip(small.outages["node"], small.outages["until_ns"], strict=True))
    assert set(zip(swaps["node"], swaps["t_ns"], strict=True)) <= ends
    tickets = small.repairs.filter(pl.col("kind") == "ticket")
    assert len(swaps) < len(tickets) < len(small.outages)
    assert set(tickets["node"]) <= set(small.outages["node"])


def test_pace_counts_exposure_back_and_forth() -> None:
    shape = structs.replace(
        RSC1,
        episodes=(RateEpisode("ib-link", 0.7, 0.8, 6.0), RateEpisode("gpu-driver", 0.0, 0.2, 5.0)),
    )
    pace = FailureProcess(shape, 30, {})
    times = np.linspace(-86400, 31 * 86400, 500)
    ages = [pace.age(t_s) for t_s in times]
    assert np.allclose([pace.when(age) for age in ages], times)
    assert (np.diff(ages) > 0).all()
    assert pace.age(30 * 86400.0) == pytest.approx(30 * 86400.0)  # the mean pace is kept
    peak = pace.age(23.5 * 86400) - pace.age(22.5 * 86400)
    assert peak > 1.3 * (pace.age(16.5 * 86400) - pace.age(15.5 * 86400))


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 59), min_size=1, unique=True), min_size=1, max_size=8))
def test_host_lists_are_read_back(lists: list[list[int]]) -> None:
    named = node_names("c", 60)
    held = np.concatenate(lists).astype(np.int32)
    many = np.array([len(each) for each in lists])
    found = host_lists(named, held, np.cumsum(many) - many, many)
    assert [hosts(text) for text in found] == [[named[n] for n in sorted(each)] for each in lists]


@pytest.mark.parametrize(
    ("shape", "days", "nodes"),
    [("rsc3", 1, None), ("rsc1", 0, None), ("rsc1", float("nan"), None), ("rsc1", 1, 2)],
)
def test_impossible_shapes_are_refused(shape: str, days: float, nodes: int | None) -> None:
    with pytest.raises(UsageError):
        make_cluster(shape, days, 0, nodes)
    with pytest.raises(UsageError, match="utilization"):
        make_cluster(structs.replace(RSC1, utilization=2.0), 1)
