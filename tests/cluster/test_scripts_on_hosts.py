"""Scripts of the catalogue on hosts, one of which loses power: equal to plain ranks."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.hosts import Hosts, missing_requirement
from tests.scripts.plain_ranks import PlainRanks
from tests.scripts.script_catalogue import FOLDER, Script, read_catalogue
from tests.scripts.script_runs import Ended, differences, digests_of_run
from tests.scripts.test_script_equality import plain_ranks, reference

from outlast.errors import EXIT_DONE
from outlast.events import AnyEvent, FaultInjected, WorkerSpawned

__all__ = ["plain_ranks"]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.catalogue,
    pytest.mark.process,
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement()),
]
LIMITS = ("--limit=lease_s=2", "--limit=hang_floor_s=60", "--limit=hang_ceiling_s=120")
PLACES = ("forward", "backward", "vote", "between")


def scripts() -> list[Script]:
    """Return the scripts that are neither refused nor expected to fail."""
    return [one for one in read_catalogue() if not (one.refused or one.unmended)]


def is_fault(event: AnyEvent) -> bool:
    return isinstance(event, FaultInjected)


def stopped_host(cluster: Cluster) -> str:
    """Return the host of the worker that has stopped itself."""
    events = cluster.events()
    (worker,) = {one.worker for one in events if isinstance(one, FaultInjected)}
    spawned = {one.worker: one.host for one in events if isinstance(one, WorkerSpawned)}
    return spawned[worker]


@pytest.mark.parametrize("script", scripts(), ids=lambda one: one.name)
def test_a_host_that_loses_power_leaves_the_bits_of_plain_ranks(
    script: Script,
    tmp_path: Path,
    plain_ranks: PlainRanks,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank stops itself at its place, so that its host loses power at that very place."""
    expected = reference(script, request.config.cache, tmp_path, plain_ranks)
    local = 2 if script.ranks in (4, 6, 8) else 1
    nodes = script.ranks // local
    dice = random.Random(f"{script.name} {os.environ.get('SCRIPTS_SEED', '0')}")
    place = dice.choice([one for one in PLACES if one in script.places])
    rank = dice.randrange(local, script.ranks)  # of a host without the controller
    fault = f"--fault=stop:rank={rank},step={dice.randrange(2, script.steps)},phase={place}"
    out = tmp_path / "digests"
    out.mkdir()
    for name, value in (("PYTHONPATH", FOLDER / "kit"), ("DIGESTS", out), ("OMP_NUM_THREADS", 1)):
        monkeypatch.setenv(name, str(value))
    with Hosts(tmp_path, nodes + 1) as hosts:
        cluster = Cluster(tmp_path, hosts)
        try:
            cluster.start(f"{nodes}:{nodes + 1}", local, *LIMITS, fault, script=script.path)
            cluster.wait_for_event(is_fault, fault)
            hosts.power_off(stopped_host(cluster))
            ends = {name: cluster.end(name) for name in hosts.up}
        finally:
            cluster.close()
    assert {code for code, _ in ends.values()} == {EXIT_DONE}, (fault, ends)
    (out / "run").symlink_to(cluster.run_dir)
    wrong = differences(digests_of_run(Ended(0, "", out), script.ranks), expected)
    assert wrong == [], "\n".join([fault, *wrong, *(text for _, text in ends.values())])
    assert [one.cause for one in cluster.summary().incidents] == ["agent_lost"]
