"""A host that is lost with a whole replica: the other one goes on, and takes it back."""

from __future__ import annotations

from tests.cluster.cluster import Cluster
from tests.cluster.conftest import ON_HOSTS
from tests.cluster.test_fewer_ranks import wait_until_absent
from tests.end_to_end.test_rank_units import (
    JOB,
    must_be_each_sample_once,
    must_equal_a_plain_run,
    trained,
)

from outlast.errors import EXIT_DONE
from outlast.events import PhaseDone
from outlast.telemetry.committed_history import check_run

pytestmark = ON_HOSTS
EPOCHS = 10


def test_a_host_leaves_with_its_replica(cluster: Cluster) -> None:
    """No rank of the replica can say any more which ranks need each other."""
    job = (f"--epochs={EPOCHS}", "--pace=0.3", "--clip=0.5")
    cluster.start("2", 2, "--policy=elastic", "--limit=lease_s=3", script=JOB, job=job)
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 6, "step 6")
    cluster.hosts.power_off("n2")
    wait_until_absent(cluster, 2, 3)
    cluster.hosts.boot("n2")
    cluster.start_again("n2")
    wait_until_absent(cluster)
    assert set(cluster.codes().values()) == {EXIT_DONE}
    assert check_run(cluster.run_dir) == []
    incidents = cluster.summary().incidents
    assert [one.rung for one in incidents] == ["shrink", "regrow"]
    assert {one.committed_steps_lost for one in incidents} == {0}
    steps = trained(cluster.out)
    must_be_each_sample_once(steps, 4, epochs=EPOCHS)
    must_equal_a_plain_run(cluster.out, steps, 4, 0.5)
