"""Failure rates by cause, over time, of outages, and of replaced parts."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.poisson_jobs import poisson_jobs
from tests.fleet.small_clusters import DAY_NS, HOUR, T0, cluster, finding, job

from outlast.fleet.analysis.exposure import attempts, job_node_days
from outlast.fleet.analysis.failure_attribution import attribute_failures
from outlast.fleet.analysis.failure_rates import ALL, rates_by_cause, rates_of_new_checks, swing
from outlast.fleet.analysis.failure_rates import rolling_rates as by_time
from outlast.fleet.analysis.fitted_rates import fit_rates
from outlast.fleet.analysis.outages import (
    down_times,
    outage_rate,
    outages_by_day,
    part_replacements,
    repair_time,
    rolling_outages,
)
from outlast.fleet.formats import outage_logs
from outlast.fleet.record_tables import KIND_OF, Tables, schema
from outlast.log_records import CheckAdded, NodeSeen, Outage, Repair
from outlast.theory import numerics


def outage(node: str = "n1", *, at: float, hours: float | None) -> Outage:
    begun = T0 + round(at * HOUR)
    until = None if hours is None else begun + round(hours * HOUR)
    return Outage(t_ns=begun, cluster="c", node=node, until_ns=until, symptom="other", detail="")


def seen(*names: str) -> list[NodeSeen]:
    return [
        NodeSeen(t_ns=T0, cluster="c", node=name, kind="", gpus=8, rack="", pod="")
        for name in names
    ]


def test_rates_by_cause_of_all_gpu_hours() -> None:
    found = cluster(
        job("1", end=2, hours=2, state="NODE_FAIL"),
        job("2", end=4, hours=2, state="FAILED"),
        job("3", end=6, hours=2, state="NODE_FAIL"),
        job("4", end=8, hours=2, gpus=0, state="NODE_FAIL"),  # no GPUs: not of these rates
        finding(at=2),
        finding(at=4),
        finding(at=4, symptom="ib-link", check="ib", severity="drain"),
    )
    told = rates_by_cause(found, attribute_failures(found))
    rows = {cause: row for cause, *row in told.select("cause", "failures", "share").rows()}
    assert rows == {
        "pcie": [2, pytest.approx(0.5)], "ib-link": [1, pytest.approx(1 / 6)],
        "unattributed": [1, pytest.approx(1 / 3)], ALL: [3, 1.0],
    }  # fmt: skip
    whole = told.row(by_predicate=pl.col("cause") == ALL, named=True)
    assert whole["gpu_hours"] == pytest.approx(48)
    assert whole["per_gpu_hour"] == pytest.approx(3 / 48)
    assert whole["per_gpu_hour_low"] == pytest.approx(numerics.gamma_quantile(3.5, 0.05) / 48)
    assert whole["per_gpu_hour_exact_high"] == pytest.approx(numerics.gamma_quantile(4, 0.95) / 48)


def test_no_exposure_has_no_rate() -> None:
    found = cluster(finding())
    told = rates_by_cause(found, attribute_failures(found))
    assert told.select("cause", "failures", "per_gpu_hour").rows() == [(ALL, 0, None)]


@settings(max_examples=20)
@given(st.lists(st.tuples(st.floats(-50, 300), st.floats(0, 200), st.integers(1, 500)), max_size=8))
def test_days_hold_all_the_time_of_jobs_and_no_more(spans: list) -> None:
    found = cluster(
        *(
            job(str(nth), end=end, hours=hours, nodes=nodes)
            for nth, (end, hours, nodes) in enumerate(spans)
        )
    )
    days = job_node_days(found)
    assert len(days) == 10
    whole = attempts(found).select(pl.col("node_days").sum()).collect().item()
    assert days["node_days"].sum() == pytest.approx(whole, abs=1e-6)
    assert days["node_days"].max() <= sum(nodes for *_, nodes in spans) + 1e-6


def test_a_rate_that_changes_and_the_check_that_made_it_visible() -> None:
    hours = [24 * day + 1 for day in range(5, 9)]
    found = cluster(
        job("0", end=240, hours=240),
        *(job(str(at), end=at, hours=0.01, state="FAILED") for at in hours),
        *(finding(at=at) for at in hours),
        CheckAdded(t_ns=T0 + 5 * DAY_NS, cluster="c", check="xid", symptom="pcie"),
    )
    failed = attribute_failures(found)
    told = by_time(found, failed, days=4)
    whole = told.filter(pl.col("cause") == ALL)
    assert len(whole) == 7  # ten days, in whole stretches of four
    assert whole["failures"].to_list() == [0, 0, 1, 2, 3, 4, 3]
    assert whole["per_1000_node_days"][5] == pytest.approx(1000, rel=1e-3)
    assert told.filter(pl.col("cause") == "pcie")["failures"].to_list() == [0, 0, 1, 2, 3, 4, 3]
    assert swing(told) is None  # from nothing at all
    (check,) = rates_of_new_checks(found, failed, days=4).rows(named=True)
    assert (check["before_failures"], check["after_failures"]) == (0, 4)
    assert check["after"] == pytest.approx(1000, rel=1e-3)


def test_rolling_rates_of_many_jobs_swing_little_where_nothing_changes() -> None:
    found = poisson_jobs(5, jobs=4000, days=90)
    told = by_time(found, attribute_failures(found))
    assert told["cause"].unique().sort().to_list() == [ALL, "unattributed"]
    assert 1 < (swing(told) or 0) < 2


def test_time_away_counts_once() -> None:
    found = cluster(
        *seen("n1", "n2"),
        outage(at=-5, hours=10),  # begun before the window
        outage(at=10, hours=10),
        outage(at=12, hours=2),
        outage(at=18, hours=6),
        outage("n2", at=216, hours=None),
    )
    away = down_times(found).group_by("node").agg((pl.col("end_ns") - pl.col("begin_ns")).sum())
    assert dict(away.sort("node").rows()) == {"n1": 19 * HOUR, "n2": 24 * HOUR}
    told = outage_rate(found)
    assert (told.outages, told.nodes) == (4, 2)
    assert told.down_days == pytest.approx(43 / 24)
    assert told.node_days == pytest.approx(20 - 43 / 24)
    mended = repair_time(found)
    assert (mended.ended, mended.open) == (3, 1)
    assert mended.mean_s == pytest.approx((10 + 2 + 6 + 24) / 3 * 3600)


def test_a_cluster_of_which_nothing_is_known() -> None:
    told = outage_rate(cluster())
    assert (told.outages, told.nodes, told.per_1000_node_days, told.swing) == (0, 0, None, None)
    assert repair_time(cluster()).mean_s is None
    assert part_replacements(cluster()).is_empty()


def test_swaps_by_part() -> None:
    def swap(node: str, part: str) -> Repair:
        return Repair(t_ns=T0, cluster="c", node=node, kind="swap", part=part, detail="")

    ticket = Repair(t_ns=T0, cluster="c", node="n1", kind="ticket", part="GPU", detail="")
    found = cluster(
        *seen("n1", "n2", "n3"), swap("n1", "GPU"), swap("n1", "gpu"), swap("n2", "NIC"), ticket
    )
    told = part_replacements(found).select("part", "swaps", "nodes", "per_1000_node_days").rows()
    assert told == [
        ("gpu", 2, 1, pytest.approx(2000 / 30)), ("nic", 1, 1, pytest.approx(1000 / 30)),
    ]  # fmt: skip


def test_the_faults_of_400_real_servers(traces: Path) -> None:
    """348.98 days, 584 faults: published beside the trace, and computed here."""
    reading = outage_logs.read_fault_trace(
        traces / "infinitehbd" / "fault_trace.json", outage_logs.TracedCluster(T0, nodes=400)
    )
    frames = {name: pl.LazyFrame(schema=schema(kind)) for name, kind in KIND_OF.items()}
    for part in reading:
        frames |= {name: frame.lazy() for name, frame in part.tables.items()}
    found = Tables(**frames, since_ns=T0, until_ns=T0 + round(348.9798 * DAY_NS))
    told = outage_rate(found)
    assert (told.outages, told.nodes) == (584, 400)
    assert told.per_1000_node_days == pytest.approx(4.28, abs=0.005)
    assert told.low == pytest.approx(4.00, abs=0.005)
    assert told.high == pytest.approx(4.58, abs=0.005)
    assert told.per_node_variance == pytest.approx(2.58, abs=0.005)
    assert told.swing and 11 < told.swing < 12
    assert len(rolling_outages(outages_by_day(found))) == 320
    assert repair_time(found).median_s == pytest.approx(0.85 * 86_400, rel=0.01)
    rate = fit_rates(found).rate
    assert rate.basis == "outages"
    assert rate.per_1000_node_days == pytest.approx(told.per_1000_node_days)
    assert rate.weight_failures == pytest.approx(584 / 3.44, rel=0.01)
