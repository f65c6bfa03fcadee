"""The hosts that tests of several nodes run on, and the launcher inside one of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.hosts import Hosts, missing_requirement

pytestmark = [pytest.mark.cluster, pytest.mark.process]
needs_hosts = pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement())

SEND = (
    "import socket, sys; s = socket.create_connection((sys.argv[1], 7000), timeout=5);"
    " s.sendall(b'from ' + socket.gethostname().encode())"
)
RECEIVE = (
    "import socket; s = socket.create_server(('', 7000)); print('up', flush=True);"
    " s.settimeout(20); print(s.accept()[0].recv(99).decode())"
)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path, 2) as up:
        yield up


@needs_hosts
def test_hosts_have_names_and_reach_each_other(hosts: Hosts) -> None:
    receiver = subprocess.Popen(
        hosts.command("n2", sys.executable, "-c", RECEIVE), stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    with receiver:
        assert receiver.stdout.readline() == "up\n"
        hosts.run("n1", sys.executable, "-c", SEND, "n2")
        assert receiver.stdout.readline() == "from n1\n"


@needs_hosts
def test_hosts_share_files_and_not_memory(hosts: Hosts, tmp_path: Path) -> None:
    hosts.run("n1", "touch", str(tmp_path / "file"), "/dev/shm/segment")
    assert hosts.run("n2", "ls", str(tmp_path / "file"))
    assert hosts.run("n2", "ls", "/dev/shm") == ""


@needs_hosts
def test_a_host_without_its_cable_or_power_is_silent(hosts: Hosts) -> None:
    hosts.set_link("n2", up=False)
    assert hosts.run("n2", "hostname") == "n2\n", "its processes run on"
    with pytest.raises(subprocess.CalledProcessError):
        hosts.run("n1", sys.executable, "-c", SEND, "n2")
    hosts.set_link("n2", up=True)
    running = subprocess.Popen(hosts.command("n2", "sleep", "600"))
    hosts.power_off("n2")
    assert running.wait(10) != 0
