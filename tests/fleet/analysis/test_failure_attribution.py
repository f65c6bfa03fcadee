"""Failure attribution to findings on the job's nodes near its end."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.small_clusters import cluster, finding, job

from outlast.fleet.analysis.failure_attribution import (
    UNATTRIBUTED,
    attribute_failures,
    cooccurring_causes,
    label_failures,
)
from outlast.log_records import SEVERITIES


def failed(*records) -> pl.DataFrame:
    return attribute_failures(cluster(*records)).failures


@pytest.mark.parametrize(
    ("after_s", "counts"), [(-601, False), (-600, True), (0, True), (300, True), (301, False)]
)
def test_the_window_is_ten_minutes_before_the_end_and_five_after_it(
    after_s: float, counts: bool
) -> None:
    found = failed(job(state="FAILED"), finding(after_s=after_s))
    assert len(found) == counts


@pytest.mark.parametrize(
    ("more", "counts"),
    [
        ({}, True),
        ({"severity": "drain"}, False),
        ({"severity": "unknown"}, False),
        ({"severity": "healthy"}, False),
        ({"symptom": "oom"}, False),  # only ever a user's
        ({"node": "n2"}, False),
        ({"cluster": "another"}, False),
        ({"cluster": ""}, True),  # a node's log that does not know its cluster
    ],
)
def test_a_failed_job_is_infrastructures_where_its_node_lost_it(more: dict, counts: bool) -> None:
    assert len(failed(job(state="FAILED"), finding(**more))) == counts


def test_accounting_may_not_know_its_cluster() -> None:
    assert len(failed(job(state="FAILED", cluster=""), finding())) == 1


def test_failures_reported_by_the_scheduler_need_no_finding() -> None:
    found = failed(
        job("1", state="NODE_FAIL"),
        job("2", state="BOOT_FAIL", start_ns=None),
        job("3", state="REQUEUED", failed_node="n1"),
        job("4", state="REQUEUED"),  # a user's wish
        job("5", state="FAILED", failed_node="n1"),
        job("6", state="CANCELLED"),
        job("7", state="TIMEOUT"),
    )
    assert found["job"].to_list() == ["1", "2", "3"]
    assert found["worst"].to_list() == [None] * 3
    assert found["domains"].to_list() == ["user+system+hardware"] * 3


def test_several_causes_are_kept_the_worst_and_then_the_first_before_the_others() -> None:
    found = attribute_failures(
        cluster(
            job(state="NODE_FAIL", hosts="n[1-3]", nodes=3),
            finding(after_s=-10, check="ib", symptom="ib-link", severity="drain", code=""),
            finding("n2", after_s=20),
            finding("n3", after_s=-30, check="ipmi", code=""),
            finding("n3", after_s=-20, check="ipmi", code=""),
            finding("n3", after_s=-500, check="disk", symptom="disk", severity="warn", code=""),
        )
    )
    told = found.causes.select("rank", "node", "check", pl.col("first_s").round(6), "many").rows()
    assert told == [
        (1, "n3", "ipmi", -30.0, 2), (2, "n2", "xid", 20.0, 1), (3, "n1", "ib", -10.0, 1),
        (4, "n3", "disk", -500.0, 1),
    ]  # fmt: skip
    assert found.failures["worst"].to_list() == ["now"]
    assert found.failures["symptoms"].to_list() == [["ib-link", "pcie"]]
    assert found.failures["domains"].to_list() == ["hardware"]
    causes = label_failures(found)
    assert sorted(causes["cause"]) == ["ib-link", "pcie"]
    assert causes["share"].to_list() == [0.5, 0.5]
    assert label_failures(found, "code")["cause"].sort().to_list() == ["79", "ib", "ipmi"]


def test_where_the_failed_node_is_known_others_do_not_count() -> None:
    records = [
        job(state="NODE_FAIL", hosts="n[1-2]", nodes=2, failed_node="n2"),
        finding("n1", after_s=-5),
    ]
    assert attribute_failures(cluster(*records)).causes["node"].to_list() == ["n1"]
    records.append(finding("n2", check="ib", symptom="ib-link"))
    assert attribute_failures(cluster(*records)).causes["node"].to_list() == ["n2"]


def test_a_finding_at_the_end_of_the_next_job_is_attributed_to_it() -> None:
    first, second = job("1", state="FAILED"), job("2", end=2.06, hours=0.05, state="FAILED")
    assert failed(first, second, finding(after_s=120))["job"].to_list() == ["2"]
    assert failed(first, finding(after_s=120))["job"].to_list() == ["1"]
    # two jobs that shared the node die of one failure
    beside = job("3", end=2.05, hours=0.5, state="FAILED")
    assert failed(first, beside, finding(after_s=120))["job"].to_list() == ["1", "3"]


def test_cooccurring_causes() -> None:
    found = attribute_failures(
        cluster(
            *(job(str(at), end=at, state="NODE_FAIL") for at in (2, 4, 6, 8)),
            *(finding(at=at) for at in (2, 4, 6)),
            finding(at=4, check="ib", symptom="ib-link"),
        )
    )
    told = cooccurring_causes(found).rows()
    assert told == [("ib-link", "pcie", 1, 1, 1.0), ("pcie", "ib-link", 1, 3, 1 / 3)]
    assert label_failures(found)["cause"].to_list().count(UNATTRIBUTED) == 1


def test_a_node_that_a_list_names_twice_has_its_findings_once() -> None:
    causes = attribute_failures(cluster(job(state="FAILED", hosts="n1,n1"), finding())).causes
    assert causes.select("node", "many").rows() == [("n1", 1)]


def test_nothing_at_all_is_no_failure() -> None:
    found = attribute_failures(cluster())
    assert found.failures.is_empty() and found.causes.is_empty()
    assert label_failures(found).is_empty() and cooccurring_causes(found).is_empty()


ENDS_S = st.integers(0, 5000)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(ENDS_S, st.sampled_from(["n1", "n[1-2]", "n3", ""])), max_size=8),
    st.lists(st.tuples(ENDS_S, st.sampled_from(["n1", "n2"]), st.sampled_from(SEVERITIES))),
)
def test_it_finds_what_looking_at_every_pair_finds(jobs: list, findings: list) -> None:
    hosts = {"n1": {"n1"}, "n[1-2]": {"n1", "n2"}, "n3": {"n3"}, "": set()}
    records = [
        job(str(nth), end=2 + end_s / 3600, state="NODE_FAIL", hosts=names)
        for nth, (end_s, names) in enumerate(jobs)
    ] + [finding(node, after_s=at_s, severity=how) for at_s, node, how in findings]
    expected = {
        (str(nth), node, how)
        for nth, (end_s, names) in enumerate(jobs)
        for at_s, node, how in findings
        if node in hosts[names] and how != "healthy" and -600 <= at_s - end_s <= 300
    }
    found = attribute_failures(cluster(*records))
    assert set(found.causes.select("job", "node", "severity").rows()) == expected
    assert len(found.failures) == len(jobs)
