"""Losses of two hosts, in turn and together, of one failure domain and of two."""

from __future__ import annotations

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import ON_HOSTS, Undisturbed
from tests.cluster.test_host_faults import must_be_equal

from outlast.errors import EXIT_DONE
from outlast.events import Decided, Note, PhaseDone

pytestmark = ON_HOSTS
STEPS = "80"
RACKS = {"n1": "rack1", "n2": "rack1", "n3": "rack2", "n4": "rack2", "n5": "rack1", "n6": "rack2"}
HOSTS = len(RACKS)
LOSSES = {
    "in a row": (("n2",), ("n3",)),
    "at once in two domains": (("n2", "n3"),),
    "a domain at once": (("n3", "n4"),),
}


@pytest.fixture(scope="module")
def expected(undisturbed: Undisturbed) -> list[str]:
    return undisturbed(4)


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
def test_no_committed_step_is_lost_with_two_hosts_that_are_not_partners(
    losses: tuple[tuple[str, ...], ...], cluster: Cluster, expected: list[str]
) -> None:
    hold, topology = cluster.folder / "hold", cluster.folder / "topology"
    hold.touch()
    topology.write_text("".join(f"{host} {rack}\n" for host, rack in RACKS.items()))
    flags = ("--limit=lease_s=3", f"--topology={topology}")
    cluster.start("4:6", 1, *flags, job=(STEPS, "ddp", str(hold)))
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 20, "step 20")
    for hosts in losses:
        for host in hosts:
            cluster.hosts.power_off(host)
        cluster.wait_for_steps(cluster.generations() + 1)
    hold.unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    must_be_equal(cluster, expected)
    found = cluster.events()
    replaced = [worker for one in found if isinstance(one, Decided) for worker in one.replaced]
    assert len(replaced) == 2
    assert all(one.committed_steps_lost == 0 for one in cluster.summary().incidents)
    assert not [one.text for one in found if isinstance(one, Note) and "domain" in one.text]
