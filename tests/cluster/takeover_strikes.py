"""Faults of a controller's node, for tests and the benchmark of takeovers."""

from __future__ import annotations

import signal

from tests.cluster.cluster import Cluster

from outlast.events import Note

_LAUNCHER = ("-o", "-f", "outlast run")


def owner_of(cluster: Cluster, term: int) -> str:
    """Return the host that has taken a term over; wait until one has."""
    text = f"takes over as controller, term {term}"
    cluster.wait_for_event(lambda one: isinstance(one, Note) and text in one.text, text)
    notes = [one.text for one in cluster.events() if isinstance(one, Note) and text in one.text]
    assert len(notes) == 1
    return notes[0].split()[0]


def power_off(cluster: Cluster, host: str) -> None:
    cluster.hosts.power_off(host)


def kill_launcher(cluster: Cluster, host: str) -> None:
    cluster.hosts.run(host, "pkill", "-KILL", *_LAUNCHER)


def stop_launcher(cluster: Cluster, host: str) -> None:
    """Stop a launcher alone: its workers run on."""
    cluster.hosts.run(host, "pkill", "-STOP", *_LAUNCHER)


def wake_launcher(cluster: Cluster, host: str) -> None:
    cluster.hosts.run(host, "pkill", "-CONT", *_LAUNCHER)
    cluster.launchers[host].send_signal(signal.SIGCONT)  # nsenter stops with its process


def move_control_to_a_spare_node(cluster: Cluster) -> str:
    """Stop the launchers of all nodes with ranks (n1 and n2) until another one has taken over, but
    not beyond their leases: no rank stops. Return the new controller's host."""
    for host in ("n1", "n2"):
        stop_launcher(cluster, host)
    owner = owner_of(cluster, 2)
    for host in ("n1", "n2"):
        wake_launcher(cluster, host)
    cluster.wait_for_event(
        lambda one: isinstance(one, Note) and "train on in generation" in one.text, "an adoption"
    )
    return owner
