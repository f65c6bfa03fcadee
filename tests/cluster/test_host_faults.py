"""Each fault of a host, network, clock or disk at each place of a run: the results of one host.

Results are equal, or the decision states how many steps are rolled back; all hosts are free of
processes at the end; the events name the cause, the host and its ranks.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import ON_HOSTS, Undisturbed
from tests.cluster.host_fault_table import (
    FAULTS,
    PLACES,
    HostFault,
    Place,
    Target,
    stepped_clock,
    strike,
)
from tests.cluster.hosts import Hosts
from tests.cluster.switch_terms import etcd_on_the_switch

from outlast.controller.recovery.recovery_ladder import FROM_A_COPY
from outlast.errors import EXIT_DONE
from outlast.events import Decided, Note, Noticed, PhaseDone

pytestmark = [
    *ON_HOSTS,
    pytest.mark.timeout(400),
]
STEPS = "80"
PACE_S = "0.05"
RANKS = {"ddp": 1, "hsdp": 2}  # of a host
LOST = "the script sees NaN in place of its numbers"
ORDINARY = (
    "killed process, transfer, hsdp",
    "crash, transfer, hsdp",
    "silent, regroup, ddp",
    "mute, save, hsdp",
    "deaf, takeover, hsdp",
    "short cuts, step, hsdp",
    "frozen, takeover, ddp",
    "stepped clocks, step, ddp",
    "disk stands still, regroup, hsdp",
    "full disk, regroup, ddp",
    "killed controller, step, ddp",
    "frozen controller, save, ddp",
)
# No decision and no answer is possible while the store is away and the controller has changed, or
# while a second controller is lost: leases may end, and all ranks start again (docs/takeover.md).
MAY_LAPSE = {
    (fault, "takeover")
    for fault in (
        "store away",
        "full disk",
        "disk stands still",
        "killed controller",
        "frozen controller",
    )
}
LONGEST_S = 400.0


def rows() -> list[object]:
    """Return all rows; those of `ORDINARY` are not extended."""
    found: list[object] = []
    for fault, place, kind in product(FAULTS, PLACES, RANKS):
        name = f"{fault}, {place}, {kind}"
        marks = [] if name in ORDINARY else [pytest.mark.extended]
        found.append(pytest.param(fault, place, kind, id=name, marks=marks))
    return found


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
        subprocess.run(["fsfreeze", "-u", str(disk)], check=False, capture_output=True)
        subprocess.run(["umount", str(disk)], check=True)


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


def must_be_true(target: Target, fault: HostFault, place: Place, may_lapse: bool) -> int:
    """Compare the events with what happened; return how many steps were redone.

    The loss of a host is an incident of its own if it finds the generation open again.
    """
    events = target.cluster.events()
    summary = target.cluster.summary()
    assert summary.outcome == "done" and 0 < summary.wall_s < LONGEST_S
    kinds = Counter(one.cause for one in summary.incidents)
    caused = ("agent_lost", "controller_lost") if fault.of_controller else (fault.cause,)
    if may_lapse:
        caused = (*caused, "agent_lost")
    allowed = Counter((*place.causes, *caused))
    assert not kinds - allowed and len(summary.incidents) >= len(place.causes), kinds
    noticed = [one.fault for one in events if isinstance(one, Noticed)]
    if fault.cause and target.ranks and not may_lapse:
        named = [one for one in noticed if one.kind == fault.cause and one.host == target.host]
        assert named, noticed
        named_ranks = {one.seat for one in named if one.seat >= 0}
        assert named_ranks <= target.ranks, (named_ranks, target.ranks)
    steps = Counter(
        (one.seat, one.step) for one in events if isinstance(one, PhaseDone) and one.kind == "step"
    )
    ranks = Counter(seat for (seat, _), many in steps.items() if many > 1)
    # A step that some ranks have completed is redone without being lost.
    least, most = min(ranks[seat] for seat in range(summary.world)), max(ranks.values(), default=0)
    lost = summary.committed_steps_lost
    assert lost is not None and least <= lost <= most, "the redone steps are not those stated"
    backs = [one for one in events if isinstance(one, Decided) and one.rung in FROM_A_COPY]
    assert all(one.reason for one in backs) and bool(backs) >= bool(lost)
    return lost


@pytest.mark.parametrize(("fault", "place", "kind"), rows())
def test_a_fault_leaves_the_results_of_one_host(
    fault: str,
    place: str,
    kind: str,
    cluster: Cluster,
    undisturbed: Undisturbed,
) -> None:
    hold = cluster.folder / "hold"
    hold.touch()
    lease_s = max(PLACES[place].lease_s, FAULTS[fault].lease_s)
    flags = (f"--limit=lease_s={lease_s:g}", *PLACES[place].flags)
    with contextlib.ExitStack() as stack:
        server = None
        if fault == "store away":
            if shutil.which("etcd") is None:
                pytest.skip("etcd is not installed (apt-get install etcd-server)")
            terms = stack.enter_context(etcd_on_the_switch(cluster.hosts, cluster.folder))
            server, flags = terms.server, (*flags, terms.flag)
        if fault == "stepped clocks":
            if shutil.which("cc") is None:
                pytest.skip("a C compiler is not installed")
            for host in ("n1", "n2"):
                cluster.environment[host] = stepped_clock(cluster.folder, host)
        cluster.start("2:3", RANKS[kind], *flags, job=(STEPS, kind, str(hold), PACE_S))
        target = Target(cluster, server)
        strike(target, FAULTS[fault], PLACES[place])
        hold.unlink()
        ends = {name: cluster.end(name) for name in cluster.hosts.up}
        whole = [end for name, end in ends.items() if name not in target.without_launcher]
    assert {code for code, _ in whole} == {EXIT_DONE}, ends
    must_be_equal(cluster, undisturbed(2 * RANKS[kind], kind))
    may_lapse = (fault, place) in MAY_LAPSE
    redone = must_be_true(target, FAULTS[fault], PLACES[place], may_lapse)
    print(f"rolled back {redone} steps" if redone else "equal")
    assert {host: cluster.hosts.processes(host) for host in cluster.hosts.up} == {
        host: [] for host in cluster.hosts.up
    }
