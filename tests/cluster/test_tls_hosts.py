"""Runs by TLS on several hosts, each with a certificate of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.cluster import STEPS, Cluster, on_one_host
from tests.cluster.conftest import ON_HOSTS, Undisturbed
from tests.cluster.hosts import Hosts
from tests.cluster.takeover_strikes import move_control_to_a_spare_node
from tests.cluster.test_host_faults import must_be_equal
from tests.cluster.test_node_returns import wait_for_workers
from tests.launch.nodes.certificates import Authority

from outlast.errors import EXIT_DONE
from outlast.events import PhaseDone
from outlast.transport.tls import TlsFiles

pytestmark = ON_HOSTS


def flags(files: TlsFiles) -> tuple[str, ...]:
    names = ("--tls-cert", "--tls-key", "--tls-ca")
    return tuple(word for pair in zip(names, files, strict=True) for word in pair)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Hosts(tmp_path, 4) as hosts:
        hosts.power_off("n4")
        cluster = Cluster(tmp_path, hosts)
        yield cluster
        cluster.close()


def test_a_takeover_by_tls_ends_equal(cluster: Cluster, tmp_path: Path) -> None:
    """Two ranks on n1 and n2, a spare node, and the controller's host loses power."""
    expected = on_one_host(tmp_path / "one", 2, str(STEPS))
    authority = Authority(tmp_path / "ca")
    own = {name: flags(authority.issue(name, f"DNS:{name}")) for name in cluster.hosts.names}
    cluster.start("2:3", 1, "--limit", "lease_s=4", "--node-rank=-1", **own)
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 10, "step 10")
    cluster.hosts.power_off("n1")
    assert cluster.codes() == {"n2": EXIT_DONE, "n3": EXIT_DONE}
    must_be_equal(cluster, expected)


def test_nodes_without_tls_and_of_another_authority_are_refused_by_name(
    cluster: Cluster, tmp_path: Path
) -> None:
    good, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    mixed = other.issue("n3", "DNS:n3")._replace(authority=good.certificate)
    cluster.start(
        "3", 1, "--limit", "hello_s=25", n1=flags(good.issue("n1", "DNS:n1")), n3=flags(mixed)
    )
    code, output = cluster.end("n2")
    assert code != EXIT_DONE and "this run uses TLS, and this node does not" in output
    code, output = cluster.end("n3")
    assert code != EXIT_DONE and "n3: the certificate" in output and "nothing was" in output
    code, output = cluster.end("n1")
    assert code != EXIT_DONE and "1 of 3 nodes came to the endpoint" in output


def test_a_fresh_host_with_a_certificate_joins_and_becomes_the_controller(
    cluster: Cluster, undisturbed: Undisturbed
) -> None:
    authority = Authority(cluster.folder / "ca")
    own = {name: flags(authority.issue(name, f"DNS:{name}")) for name in cluster.hosts.names}
    hold = cluster.folder / "hold"
    hold.touch()
    cluster.start("2:3", 1, "--limit=lease_s=4", job=("80", "ddp", str(hold), "0.5"), **own)
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 5, "step 5")
    cluster.hosts.power_off("n3")
    cluster.hosts.boot("n4")
    cluster.start_again("n4")
    wait_for_workers(cluster, "n4", 1)
    assert move_control_to_a_spare_node(cluster) == "n4"
    cluster.hosts.power_off("n2")
    cluster.wait_for_steps(2)
    hold.unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    must_be_equal(cluster, undisturbed(2))
