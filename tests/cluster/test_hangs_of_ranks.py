"""Hangs of ranks on several hosts: the rank that others wait for is found from all hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.conftest import ON_HOSTS
from tests.cluster.test_several_nodes import Cluster, expected
from tests.end_to_end.test_flight_recorder_collection import SKIPS

from outlast.errors import EXIT_DONE
from outlast.events import Decided, Noticed
from outlast.fleet.flight_recorder.hang_report import analyse_dumps
from outlast.fleet.flight_recorder.recorder_dumps import read_dumps

__all__ = ["expected"]
pytestmark = ON_HOSTS
LIMITS = ("--limit=hang_floor_s=3", "--limit=hang_ceiling_s=300")


def dumps(cluster: Cluster) -> list[Path]:
    return sorted((cluster.run_dir / "traces").iterdir())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_replaced_within_the_phase_timeout(
    rank: int, cluster: Cluster, expected: dict[int, list[str]]
) -> None:
    cluster.start("2", 1, *LIMITS, f"--fault=hang:rank={rank},step=20,phase=backward")
    assert [cluster.end(name)[0] for name in ("n1", "n2")] == [EXIT_DONE, EXIT_DONE]
    assert cluster.results() == expected[2]
    (incident,) = cluster.summary().incidents
    assert (incident.cause, incident.committed_steps_lost) == ("hung", 0)
    (folder,) = dumps(cluster)
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0@n1.json", "rank_1@n2.json"]


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_a_collective_that_one_host_skips_is_retried_and_nobody_is_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(SKIPS.replace("sys.argv[1]", "sys.argv[2]"))  # the first is our directory
    cluster.start("3", 1, *LIMITS, script=script, job=("once",))
    assert {cluster.end(name)[0] for name in cluster.hosts.names} == {EXIT_DONE}
    found = cluster.events()
    watched = [one for one in found if isinstance(one, Noticed) and one.how == "heartbeat"]
    assert [(one.fault.kind, one.fault.seat) for one in watched] == [("transport", -1)]
    assert "rank 2 reached the vote of phase 5" in watched[0].fault.detail
    assert [one.rung for one in found if isinstance(one, Decided)] == ["retry"]
    assert analyse_dumps(read_dumps(dumps(cluster))).ranks == (2,)
