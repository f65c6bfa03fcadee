"""Runs whose controller dies, stops, or is cut off: another node takes over.

A row of `TAKEOVERS` breaks a run of four hosts, of which n1 is the first controller's and has
ranks, and heals it where it can. The results are those of one undisturbed host.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import ON_HOSTS, Undisturbed
from tests.cluster.host_fault_table import SHORT_S, in_save, in_step, pause
from tests.cluster.takeover_strikes import (
    kill_launcher,
    move_control_to_a_spare_node,
    owner_of,
    power_off,
    stop_launcher,
    wake_launcher,
)
from tests.cluster.test_host_faults import must_be_equal

from outlast.errors import EXIT_DONE
from outlast.events import AnyEvent, Note, Noticed, WorkerSpawned
from outlast.launch.terms.term_records import TermLedger
from outlast.launch.terms.term_store import open_term_store

pytestmark = ON_HOSTS
HOSTS = 4
STEPS = "80"
LEASE = "--limit=lease_s=3"
SAVE = "--checkpoint-every=10"


def off(*names: str) -> Callable[[Cluster], None]:
    def strike(cluster: Cluster) -> None:
        for name in names:
            power_off(cluster, name)

    return strike


def kill_first(cluster: Cluster) -> None:
    kill_launcher(cluster, "n1")


def freeze_launcher(cluster: Cluster) -> None:
    """Stop the launcher until its ranks are elsewhere."""
    before = cluster.generations()
    stop_launcher(cluster, "n1")
    cluster.wait_for_steps(before + 1)
    wake_launcher(cluster, "n1")


def blink(cluster: Cluster) -> None:
    """Stop the launcher until another one has taken over, but not beyond its lease."""
    stop_launcher(cluster, "n1")
    owner_of(cluster, 2)
    wake_launcher(cluster, "n1")


def cut_off(cluster: Cluster) -> None:
    before = cluster.generations()
    cluster.hosts.set_silent("n1", silent=True)
    cluster.wait_for_steps(before + 1)
    cluster.hosts.set_silent("n1", silent=False)


def while_the_store_is_away(cluster: Cluster) -> None:
    """The store answers again before the leases of the others end."""
    cluster.hosts.run("n4", "pkill", "-STOP", "-x", "etcd")
    power_off(cluster, "n1")
    pause(SHORT_S)
    cluster.hosts.run("n4", "pkill", "-CONT", "-x", "etcd")


def until_no_agent_has_a_lease(cluster: Cluster) -> None:
    """The store is away from before the controller's end until n2 has killed its worker."""
    cluster.hosts.run("n4", "pkill", "-STOP", "-x", "etcd")
    power_off(cluster, "n1")
    text = "its workers are killed before the lease ends"
    cluster.wait_for_event(lambda one: isinstance(one, Note) and text in one.text, text)
    pause(SHORT_S)  # those of the others, whose answers came up to a renewal later, end as well
    cluster.hosts.run("n4", "pkill", "-CONT", "-x", "etcd")


def twice(cluster: Cluster) -> None:
    before = cluster.generations()
    power_off(cluster, "n1")
    owner = owner_of(cluster, 2)
    cluster.wait_for_steps(before + 1)
    power_off(cluster, owner)


def without_ranks(cluster: Cluster) -> None:
    """Cut the power of a controller on a node without ranks; the next one saves on request."""
    power_off(cluster, move_control_to_a_spare_node(cluster))
    owner = owner_of(cluster, 3)
    words = (sys.executable, "-m", "outlast", "ckpt", "now", str(cluster.run_dir))
    with subprocess.Popen(cluster.hosts.command(owner, *words)) as saving:
        cluster.wait_for_event(
            lambda one: isinstance(one, Noticed) and one.fault.kind == "save", "the request"
        )
        (cluster.folder / "hold").unlink()  # ranks that are there already save behind it
        assert saving.wait(60.0) == EXIT_DONE


def with_a_worker(cluster: Cluster) -> None:
    spawned = [one for one in cluster.events() if isinstance(one, WorkerSpawned)]
    (pid,) = [one.pid for one in spawned if one.host == "n2"]
    power_off(cluster, "n1")
    cluster.hosts.run("n2", "kill", "-KILL", str(pid))


class Takeover(NamedTuple):
    """A fault of the controller: when it begins, what it does, and the newest term after it.

    `ranks`: of a node, of which `nodes` have ranks.
    """

    strike: Callable[[Cluster], None]
    when: Callable[[AnyEvent], bool] = in_step
    kind: str = "ddp"
    nodes: int = 2
    ranks: int = 1
    flags: tuple[str, ...] = (LEASE,)
    terms: int = 2
    causes: frozenset[str] = frozenset({"agent_lost"})
    is_rolled_back: bool = False  # from a checkpoint, with steps that are lost
    etcd: bool = False  # terms are in etcd on n4; else in the run directory, which all reach


