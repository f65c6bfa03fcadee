"""Runs whose controller dies, stops, or is cut off: another node takes over."""

from __future__ import annotations

import pytest
from tests.cluster.hosts import missing_requirement
from tests.cluster.test_several_nodes import Cluster, cluster, expected
from tests.end_to_end.conftest import wait_for

from outlast.errors import EXIT_DONE
from outlast.events import PhaseDone
from outlast.telemetry.event_store import read_events

__all__ = ["cluster", "expected"]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.process,
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement()),
]
WITHIN_S = 120.0
LEASE = ("--limit", "lease_s=3")


def wait_for_committed(cluster: Cluster, step: int) -> None:
    """Wait until a rank has committed a step: set-up, which cannot be put back, is over."""
    cluster.wait_for_steps()
    wait_for(
        lambda: any(
            isinstance(one, PhaseDone) and one.step >= step for one in read_events(cluster.run_dir)
        ),
        f"step {step}",
        WITHIN_S,
    )


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_another_node_takes_over_from_a_killed_launcher(
    cluster: Cluster, expected: dict[int, list[str]]
) -> None:
    cluster.start("2:3", 1, *LEASE)
    wait_for_committed(cluster, 5)
    cluster.hosts.run("n1", "pkill", "-KILL", "-o", "-f", "outlast run")
    ends = [cluster.end(name) for name in ("n2", "n3")]
    assert [code for code, _ in ends] == [EXIT_DONE, EXIT_DONE], ends
    assert cluster.results() == expected[2]
    assert sum("takes over as controller, term 2" in output for _, output in ends) == 1
