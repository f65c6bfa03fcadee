"""Hosts that are lost without a place for their ranks: the others go on, and take them back."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.cluster.conftest import ON_HOSTS
from tests.end_to_end.test_fewer_ranks import JOB, expected, must_be_replicas, trained

from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED
from outlast.events import AnyEvent, Decided, PhaseDone, RunStarted
from outlast.telemetry.committed_history import check_run

pytestmark = ON_HOSTS
HOSTS = 3
EPOCHS = 16


def wait_until_absent(cluster: Cluster, *ranks: int) -> None:
    """Wait until these ranks are absent and the others have made two steps since."""
    places: list[int] = []

    def is_so(event: AnyEvent) -> bool:
        if isinstance(event, Decided):
            places[:] = [event.n] if event.absent == ranks else []
        return isinstance(event, PhaseDone) and bool(places) and event.n >= places[0] + 3

    cluster.wait_for_event(is_so, f"steps without ranks {ranks}")


def test_a_drain_without_two_hosts_resumes_with_all(cluster: Cluster) -> None:
    """The hosts of ranks 0 and 2 have no power. What those had left is with their partners, and
    the third host saves their parts."""
    job = (f"--epochs={EPOCHS}", "--pace=0.3")
    flags = ("--policy=elastic", "--limit=lease_s=3", "--snapshot-every=2", "--copies=1")
    cluster.start("3", 1, *flags, script=JOB, job=job)
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 6, "step 6")
    cluster.hosts.power_off("n3")
    wait_until_absent(cluster, 2)
    cluster.hosts.power_off("n1")
    wait_until_absent(cluster, 0, 2)
    entry = cluster.launchers["n2"].pid
    (launcher,) = Path(f"/proc/{entry}/task/{entry}/children").read_text().split()
    os.kill(int(launcher), signal.SIGTERM)  # nsenter passes no signals on
    assert cluster.codes()["n2"] == EXIT_INTERRUPTED
    before = max(step for step, _, _ in trained(cluster.out)) + 1
    for name in ("n1", "n3"):
        cluster.hosts.boot(name)
    for name in ("n1", "n2", "n3"):
        cluster.start_again(name)
    assert set(cluster.codes().values()) == {EXIT_DONE}
    (*_, started) = [one for one in cluster.events() if isinstance(one, RunStarted)]
    assert started.resumed_step == before, "a committed step was lost"
    must_be_replicas(cluster.out, HOSTS)
    assert Counter(ids for _, _, ids in trained(cluster.out)) == expected(EPOCHS, HOSTS)


def test_hosts_leave_and_come_back_beside_a_takeover(cluster: Cluster) -> None:
    """The host of a rank loses its power, then the controller's; a third one goes on alone."""
    job = (f"--epochs={EPOCHS}", "--pace=0.3")
    cluster.start("3", 1, "--policy=elastic", "--limit=lease_s=3", script=JOB, job=job)
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 6, "step 6")
    cluster.hosts.power_off("n3")
    wait_until_absent(cluster, 2)
    cluster.hosts.power_off("n1")
    wait_until_absent(cluster, 0, 2)
    for name in ("n1", "n3"):
        cluster.hosts.boot(name)
        cluster.start_again(name)
    wait_until_absent(cluster)
    assert set(cluster.codes().values()) == {EXIT_DONE}
    assert check_run(cluster.run_dir) == []
    incidents = cluster.summary().incidents
    assert {one.committed_steps_lost for one in incidents} == {0}
    assert [one.rung for one in incidents][:2] == ["shrink", "shrink"]
    assert {one.rung for one in incidents[2:]} == {"regrow"}
    must_be_replicas(cluster.out, HOSTS)
    assert Counter(ids for _, _, ids in trained(cluster.out)) == expected(EPOCHS, HOSTS)
