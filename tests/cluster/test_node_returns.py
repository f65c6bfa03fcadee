"""Nodes that come back into a run, or join it in place of lost ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.cluster import WITHIN_S, Cluster
from tests.cluster.conftest import ON_HOSTS, Undisturbed
from tests.cluster.test_host_faults import must_be_equal
from tests.end_to_end.conftest import wait_for

from outlast.errors import EXIT_DONE, EXIT_USAGE
from outlast.events import Note, PhaseDone, WorkerSeated, WorkerSpawned, WorkerWarm

pytestmark = ON_HOSTS
HOSTS = 4
STEPS = "80"
LEASE = "--limit=lease_s=3"


@pytest.fixture(scope="module")
def expected(undisturbed: Undisturbed) -> list[str]:
    return undisturbed(2)


def begin(cluster: Cluster, nodes: str, *hosts: str, flags: tuple[str, ...] = ()) -> Path:
    """Start a run on these hosts only; return the file that keeps it from ending."""
    hold = cluster.folder / "hold"
    hold.touch()
    for name in cluster.hosts.names:
        if name not in hosts:
            cluster.hosts.power_off(name)
    cluster.start(nodes, 1, LEASE, *flags, job=(STEPS, "ddp", str(hold)))
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 20, "step 20")
    return hold


def wait_for_note(cluster: Cluster, text: str) -> None:
    cluster.wait_for_event(lambda one: isinstance(one, Note) and text in one.text, text)


def wait_for_workers(cluster: Cluster, host: str, count: int) -> None:
    """Wait until `count` workers of a host have been warm, from the start of the run on."""

    def are_warm() -> bool:
        found = cluster.events()
        own = {one.worker for one in found if isinstance(one, WorkerSpawned) and one.host == host}
        return sum(isinstance(one, WorkerWarm) and one.worker in own for one in found) >= count

    wait_for(are_warm, f"{count} warm workers of {host}", WITHIN_S)


def seats(cluster: Cluster) -> list[tuple[int, str]]:
    """Return rank and host of all workers that have got a seat after the start, in order."""
    found = cluster.events()
    host_of = {one.worker: one.host for one in found if isinstance(one, WorkerSpawned)}
    later = [one for one in found if isinstance(one, WorkerSeated) and one.generation > 1]
    return [(one.seat, host_of[one.worker]) for one in later]


@pytest.mark.parametrize("by", ["--resume", "command"])
def test_a_node_that_lost_its_power_comes_back_as_a_spare_one(
    cluster: Cluster, expected: list[str], by: str
) -> None:
    hold = begin(cluster, "2:3", "n1", "n2", "n3")
    cluster.hosts.power_off("n2")
    cluster.wait_for_steps(2)
    cluster.hosts.boot("n2")
    if by == "--resume":
        cluster.resume("n2")
    else:
        cluster.start_again("n2")
    wait_for_note(cluster, "n2 comes back into the run")
    wait_for_workers(cluster, "n2", 2)
    cluster.hosts.power_off("n3")
    hold.unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    must_be_equal(cluster, expected)
    assert seats(cluster) == [(1, "n3"), (1, "n2")]
    assert [one.committed_steps_lost for one in cluster.summary().incidents] == [0, 0]


def test_a_node_returns_with_the_policy_of_the_run_alone(
    cluster: Cluster, expected: list[str]
) -> None:
    """The file was edited meanwhile: the host is refused by name, and nothing is lost."""
    policy = cluster.folder / "mine.toml"
    policy.write_text('[default]\nrungs = ["retry", "respawn", "stop"]\n')
    flags = (f"--policy={policy}", "--checkpoint-every=20")
    hold = begin(cluster, "2", "n1", "n2", flags=flags)
    cluster.hosts.run("n2", "pkill", "-KILL", "-o", "-f", "outlast run")
    before = policy.read_text()
    policy.write_text('[default]\nrungs = ["restart", "stop"]\n')
    cluster.start_again("n2")
    code, output = cluster.end("n2")
    assert code == EXIT_USAGE
    assert "its recovery policy (--policy) is mine, digest" in output and "n2" in output
    assert "nothing was started on this node" in output
    policy.write_text(before)
    cluster.start_again("n2")
    cluster.wait_for_steps(2)
    hold.unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    must_be_equal(cluster, expected)
    (incident,) = cluster.summary().incidents
    assert (incident.rung, incident.committed_steps_lost) == ("respawn", 0)


def test_ranks_without_room_wait_for_the_return_of_their_node(
    cluster: Cluster, expected: list[str]
) -> None:
    hold = begin(cluster, "2", "n1", "n2")
    cluster.hosts.run("n2", "pkill", "-KILL", "-o", "-f", "outlast run")
    cluster.start_again("n2")
    cluster.wait_for_steps(2)
    hold.unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    must_be_equal(cluster, expected)
    assert seats(cluster) == [(1, "n2")]
    (incident,) = cluster.summary().incidents
    assert (incident.cause, incident.committed_steps_lost) == ("agent_lost", 0)


def test_the_first_controllers_node_comes_back_under_another_controller(
    cluster: Cluster, expected: list[str]
) -> None:
    hold = begin(cluster, "2:3", "n1", "n2", "n3")
    cluster.hosts.power_off("n1")
    cluster.wait_for_steps(2)
    cluster.hosts.boot("n1")
    cluster.start_again("n1")
    wait_for_note(cluster, "n1 joins the run as a spare node")
    wait_for_workers(cluster, "n1", 2)
    hold.unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    must_be_equal(cluster, expected)
    (incident,) = cluster.summary().incidents
    assert (incident.rung, incident.committed_steps_lost) == ("replace", 0)


def test_a_fresh_host_takes_the_place_of_a_lost_one(cluster: Cluster, expected: list[str]) -> None:
    """A host that has an agent, one too many, and one that differs are refused by name before."""
    hold = begin(cluster, "2:3", "n1", "n2", "n3")
    cluster.hosts.boot("n4")
    cluster.start_again("n4", "--checkpoint-every=5")
    code, output = cluster.end("n4")
    assert code == EXIT_USAGE and "its plan (checkpoint_every) is 5" in output
    cluster.start_again("n4")
    code, output = cluster.end("n4")
    assert code == EXIT_USAGE and "the run has all its nodes: n1, n2, n3" in output
    first = cluster.launchers.pop("n2")
    cluster.start_again("n2")
    code, output = cluster.end("n2")
    assert code != EXIT_DONE and "hosts/n2 is in use by pid" in output
    cluster.launchers["n2"] = first
    cluster.hosts.power_off("n3")
    cluster.start_again("n4")
    wait_for_note(cluster, "n4 joins the run as a spare node")
    wait_for_workers(cluster, "n4", 1)
    cluster.hosts.power_off("n2")
    hold.unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    must_be_equal(cluster, expected)
    assert seats(cluster) == [(1, "n4")]


def test_an_agent_that_was_cut_off_comes_back_in_its_process(
    cluster: Cluster, expected: list[str]
) -> None:
    hold = begin(cluster, "2:3", "n1", "n2", "n3")
    cluster.hosts.set_silent("n2", silent=True)
    cluster.wait_for_steps(2)
    cluster.hosts.set_silent("n2", silent=False)
    wait_for_note(cluster, "agent n2 is back in the run, without workers")
    wait_for_workers(cluster, "n2", 2)
    cluster.hosts.power_off("n3")
    hold.unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    must_be_equal(cluster, expected)
    assert seats(cluster) == [(1, "n3"), (1, "n2")]
