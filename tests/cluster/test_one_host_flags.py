"""Flags and commands that one host has, on several: the same results, and true answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.cluster.cluster import JOB, Cluster
from tests.cluster.conftest import ON_HOSTS, Undisturbed
from tests.cluster.test_host_faults import must_be_equal

from outlast.errors import EXIT_DONE
from outlast.events import Decided, FaultInjected, PhaseDone, WorkerSpawned

pytestmark = ON_HOSTS
STEPS = "80"
LEASE = ("--limit", "lease_s=3")


@pytest.fixture(scope="module")
def expected(undisturbed: Undisturbed) -> list[str]:
    return undisturbed(2)


def start(cluster: Cluster, nodes: str, *flags: str, script: Path = JOB) -> Path:
    """Start a run of one rank a host that stands still 10 steps before its end; return the file
    that holds it there."""
    hold = cluster.folder / "hold"
    hold.touch()
    cluster.start(nodes, 1, *flags, job=(STEPS, "ddp", str(hold)), script=script)
    return hold


def must_end_as_one_host(cluster: Cluster, expected: list[str]) -> None:
    assert set(cluster.codes().values()) == {EXIT_DONE}
    must_be_equal(cluster, expected)


def test_each_host_has_its_own_logs_of_any_program(cluster: Cluster, expected: list[str]) -> None:
    """/dev/shm is another directory on each host."""
    program = cluster.folder / "train.sh"
    program.write_text(f'#!/bin/sh\necho rank $RANK\nexec {sys.executable} -u {JOB} "$@"\n')
    program.chmod(0o755)
    flags = ("--log-dir=/dev/shm/logs", "--no-python")
    start(cluster, "2", *flags, script=program).unlink()
    must_end_as_one_host(cluster, expected)
    for rank, host in enumerate(("n1", "n2")):
        logs = cluster.hosts.run(host, "sh", "-c", "cat /dev/shm/logs/*/[0-9]*/*/stdout.log")
        assert logs == f"rank {rank}\n"
        log = cluster.run_dir / "logs" / str(rank)
        assert cluster.hosts.run(host, "ls", str(log)).split() == [f"w1-{rank}"]


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_faults_strike_on_the_host_of_their_rank_or_spare(
    cluster: Cluster, expected: list[str]
) -> None:
    faults = ("kill:spare=0", "kill:rank=1,after=6", "stop:rank=0,after=7,for=0.5")
    hold = start(cluster, "2:3", *(f"--fault={fault}" for fault in faults))
    cluster.wait_for_event(lambda one: isinstance(one, FaultInjected), "the faults", 3)
    hold.unlink()
    must_end_as_one_host(cluster, expected)
    found = cluster.events()
    host_of = {one.worker: one.host for one in found if isinstance(one, WorkerSpawned)}
    struck = [(one.spec, host_of[one.worker]) for one in found if isinstance(one, FaultInjected)]
    assert sorted(struck) == sorted(zip(faults, ("n3", "n2", "n1"), strict=True))


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_commands_on_any_host_tell_the_truth_about_a_run(
    cluster: Cluster, expected: list[str]
) -> None:
    def ask(host: str, *words: str) -> str:
        command = (sys.executable, "-m", "outlast", *words)
        return " ".join(cluster.hosts.run(host, *command).replace("│", " ").split())

    directory = str(cluster.run_dir)
    hold = start(cluster, "2:3", *LEASE, "--checkpoint-every=20")
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 30, "step 30")
    for host in cluster.hosts.names:
        assert "running" in ask(host, "summary", directory)
        assert "no failure occurred" in ask(host, "explain", directory)
    cluster.hosts.power_off("n2")
    cluster.wait_for_event(lambda one: isinstance(one, Decided), "the decision")
    for host in cluster.hosts.up:
        told = ask(host, "explain", directory)
        assert "n2" in told and "its launcher died" not in told
    hold.unlink()
    must_end_as_one_host(cluster, expected)
    for host in cluster.hosts.up:
        assert "recovered in generation 2" in ask(host, "explain", directory)
        assert "1 incident" in ask(host, "summary", directory)
        assert "RunEnded" in ask(host, "events", directory, "--follow")
        assert "60 70 2.3 MiB 2" in ask(host, "ckpt", "ls", directory)
