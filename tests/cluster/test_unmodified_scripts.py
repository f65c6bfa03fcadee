"""A script that never imports outlast, on hosts: restarts of all ranks, and hosts that are lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import ON_HOSTS
from tests.end_to_end.conftest import wait_for

from outlast.errors import EXIT_DONE, EXIT_GAVE_UP, EXIT_INTERRUPTED
from outlast.events import Decided

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


def start(cluster: Cluster, *flags: str) -> None:
    """Start a script on both hosts, and wait until all of its ranks have met."""
    script = cluster.folder / "plain.py"
    script.write_text(SCRIPT)
    cluster.out.mkdir()
    (cluster.folder / "hold").touch()
    cluster.start("2", 2, *LEASE, *flags, job=(), script=script)
    wait_for_attempt(cluster, 0)


def wait_for_attempt(cluster: Cluster, attempt: int) -> None:
    words = [cluster.out / f"{attempt}-{rank}" for rank in range(4)]
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
    start(cluster, "--max-restarts", "3")
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
