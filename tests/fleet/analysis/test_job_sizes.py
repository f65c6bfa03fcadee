"""Job sizes and states, by number and by GPU time."""

from __future__ import annotations

import pytest
from tests.fleet.small_clusters import cluster, finding, job

from outlast.fleet.analysis.failure_attribution import attribute_failures
from outlast.fleet.analysis.job_runs import jobs_by_size


def test_sizes_by_number_and_by_gpu_time() -> None:
    told = jobs_by_size(
        cluster(
            job("1", gpus=1),
            job("2", gpus=1),
            job("3", gpus=3, hours=2),
            job("4", gpus=64, nodes=8, hours=10, end=20),
            job("5", gpus=0),
            job("6", start_ns=None, state="CANCELLED"),
        )
    )
    assert told["gpus"].to_list() == [0, 1, 4, 64]
    assert told["jobs"].to_list() == [1, 2, 1, 1]
    assert told["gpu_hours"].to_list() == [0, 2, 6, 640]
    assert told["jobs_from"].to_list() == pytest.approx([1, 0.8, 0.4, 0.2])
    assert told["gpu_hours_share"].sum() == pytest.approx(1)


def test_no_jobs_have_no_sizes() -> None:
    assert jobs_by_size(cluster(finding())).is_empty()
    assert attribute_failures(cluster(finding())).failures.is_empty()
