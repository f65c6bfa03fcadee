"""Runs on several hosts: the same results as on one, whatever fails."""

from __future__ import annotations

import pytest
from tests.cluster.cluster import JOB, STEPS, Cluster, on_one_host
from tests.cluster.conftest import ON_HOSTS
from tests.cluster.test_host_faults import must_be_equal
from tests.end_to_end.conftest import wait_for

from outlast.errors import EXIT_DONE, EXIT_GAVE_UP, EXIT_INTERRUPTED, EXIT_USAGE
from outlast.events import PhaseDone, WorkerSeated, WorkerSpawned

pytestmark = ON_HOSTS


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """Results of undisturbed runs on one host, by world size."""
    return {
        world: on_one_host(tmp_path_factory.mktemp("one"), world, str(STEPS)) for world in (2, 4)
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_hosts_end_as_one(cluster: Cluster, ranks: int, expected: dict[int, list[str]]) -> None:
    cluster.start("2", ranks)
    assert [cluster.end(name)[0] for name in ("n1", "n2")] == [EXIT_DONE, EXIT_DONE]
    assert cluster.results() == expected[2 * ranks]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_replaced_on_its_host(
    cluster: Cluster, rank: int, expected: dict[int, list[str]]
) -> None:
    cluster.start("2", 1, "--fault", f"kill:rank={rank},step=20")
    assert [cluster.end(name)[0] for name in ("n1", "n2")] == [EXIT_DONE, EXIT_DONE]
    assert cluster.results() == expected[2]
    (incident,) = cluster.summary().incidents
    assert (incident.cause, incident.committed_steps_lost) == ("killed", 0)


@pytest.mark.parametrize("cluster", [4], indirect=True)
def test_a_rank_of_a_lost_node_moves_within_its_failure_domain(
    cluster: Cluster, expected: dict[int, list[str]]
) -> None:
    """Spare nodes are n3 and n4, one in each rack."""
    topology = cluster.folder / "topology"
    topology.write_text("n1 row/rack1\nn2 row/rack2\nn3 row/rack1\nn4 row/rack2\n")
    cluster.start("2:4", 1, "--limit", "lease_s=3", "--topology", str(topology))
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 10, "step 10")
    cluster.hosts.power_off("n2")
    assert [cluster.end(name)[0] for name in ("n1", "n3", "n4")] == [EXIT_DONE] * 3
    must_be_equal(cluster, expected[2])
    found = cluster.events()
    host_of = {one.worker: one.host for one in found if isinstance(one, WorkerSpawned)}
    seated = [one for one in found if isinstance(one, WorkerSeated) and one.generation > 1]
    assert [(one.seat, host_of[one.worker]) for one in seated] == [(1, "n4")]


@pytest.mark.parametrize("cluster", [3], indirect=True)
@pytest.mark.parametrize("deed", ["power off", "kill the agent"])
def test_a_spare_node_takes_the_ranks_of_a_lost_one(
    cluster: Cluster, deed: str, expected: dict[int, list[str]]
) -> None:
    cluster.start("2:3", 1, "--limit", "lease_s=3")
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 10, "step 10")
    if deed == "power off":
        cluster.hosts.power_off("n2")
    else:
        cluster.hosts.run("n2", "pkill", "-KILL", "-o", "-f", "outlast run")
        assert cluster.end("n2")[0] != EXIT_DONE
        running = ("ps", "-e", "-o", "stat=,args=")
        wait_for(
            lambda: (
                not any(
                    str(JOB) in line and not line.startswith("Z")
                    for line in cluster.hosts.run("n2", *running).splitlines()
                )
            ),
            "the end of all workers of n2",
        )
    assert [cluster.end(name)[0] for name in ("n1", "n3")] == [EXIT_DONE, EXIT_DONE]
    must_be_equal(cluster, expected[2])
    (incident,) = cluster.summary().incidents
    assert (incident.cause, incident.rung) == ("agent_lost", "replace")
    assert incident.committed_steps_lost == 0


