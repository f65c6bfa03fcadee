"""`outlast roll`: hosts leave a run and come back in turn, that of the controller included."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from tests.cluster.cluster import WITHIN_S, Cluster
from tests.cluster.conftest import ON_HOSTS, Undisturbed
from tests.end_to_end.conftest import wait_for

from outlast.errors import EXIT_DONE, EXIT_USER_ERROR
from outlast.events import Decided, NodeReleased, Note, PhaseDone
from outlast.launch.notices import drain_requests, roll_record

pytestmark = ON_HOSTS
HOSTS = 3
STEPS = "160"
LEASE = "--limit=lease_s=3"


@pytest.fixture(scope="module")
def expected(undisturbed: Undisturbed) -> list[str]:
    return undisturbed(4, steps=STEPS)


def begin(cluster: Cluster) -> None:
    """Start a run with a spare host, whose steps take 0.4 s until `hold` is removed."""
    hold = cluster.folder / "hold"
    hold.touch()
    cluster.start("2:3", 2, LEASE, job=(STEPS, "ddp", str(hold), "0.4"))
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 3, "step 3")


def roll(cluster: Cluster, *flags: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "outlast", "roll", str(cluster.run_dir), *flags]
    return subprocess.Popen(
        [*words, f"--timeout={WITHIN_S:g}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(command: subprocess.Popen[str]) -> str:
    """Return the output of a command after its end, without the frame of messages."""
    return " ".join(command.communicate(timeout=WITHIN_S)[0].replace("│", " ").split())


def await_release(cluster: Cluster, count: int) -> str:
    """Wait until so many hosts have left the run, and the launcher of the last one has ended;
    return its name."""
    cluster.wait_for_event(lambda one: isinstance(one, NodeReleased), f"release {count}", count)
    host = [one.host for one in cluster.events() if isinstance(one, NodeReleased)][count - 1]
    code, output = cluster.end(host)
    assert code == EXIT_DONE and f"{host} has left the run" in output, output
    return host


def finish(cluster: Cluster, expected: list[str]) -> None:
    """Let the job end, and check that it is equal and lost no step."""
    (cluster.folder / "hold").unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    assert cluster.results() == expected
    assert all(one.committed_steps_lost == 0 for one in cluster.summary().incidents)


def test_every_host_leaves_and_comes_back_while_a_job_trains(
    cluster: Cluster, expected: list[str]
) -> None:
    """The command is interrupted once, and goes on. The spare host leaves first, the controller's
    last."""
    begin(cluster)
    command = roll(cluster, "--all", "--pause=1s")
    hosts = [await_release(cluster, 1)]
    wait_for(
        lambda: "away" in (cluster.run_dir / "roll" / "record").read_text(), "its record", WITHIN_S
    )
    command.send_signal(signal.SIGINT)
    output = end(command)
    assert command.returncode == 130 and "the roll stands (pending: n1, n2; away: n3)" in output
    command = roll(cluster, "--all", "--pause=1s", "--json")
    cluster.start_again(hosts[0])
    for count in (2, 3):
        hosts.append(await_release(cluster, count))
        cluster.start_again(hosts[-1])
    output = end(command)
    assert command.returncode == EXIT_DONE, output
    answer = json.loads(output)
    assert hosts == ["n3", "n2", "n1"] and answer["outcome"] == "done"
    assert [one["successor"] for one in answer["hosts"]] == ["n1", "n2", "n3"]
    assert [one["ranks"] for one in answer["hosts"]] == [2, 2, 0]
    finish(cluster, expected)
    found = cluster.events()
    assert [one.rung for one in found if isinstance(one, Decided)] == ["migrate", "migrate"]
    notes = [one.text for one in found if isinstance(one, Note)]
    assert any("takes over as controller, term 2" in text for text in notes)
    assert not roll_record.exists(cluster.run_dir)
    assert drain_requests.read(cluster.run_dir, pytest.fail) == []


def test_a_fresh_host_joins_in_place_of_one_that_left_and_a_roll_is_cancelled_elsewhere(
    cluster: Cluster, expected: list[str]
) -> None:
    cluster.hosts.power_off("n3")
    hold = cluster.folder / "hold"
    hold.touch()
    cluster.start("2", 2, LEASE, "--spares=4", job=(STEPS, "ddp", str(hold), "0.4"))
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 3, "step 3")
    command = roll(cluster, "--hosts=n2,n1")
    assert await_release(cluster, 1) == "n2"
    second = roll(cluster, "--hosts=n1")
    output = end(second)
    assert second.returncode == EXIT_USER_ERROR and "another roll is running" in output
    cluster.hosts.boot("n3")
    cluster.start_again("n3")
    wait_for(
        lambda: '"successor":"n3"' in (cluster.run_dir / "roll" / "record").read_text(),
        "n3 in place of n2",
        WITHIN_S,
    )
    third = roll(cluster, "--cancel")
    output = end(third)
    assert third.returncode == EXIT_DONE and "the roll has ended" in output
    output = end(command)
    assert command.returncode == EXIT_USER_ERROR and "cancelled" in output
    del cluster.launchers["n2"]
    finish(cluster, expected)
