"""Notices on several hosts: ranks leave a host between two steps."""

from __future__ import annotations

import sys

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import ON_HOSTS, Undisturbed

from outlast.errors import EXIT_DONE
from outlast.events import Decided, PhaseDone, Reported, Warned, WorkerSpawned

pytestmark = ON_HOSTS
STEPS = "80"


@pytest.fixture(scope="module")
def expected(undisturbed: Undisturbed) -> list[str]:
    return undisturbed(4)


@pytest.mark.parametrize("cluster", [3], indirect=True)
@pytest.mark.parametrize(("source", "host"), [("file", "n2"), ("operator", "n1")])
def test_the_ranks_of_a_host_move_to_the_spare_host(
    cluster: Cluster, source: str, host: str, expected: list[str]
) -> None:
    """By a file on the host itself; and from another host, for the one that has the controller."""
    hold = cluster.folder / "hold"
    hold.touch()
    cluster.start("2:3", 2, "--notice-file=/dev/shm/leave", job=(STEPS, "ddp", str(hold)))
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 30, "step 30")
    if source == "file":
        cluster.hosts.run(
            host, "sh", "-c", "echo 100s > /dev/shm/new; mv /dev/shm/new /dev/shm/leave"
        )
    else:
        words = ("drain", str(cluster.run_dir), f"--host={host}", "--by=100s")
        answer = cluster.hosts.run("n3", sys.executable, "-m", "outlast", *words, within_s=90)
        assert "moved before phase" in answer
    cluster.wait_for_event(lambda one: isinstance(one, Decided), "the decision")
    hold.unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    assert cluster.results() == expected
    found = cluster.events()
    (decided,) = [one for one in found if isinstance(one, Decided)]
    host_of = {one.worker: one.host for one in found if isinstance(one, WorkerSpawned)}
    ranks = [0, 1] if host == "n1" else [2, 3]
    assert decided.rung == "migrate" and decided.verdict == "redo"
    assert [(seat, host_of[new]) for seat, _, new in decided.replaced] == [
        (rank, "n3") for rank in ranks
    ]
    first = next(one for one in found if isinstance(one, Reported))
    assert (first.seat in ranks, first.state, first.n) == (True, "idle", decided.n)
    (incident,) = cluster.summary().incidents
    assert incident.committed_steps_lost == 0
    assert {(one.host, one.check) for one in found if isinstance(one, Warned)} == {(host, source)}
