"""Copies in keepers' memory on several hosts: a lost host's shards come from other hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import ON_HOSTS, Undisturbed

from outlast.errors import EXIT_DONE
from outlast.events import Decided, PhaseDone

pytestmark = ON_HOSTS
STEPS = "80"
LEASE = "--limit=lease_s=3"


@pytest.fixture(scope="module")
def expected(undisturbed: Undisturbed) -> dict[int, list[str]]:
    """Results of runs without replicas, by world size."""
    return {world: undisturbed(world, "fsdp") for world in (2, 3, 4)}


def lose(cluster: Cluster, nodes: str, lost: tuple[str, ...], *flags: str) -> list[Decided]:
    """Run to the end, and power off hosts 10 steps before it; return the decisions."""
    hold = cluster.folder / "hold"
    hold.touch()
    cluster.start(nodes, 1, LEASE, *flags, job=(STEPS, "fsdp", str(hold)))
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 70, "step 70")
    for name in lost:
        cluster.hosts.power_off(name)
    cluster.wait_for_event(lambda one: isinstance(one, Decided), "the decision")
    hold.unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    return [one for one in cluster.events() if isinstance(one, Decided)]


def has_checkpoint(cluster: Cluster) -> bool:
    return any((cluster.run_dir / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("cluster", [3], indirect=True)
@pytest.mark.parametrize(
    ("every", "lost", "rung"),
    [("5", "n2", "rollback"), ("1", "n2", "rebuild"), ("5", "n1", "rollback")],
)
def test_a_lost_shard_comes_from_another_hosts_memory(
    cluster: Cluster, expected: dict[int, list[str]], every: str, lost: str, rung: str
) -> None:
    """No checkpoint is on the disk. n1 has the controller."""
    flags = (f"--snapshot-every={every}", "--copies=2")
    decided = lose(cluster, "2:3", (lost,), *flags)
    assert cluster.results() == expected[2]
    assert [one.rung for one in decided] == [rung]
    assert not has_checkpoint(cluster)


@pytest.mark.parametrize("cluster", [4], indirect=True)
def test_a_lost_part_is_computed_from_parity_of_other_hosts(
    cluster: Cluster, expected: dict[int, list[str]]
) -> None:
    decided = lose(cluster, "3:4", ("n2",), "--snapshot-every=5", "--copies=xor:3")
    assert cluster.results() == expected[3]
    assert [one.rung for one in decided] == ["rollback"] and not has_checkpoint(cluster)


@pytest.mark.parametrize("cluster", [6], indirect=True)
def test_the_loss_of_a_failure_domain_takes_no_part_with_all_its_copies(
    cluster: Cluster, expected: dict[int, list[str]], tmp_path: Path
) -> None:
    topology = tmp_path / "topology"
    lines = [f"n{number} row/rack{1 + (number - 1) // 2}" for number in range(1, 7)]
    topology.write_text("\n".join([*lines, ""]))
    flags = ("--snapshot-every=5", "--copies=2", f"--topology={topology}")
    decided = lose(cluster, "4:6", ("n3", "n4"), *flags)
    assert cluster.results() == expected[4]
    assert decided[-1].rung == "rollback" and not has_checkpoint(cluster)