TAKEOVERS = {
    "power off": Takeover(off("n1")),
    "killed launcher": Takeover(kill_first),
    "frozen within its lease": Takeover(blink, causes=frozenset()),
    "power off of a node without ranks": Takeover(
        without_ranks, flags=("--limit=lease_s=4",), terms=3, causes=frozenset({"save"})
    ),
    "frozen launcher": Takeover(freeze_launcher),
    "cut off": Takeover(cut_off, etcd=True),
    "cut off, but not from the store": Takeover(cut_off),
    "power off while the store is away": Takeover(
        while_the_store_is_away, flags=("--limit=lease_s=4",), etcd=True
    ),
    "power off, and no agent has a lease": Takeover(
        until_no_agent_has_a_lease, flags=(LEASE, SAVE), is_rolled_back=True, etcd=True
    ),
    "two in a row": Takeover(twice, terms=3),
    "with a worker of another host": Takeover(
        with_a_worker, nodes=3, causes=frozenset({"agent_lost", "killed"})
    ),
    "with another host": Takeover(off("n1", "n2"), nodes=3, flags=(LEASE, "--spares=1")),
    "in a save": Takeover(off("n1"), in_save, flags=(LEASE, SAVE)),
    "hsdp, power off": Takeover(off("n1"), kind="hsdp", ranks=2),
    "hsdp, frozen launcher": Takeover(freeze_launcher, kind="hsdp", ranks=2),
}


@pytest.fixture
def etcd(cluster: Cluster) -> Iterator[Callable[[], str]]:
    """Start etcd on n4, and return the flag that puts the terms there."""
    servers: list[subprocess.Popen[bytes]] = []

    def start() -> str:
        url = f"http://{cluster.hosts.address('n4')}:2379"
        words = ("etcd", "--data-dir", str(cluster.folder / "etcd"), "--log-level", "error")
        urls = ("--listen-client-urls", url, "--advertise-client-urls", url)
        peers = ("--listen-peer-urls", "http://127.0.0.1:2380")
        servers.append(subprocess.Popen(cluster.hosts.command("n4", *words, *urls, *peers)))
        return f"--term-store=etcd://{url.removeprefix('http://')}/outlast"

    yield start
    for server in servers:
        server.kill()
        server.wait()


def owners(cluster: Cluster) -> list[str]:
    """Return the owners of terms in the run directory."""
    run = str(cluster.summary().run)
    ledger = TermLedger(open_term_store("", cluster.run_dir, run, 5.0), run)
    found: list[str] = []
    while (record := ledger.read(len(found) + 1)) is not None:
        found.append(record.host)
    return found


@pytest.mark.parametrize("name", TAKEOVERS)
def test_another_node_takes_over(
    name: str,
    cluster: Cluster,
    etcd: Callable[[], str],
    undisturbed: Undisturbed,
) -> None:
    row = TAKEOVERS[name]
    if row.etcd and shutil.which("etcd") is None:
        pytest.skip("etcd is not installed (apt-get install etcd-server)")
    store = (etcd(),) if row.etcd else ()
    hold = cluster.folder / "hold"
    hold.touch()
    cluster.start(f"{row.nodes}:4", row.ranks, *row.flags, *store, job=(STEPS, row.kind, str(hold)))
    cluster.wait_for_event(row.when, row.when.__name__)
    row.strike(cluster)
    for term in range(2, row.terms + 1):
        owner_of(cluster, term)
    hold.unlink(missing_ok=True)
    ends = {host: cluster.end(host) for host in cluster.hosts.up}
    alive = [host for host in ends if host != "n1" or row.strike is not kill_first]
    assert {ends[host][0] for host in alive} == {EXIT_DONE}, ends
    must_be_equal(cluster, undisturbed(row.nodes * row.ranks, row.kind))
    assert len(owners(cluster)) == (0 if row.etcd else row.terms)
    incidents = cluster.summary().incidents
    assert (sum(one.committed_steps_lost for one in incidents) > 0) == row.is_rolled_back
    causes = {one.cause for one in incidents}
    assert causes <= row.causes and len(incidents) >= bool(row.causes), incidents
    processes = {host: cluster.hosts.processes(host) for host in cluster.hosts.up}
    assert not any("etcd" not in each for found in processes.values() for each in found)
