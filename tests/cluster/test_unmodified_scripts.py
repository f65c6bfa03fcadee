"""A script that never imports outlast, on hosts: restarts of all ranks, and hosts that are lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import ON_HOSTS
from tests.end_to_end.conftest import wait_for

from outlast.errors import EXIT_DONE, EXIT_GAVE_UP, EXIT_INTERRUPTED
from outlast.events import AnyEvent, Decided, Note

pytestmark = ON_HOSTS
LEASE = ("--limit", "lease_s=3", "--limit", "stop_s=3")
SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
out, attempt, rank = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
(out / f"{attempt}-{rank}").write_text(f"{os.getpid()} {total.item()}")
hold = torch.ones(1)
while hold.item():
    hold.fill_((out.parent / "hold").exists())
    dist.all_reduce(hold, dist.ReduceOp.MIN)
    time.sleep(0.05)
"""


def start(cluster: Cluster, *flags: str, hosts: int = 2) -> None:
    """Start a script on all hosts, and wait until all of its ranks have met."""
    script = cluster.folder / "plain.py"
    script.write_text(SCRIPT)
    cluster.out.mkdir()
    (cluster.folder / "hold").touch()
    cluster.start(str(hosts), 2, *LEASE, *flags, job=(), script=script)
    wait_for_attempt(cluster, 0, hosts)


def wait_for_attempt(cluster: Cluster, attempt: int, hosts: int = 2) -> None:
    words = [cluster.out / f"{attempt}-{rank}" for rank in range(2 * hosts)]
    wait_for(lambda: all(map(Path.exists, words)), f"attempt {attempt}", 120)


def test_a_killed_rank_restarts_the_ranks_of_both_hosts(cluster: Cluster) -> None:
    start(cluster, "--max-restarts", "1")
    pid = (cluster.out / "0-3").read_text().split()[0]
    cluster.hosts.run("n2", "kill", "-9", pid)
    wait_for_attempt(cluster, 1)
    (cluster.folder / "hold").unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    totals = {path.read_text().split()[1] for path in cluster.out.iterdir()}
    assert totals == {"4.0"}
    (decided,) = [one for one in cluster.events() if isinstance(one, Decided)]
    assert (decided.rung, decided.reason) == ("relaunch", "restart 1 of 1")
    assert not any(cluster.hosts.processes(name) for name in ("n1", "n2"))


def test_a_signal_to_one_launcher_ends_all_and_the_run_resumes(cluster: Cluster) -> None:
    start(cluster)
    cluster.hosts.run("n2", "pkill", "-TERM", "-o", "-f", "outlast run")
    assert set(cluster.codes().values()) == {EXIT_INTERRUPTED}
    for path in cluster.out.iterdir():
        path.unlink()
    cluster.resume()
    wait_for_attempt(cluster, 0)
    (cluster.folder / "hold").unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}


@pytest.mark.parametrize(
    ("fault", "host"), [("crash", "n2"), ("power_off", "n1"), ("silent", "n2"), ("stop", "n2")]
)
def test_a_lost_host_ends_the_run_by_name(cluster: Cluster, fault: str, host: str) -> None:
    """Where nobody starts its launcher again."""
    start(cluster, "--max-restarts", "3", "--limit", "hello_s=30")
    if fault == "silent":
        cluster.hosts.set_silent(host, silent=True)
    else:
        getattr(cluster.hosts, fault)(host)
    other = "n1" if host == "n2" else "n2"
    code, output = cluster.end(other)
    assert code == EXIT_GAVE_UP and f"the launcher of {host}" in output
    assert not cluster.hosts.processes(other)
    if fault == "stop":
        cluster.hosts.resume(host)
    if fault in ("silent", "stop"):  # its launcher runs, and notices the same
        code, output = cluster.end(host)
        assert code == EXIT_GAVE_UP and f"the launcher of {other}" in output
        assert not cluster.hosts.processes(host)


def wait_for_wait(cluster: Cluster, host: str) -> None:
    def is_wait(one: AnyEvent) -> bool:
        return isinstance(one, Note) and f"waiting for a node in place of {host}" in one.text

    cluster.wait_for_event(is_wait, f"a wait for {host}")


def end_well(cluster: Cluster, *hosts: str) -> str:
    """Let the script end; return the output of the node that decides."""
    (cluster.folder / "hold").unlink()
    ends = {name: cluster.end(name) for name in hosts}
    assert {code for code, _ in ends.values()} == {EXIT_DONE}, ends
    totals = {path.read_text().split()[1] for path in cluster.out.iterdir()}
    assert totals == {f"{2 * len(hosts)}.0"}
    assert not any(map(cluster.hosts.processes, hosts))
    return ends["n1"][1]


@pytest.mark.parametrize("fault", ["crash", "power_off", "silent", "stop"])
def test_a_lost_host_comes_back_with_the_same_command(cluster: Cluster, fault: str) -> None:
    start(cluster, "--max-restarts", "1")
    if fault == "silent":
        cluster.hosts.set_silent("n2", silent=True)
    else:
        getattr(cluster.hosts, fault)("n2")
    if fault in ("crash", "power_off"):  # after power_off, it is back before its loss is noticed
        cluster.hosts.boot("n2")
    elif fault == "silent":
        assert cluster.end("n2")[0] == EXIT_GAVE_UP
        cluster.hosts.set_silent("n2", silent=False)
    elif fault == "stop":  # its old launcher runs on later, and has the host's lock until its end
        wait_for_wait(cluster, "n2")
        cluster.hosts.resume("n2")
        assert cluster.end("n2")[0] == EXIT_GAVE_UP
    cluster.start_again("n2")
    wait_for_attempt(cluster, 1)
    output = end_well(cluster, "n1", "n2")
    assert "restart 1 of 1: the launcher of n2 has ended, or gives no sign of life" in output
    (decided,) = [one for one in cluster.events() if isinstance(one, Decided)]
    assert (decided.rung, decided.reason) == ("relaunch", "restart 1 of 1")


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_two_hosts_are_lost_at_once_and_come_back(cluster: Cluster) -> None:
    """Later than each other, and a survivor is lost in the meantime."""
    start(cluster, "--max-restarts", "1", hosts=3)
    cluster.hosts.power_off("n3")
    cluster.hosts.power_off("n2")
    cluster.hosts.boot("n3")
    cluster.start_again("n3")
    wait_for_wait(cluster, "n")
    cluster.hosts.boot("n2")
    cluster.start_again("n2")
    wait_for_attempt(cluster, 1, 3)
    output = end_well(cluster, "n1", "n2", "n3")
    assert "restart 1 of 1: the launcher of n" in output


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_a_host_is_lost_while_the_run_waits_for_another(cluster: Cluster) -> None:
    start(cluster, "--max-restarts", "1", hosts=3)
    cluster.hosts.crash("n3")
    wait_for_wait(cluster, "n3")
    cluster.hosts.crash("n2")
    for name in ("n3", "n2"):
        cluster.hosts.boot(name)
        wait_for_wait(cluster, name)
        cluster.start_again(name)
    wait_for_attempt(cluster, 1, 3)
    assert "n2 takes part in the run" in end_well(cluster, "n1", "n2", "n3")