@pytest.mark.parametrize("by", ["the same command", "--resume"])
def test_a_request_to_stop_ends_all_nodes_and_a_command_resumes(
    cluster: Cluster, expected: dict[int, list[str]], by: str
) -> None:
    cluster.start("2", 1, "--checkpoint-every", "10", n1=("--node-rank=0",))
    cluster.wait_for_steps()
    cluster.hosts.run("n2", "pkill", "-TERM", "-o", "-f", "outlast run")
    assert [cluster.end(name)[0] for name in ("n1", "n2")] == [EXIT_INTERRUPTED] * 2
    if by == "--resume":
        cluster.resume()
    else:
        cluster.start("2", 1, "--checkpoint-every", "10")
    assert [cluster.end(name)[0] for name in ("n1", "n2")] == [EXIT_DONE, EXIT_DONE]
    assert cluster.results() == expected[2]


def test_a_cable_that_is_out_for_less_than_the_lease_costs_nothing(
    cluster: Cluster, expected: dict[int, list[str]]
) -> None:
    cluster.start("2", 1)
    cluster.wait_for_steps()
    cluster.hosts.set_link("n2", up=False)
    cluster.hosts.run("n2", "sleep", "1")
    cluster.hosts.set_link("n2", up=True)
    assert [cluster.end(name)[0] for name in ("n1", "n2")] == [EXIT_DONE, EXIT_DONE]
    assert cluster.results() == expected[2] and not cluster.summary().incidents


def test_a_long_silence_within_the_lease_costs_a_retry_at_most(
    cluster: Cluster, expected: dict[int, list[str]]
) -> None:
    """TCP alone would try again 12.6 s after the cut, when the agent has given up its lease."""
    cluster.start("2", 1, "--limit", "lease_s=16")
    cluster.wait_for_steps()
    cluster.hosts.set_silent("n2", silent=True)
    cluster.hosts.run("n2", "sleep", "8")
    cluster.hosts.set_silent("n2", silent=False)
    assert [cluster.end(name)[0] for name in ("n1", "n2")] == [EXIT_DONE, EXIT_DONE]
    assert cluster.results() == expected[2]
    for incident in cluster.summary().incidents:  # connections of ranks end after 5 s
        assert (incident.rung, incident.committed_steps_lost) == ("retry", 0)


def test_a_lost_host_without_a_spare_ends_the_run_by_name(cluster: Cluster) -> None:
    cluster.start("2", 1, "--limit", "lease_s=3", "--limit", "hello_s=20")
    cluster.wait_for_steps()
    cluster.hosts.power_off("n2")
    code, output = cluster.end("n1")
    assert code == EXIT_GAVE_UP
    assert "without an answer: n2; checkpoints are kept; resume with the same" in output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--checkpoint-every=5",), "its plan (checkpoint_every) is 5"),
        (("--policy=exact",), "its recovery policy (--policy) is exact, digest"),
        (("--nproc-per-node=2",), "its world size is 4, and that of the controller's node 2"),
        (("--rdzv-endpoint=n9:29400",), "'n9' of the endpoint does not resolve"),
        (("--token-file=/dev/null",), "has a token of 0 characters"),
        (("--run-dir=/dev/shm/run",), "its run directory is not the one"),
    ],
)
def test_bad_input_is_named_on_its_host_before_a_worker_starts(
    cluster: Cluster, flags: tuple[str, ...], says: str
) -> None:
    cluster.start("2", 1, "--limit", "hello_s=15", n2=flags)
    code, output = cluster.end("n2")
    assert code != EXIT_DONE and "n2" in output and says in output
    code, output = cluster.end("n1")
    assert code == EXIT_USAGE and "1 of 2 nodes came to the endpoint" in output
    assert not any((cluster.run_dir / "logs").iterdir())
