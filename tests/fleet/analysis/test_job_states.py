"""Final states of jobs, with the share of infrastructure failures."""

from __future__ import annotations

import pytest
from tests.fleet.small_clusters import cluster, finding, job

from outlast.fleet.analysis.failure_attribution import attribute_failures
from outlast.fleet.analysis.job_runs import jobs_by_state


def test_infrastructures_share_of_jobs_and_gpu_time() -> None:
    found = cluster(
        job("1"),
        job("2", state="FAILED", hosts="n2"),
        job("3", state="FAILED"),
        job("4", state="NODE_FAIL", gpus=64, nodes=8, hours=9, end=10),
        job("5", state="CANCELLED", start_ns=None),
        job("6", state="RUNNING", end=300),  # after the window
        job("7", hours=-1),
        finding(),
    )
    told = {
        (state, hw): row
        for state, hw, *row in jobs_by_state(found, attribute_failures(found)).rows()
    }
    assert set(told) == {
        ("NODE_FAIL", True), ("FAILED", True), ("FAILED", False), ("COMPLETED", False),
        ("CANCELLED", False),
    }  # fmt: skip
    jobs, share, hours, hours_share, backwards = told["NODE_FAIL", True]
    assert (jobs, pytest.approx(hours), backwards) == (1, 576, 0)
    assert (share, hours_share) == (pytest.approx(1 / 6), pytest.approx(576 / 600))
    assert told["COMPLETED", False][0] == 2 and told["COMPLETED", False][4] == 1
    assert told["CANCELLED", False][2] == 0
