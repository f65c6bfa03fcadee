"""Faults of hosts, networks and disks: the results of one undisturbed host, told truthfully.

A row of `FAULTS` breaks a run of n1 and n2 with the spare node n3, and heals it where it can.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.cluster.cluster import Cluster, on_one_host
from tests.cluster.hosts import Hosts, missing_requirement

from outlast.errors import EXIT_DONE
from outlast.events import AnyEvent, CheckpointSaved, Connected, Decided, Note, PhaseDone

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.process,
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement()),
]
STEPS = "80"
SHORT_S = 1.0  # well below the lease
RANKS = {"ddp": 1, "hsdp": 2}  # of a host
pause = threading.Event().wait

Toggle = Callable[[Hosts, str, bool], None]


def silent(hosts: Hosts, name: str, on: bool) -> None:
    hosts.set_silent(name, silent=on)


def mute(hosts: Hosts, name: str, on: bool) -> None:
    hosts.set_mute(name, mute=on)


def deaf(hosts: Hosts, name: str, on: bool) -> None:
    hosts.set_deaf(name, deaf=on)


def unplugged(hosts: Hosts, name: str, on: bool) -> None:
    hosts.set_link(name, up=not on)


def stopped(hosts: Hosts, name: str, on: bool) -> None:
    (hosts.stop if on else hosts.resume)(name)


TOGGLES = (silent, mute, deaf, unplugged, stopped)


def in_step(event: AnyEvent) -> bool:
    return isinstance(event, PhaseDone) and event.step >= 20


def in_regroup(event: AnyEvent) -> bool:
    return isinstance(event, Decided)


def in_transfer(event: AnyEvent) -> bool:
    return isinstance(event, Connected) and event.incident > 0


def in_save(event: AnyEvent) -> bool:
    return isinstance(event, CheckpointSaved) and event.step >= 20


def for_a_second(*toggles: Toggle) -> Callable[[Cluster], None]:
    """Break each host of the first two in each of these ways, for less than the lease."""

    def strike(cluster: Cluster) -> None:
        for name in ("n2", "n1"):
            for toggle in toggles:
                toggle(cluster.hosts, name, True)
                pause(SHORT_S)
                toggle(cluster.hosts, name, False)
                pause(SHORT_S)

    return strike


def until_replaced(toggle: Toggle) -> Callable[[Cluster], None]:
    """Break n2 until its ranks are elsewhere."""

    def strike(cluster: Cluster) -> None:
        toggle(cluster.hosts, "n2", True)
        cluster.wait_for_steps(cluster.generations() + 1)
        toggle(cluster.hosts, "n2", False)

    return strike


def power_off(cluster: Cluster) -> None:
    cluster.hosts.power_off("n2")


def crash(cluster: Cluster) -> None:
    cluster.hosts.crash("n2")


def freeze_disk(cluster: Cluster) -> None:
    """Let the disk of the run directory stand still for two seconds."""
    subprocess.run(["fsfreeze", "-f", str(cluster.disk)], check=True)
    pause(2.0)
    subprocess.run(["fsfreeze", "-u", str(cluster.disk)], check=True)


class HostFault(NamedTuple):
    """A fault: when it begins, what it does, and the causes of the incidents that follow.

    The loss of a host is an incident of its own if it finds the generation open again.
    """

    strike: Callable[[Cluster], None]
    when: Callable[[AnyEvent], bool] = in_step
    kind: str = "ddp"
    causes: tuple[str, ...] = ("agent_lost",)
    flags: tuple[str, ...] = ("--limit=lease_s=3",)


LOST = "the script sees NaN in place of its numbers"
KILL = "--fault=kill:rank=0,step=15"
SAVE = "--checkpoint-every=10"
FAULTS = {
    "all short": HostFault(for_a_second(*TOGGLES), causes=(), flags=("--limit=lease_s=6",)),
    "stopped": HostFault(until_replaced(stopped)),
    "deaf": HostFault(until_replaced(deaf), kind="hsdp"),
    "mute in a save": HostFault(until_replaced(mute), in_save, flags=("--limit=lease_s=3", SAVE)),
    "silent in a regroup": HostFault(
        until_replaced(silent), in_regroup, "hsdp", ("killed",), ("--limit=lease_s=3", KILL)
    ),
    "power off in a transfer": HostFault(
        power_off, in_transfer, "hsdp", ("killed",), ("--limit=lease_s=3", KILL)
    ),
    "crash in a save": HostFault(crash, in_save, "hsdp", flags=("--limit=lease_s=3", SAVE)),
    "disk stands still": HostFault(freeze_disk, in_save, causes=(), flags=(SAVE,)),
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
    try:
        with Hosts(tmp_path, 3) as hosts:
            cluster = Cluster(tmp_path, hosts, disk)
            yield cluster
            cluster.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Results of undisturbed runs on one host."""
    absent = str(tmp_path_factory.mktemp("nothing") / "hold")
    return {
        kind: on_one_host(tmp_path_factory.mktemp(kind), 2 * ranks, STEPS, kind, absent)
        for kind, ranks in RANKS.items()
    }


def must_be_equal(cluster: Cluster, expected: list[str]) -> None:
    """Compare steps, weights and results. A rank that is lost behind its vote takes the result of
    that phase with it: NaN, with a note."""
    pairs = [
        (json.loads(found), json.loads(wanted))
        for found, wanted in zip(cluster.results(), expected, strict=True)
    ]
    assert [found[:2] for found, _ in pairs] == [wanted[:2] for _, wanted in pairs]
    differences = [
        (rank, step, one)
        for rank, (found, wanted) in enumerate(pairs)
        for step, (one, other) in enumerate(zip(found[2], wanted[2], strict=True), start=1)
        if one != other
    ]
    notes = [one.text for one in cluster.events() if isinstance(one, Note) and LOST in one.text]
    assert len(differences) <= len(notes) and all(one == "nan" for _, _, one in differences)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_leaves_the_results_of_one_host(
    name: str, cluster: Cluster, expected: dict[str, list[str]]
) -> None:
    fault = FAULTS[name]
    hold = cluster.folder / "hold"
    hold.touch()
    cluster.start("2:3", RANKS[fault.kind], *fault.flags, job=(STEPS, fault.kind, str(hold)))
    cluster.wait_for_event(fault.when, fault.when.__name__)
    fault.strike(cluster)
    hold.unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    must_be_equal(cluster, expected[fault.kind])
    causes = tuple(one.cause for one in cluster.summary().incidents)
    assert causes == fault.causes or causes == (*fault.causes, "agent_lost") != ("agent_lost",)
    assert {host: cluster.hosts.processes(host) for host in cluster.hosts.up} == {
        host: [] for host in cluster.hosts.up
    }
