"""Runs whose controller dies, stops, or is cut off: another node takes over.

A row of `TAKEOVERS` breaks a run of four hosts, of which n1 is the first controller's and has
ranks, and heals it where it can. The results are those of one undisturbed host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.cluster.cluster import Cluster, on_one_host
from tests.cluster.hosts import Hosts, missing_requirement
from tests.cluster.test_host_faults import in_save, in_step, must_be_equal

from outlast.errors import EXIT_DONE
from outlast.events import AnyEvent, Note
from outlast.launch.terms.term_records import TermLedger
from outlast.launch.terms.term_store import open_term_store

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.process,
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement()),
]
STEPS = "80"
LEASE = "--limit=lease_s=3"
SAVE = "--checkpoint-every=10"
LAUNCHER = ("-o", "-f", "outlast run")


def owner_of(cluster: Cluster, term: int) -> str:
    """Return the host that owns a term; wait until it exists."""
    text = f"takes over as controller, term {term}"
    cluster.wait_for_event(lambda one: isinstance(one, Note) and text in one.text, text)
    notes = [one.text for one in cluster.events() if isinstance(one, Note) and text in one.text]
    assert len(notes) == 1
    return notes[0].split()[0]


def power_off(*names: str) -> Callable[[Cluster], None]:
    def strike(cluster: Cluster) -> None:
        for name in names:
            cluster.hosts.power_off(name)

    return strike


def kill_launcher(cluster: Cluster) -> None:
    cluster.hosts.run("n1", "pkill", "-KILL", *LAUNCHER)


def freeze_launcher(cluster: Cluster) -> None:
    """Stop the launcher alone; its workers run on. It wakes when its ranks are elsewhere."""
    before = cluster.generations()
    cluster.hosts.run("n1", "pkill", "-STOP", *LAUNCHER)
    cluster.wait_for_steps(before + 1)
    cluster.hosts.run("n1", "pkill", "-CONT", *LAUNCHER)


def cut_off(cluster: Cluster) -> None:
    before = cluster.generations()
    cluster.hosts.set_silent("n1", silent=True)
    cluster.wait_for_steps(before + 1)
    cluster.hosts.set_silent("n1", silent=False)


def twice(cluster: Cluster) -> None:
    before = cluster.generations()
    cluster.hosts.power_off("n1")
    owner = owner_of(cluster, 2)
    cluster.wait_for_steps(before + 1)
    cluster.hosts.power_off(owner)


def with_a_worker(cluster: Cluster) -> None:
    cluster.hosts.power_off("n1")
    cluster.hosts.run("n2", "pkill", "-KILL", "-n", "-f", "steady_job.py")


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


TAKEOVERS = {
    "power off": Takeover(power_off("n1")),
    "killed launcher": Takeover(kill_launcher),
    "frozen launcher": Takeover(freeze_launcher),
    "cut off": Takeover(cut_off),
    "two in a row": Takeover(twice, terms=3),
    "with a worker of another host": Takeover(
        with_a_worker, nodes=3, causes=frozenset({"agent_lost", "killed"})
    ),
    "with another host": Takeover(power_off("n1", "n2"), nodes=3, flags=(LEASE, "--spares=1")),
    "in a save": Takeover(power_off("n1"), in_save, flags=(LEASE, SAVE)),
    "hsdp, power off": Takeover(power_off("n1"), kind="hsdp", ranks=2),
    "hsdp, frozen launcher": Takeover(freeze_launcher, kind="hsdp", ranks=2),
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Hosts(tmp_path, 4) as hosts:
        cluster = Cluster(tmp_path, hosts)
        yield cluster
        cluster.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[str]]:
    """Return the results of undisturbed runs on one host, by kind and world size."""
    known: dict[tuple[str, int], list[str]] = {}

    def get(kind: str, world: int) -> list[str]:
        if (kind, world) not in known:
            folder = tmp_path_factory.mktemp("one")
            known[kind, world] = on_one_host(folder, world, STEPS, kind, str(folder / "absent"))
        return known[kind, world]

    return get


def owners(cluster: Cluster) -> list[str]:
    """Return the owner of each term in the run directory."""
    run = str(cluster.summary().run)
    ledger = TermLedger(open_term_store("", cluster.run_dir, run, 5.0), run)
    found: list[str] = []
    while (record := ledger.read(len(found) + 1)) is not None:
        found.append(record.host)
    return found


@pytest.mark.parametrize("name", TAKEOVERS)
def test_another_node_takes_over(
    name: str, cluster: Cluster, expected: Callable[[str, int], list[str]]
) -> None:
    row = TAKEOVERS[name]
    hold = cluster.folder / "hold"
    hold.touch()
    cluster.start(f"{row.nodes}:4", row.ranks, *row.flags, job=(STEPS, row.kind, str(hold)))
    cluster.wait_for_event(row.when, row.when.__name__)
    row.strike(cluster)
    for term in range(2, row.terms + 1):
        owner_of(cluster, term)
    hold.unlink()
    ends = {host: cluster.end(host) for host in cluster.hosts.up}
    alive = [host for host in ends if host != "n1" or row.strike is not kill_launcher]
    assert {ends[host][0] for host in alive} == {EXIT_DONE}, ends
    must_be_equal(cluster, expected(row.kind, row.nodes * row.ranks))
    assert len(owners(cluster)) == row.terms
    incidents = cluster.summary().incidents
    assert sum(one.committed_steps_lost for one in incidents) == 0
    assert {one.cause for one in incidents} <= row.causes and incidents
    assert {host: cluster.hosts.processes(host) for host in cluster.hosts.up} == {
        host: [] for host in cluster.hosts.up
    }
