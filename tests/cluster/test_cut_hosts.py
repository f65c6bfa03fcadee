"""Cuts between two hosts that both reach the controller: named, retried, or ranks move."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import ON_HOSTS, Undisturbed
from tests.cluster.hosts import Hosts

from outlast.errors import EXIT_DONE, EXIT_GAVE_UP
from outlast.events import AnyEvent, Decided, Noticed, PhaseDone, RunEnded

pytestmark = ON_HOSTS
STEPS = "60"
TEXT = "do not reach each other, although both reach the controller"
pause = threading.Event().wait


def in_step(event: AnyEvent) -> bool:
    return isinstance(event, PhaseDone) and event.step >= 20


class CutRow(NamedTuple):
    """A run and a cut between two of its hosts, for some seconds or (0) until the end."""

    nodes: str
    pair: tuple[str, str]
    for_s: float = 0.0
    one_way: bool = False  # the first of the pair does not reach the other
    kind: str = "ddp"
    ranks: int = 1  # of a host


MOVES = {
    "ddp": CutRow("3:4", ("n2", "n3")),
    "one way": CutRow("3:4", ("n2", "n3"), one_way=True),
    "other way": CutRow("3:4", ("n3", "n2"), one_way=True),
    "in a shard group": CutRow("4:5", ("n3", "n4"), kind="hsdp"),
    "between replicas, of the controller's host": CutRow("2:3", ("n2", "n1"), kind="hsdp", ranks=2),
}
HEALS = {
    "1 s": CutRow("3", ("n2", "n3"), 1.0),
    "5 s": CutRow("4", ("n2", "n4"), 5.0),
    "20 s, one way": CutRow("3", ("n3", "n2"), 20.0, one_way=True),
}


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    row: CutRow = request.param
    with Hosts(tmp_path, int(row.nodes.rpartition(":")[2])) as hosts:
        cluster = Cluster(tmp_path, hosts)
        yield cluster
        cluster.close()


def world_of(row: CutRow) -> int:
    return row.ranks * int(row.nodes.partition(":")[0])


def control_ports(cluster: Cluster, host: str) -> str:
    """Return the ports on which a host's launcher listens, as "1, 2"."""
    pid = cluster.hosts.run(host, "pgrep", "-o", "-f", "outlast run").strip()
    lines = cluster.hosts.run(host, "ss", "-tlnpH").splitlines()
    ports = [line.split()[3].rpartition(":")[2] for line in lines if f"pid={pid}," in line]
    assert ports
    return ", ".join(ports)


def cut(cluster: Cluster, row: CutRow) -> Callable[[], None]:
    """Start a run, and cut its network. Return a function that lets the loop end."""
    hold = cluster.folder / "hold"
    hold.touch()
    cluster.start(row.nodes, row.ranks, job=(STEPS, row.kind, str(hold)))
    cluster.wait_for_event(in_step, "step 20")
    spared = control_ports(cluster, "n1") if "n1" in row.pair else ""
    cluster.hosts.set_cut(*row.pair, cut=True, one_way=row.one_way, spared=spared)
    return hold.unlink


def orphans(cluster: Cluster) -> dict[str, list[str]]:
    found = {host: cluster.hosts.processes(host) for host in cluster.hosts.up}
    return {host: lines for host, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("cluster", "row"), [(row, row) for row in MOVES.values()], ids=MOVES, indirect=["cluster"]
)
def test_ranks_leave_one_of_two_hosts_that_do_not_reach_each_other(
    cluster: Cluster, row: CutRow, undisturbed: Undisturbed
) -> None:
    end = cut(cluster, row)
    began = time.monotonic()
    cluster.wait_for_steps(2)
    assert time.monotonic() - began < 30.0
    end()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    assert cluster.results() == undisturbed(world_of(row), row.kind, STEPS)
    (incident,) = cluster.summary().incidents
    assert incident.committed_steps_lost == 0
    decisions = [one for one in cluster.events() if isinstance(one, Decided)]
    (moved,) = [one for one in decisions if TEXT in one.reason and one.replaced]
    assert moved.rung in ("replace", "respawn") and len(moved.replaced) == row.ranks
    assert " and ".join(sorted(row.pair)) in moved.reason
    assert orphans(cluster) == {}


@pytest.mark.parametrize(
    ("cluster", "row"), [(row, row) for row in HEALS.values()], ids=HEALS, indirect=["cluster"]
)
def test_a_cut_that_heals_costs_retries(
    cluster: Cluster, row: CutRow, undisturbed: Undisturbed
) -> None:
    end = cut(cluster, row)
    pause(row.for_s)
    cluster.hosts.set_cut(*row.pair, cut=False, one_way=row.one_way)
    end()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    assert cluster.results() == undisturbed(world_of(row), row.kind, STEPS)
    decisions = [one for one in cluster.events() if isinstance(one, Decided)]
    assert {one.rung for one in decisions} <= {"retry"}
    assert bool(decisions) >= (row.for_s > 10) and len(decisions) <= (row.for_s > 2) * 5
    assert all(
        one.fault.kind == "transport" for one in cluster.events() if isinstance(one, Noticed)
    )


@pytest.mark.parametrize("cluster", [MOVES["ddp"]._replace(nodes="3")], indirect=True)
def test_a_cut_that_stays_without_a_place_ends_the_run_by_name(cluster: Cluster) -> None:
    cut(cluster, MOVES["ddp"]._replace(nodes="3"))
    assert set(cluster.codes().values()) == {EXIT_GAVE_UP}
    (end,) = [one for one in cluster.events() if isinstance(one, RunEnded)]
    assert end.cause is not None and end.cause.detail == f"n2 and n3 {TEXT}"
    decisions = [one for one in cluster.events() if isinstance(one, Decided)]
    assert [one.rung for one in decisions[:-1]] == ["retry"] * (len(decisions) - 1)
    assert len(decisions) < 20 and decisions[-1].rung == "stop"
    assert re.search("repair the network", decisions[-1].reason)
    assert orphans(cluster) == {}
