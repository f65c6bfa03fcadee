"""Node checks on several hosts: ranks leave a host before it fails."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import ON_HOSTS, Undisturbed

from outlast.errors import EXIT_DONE
from outlast.events import Decided, PhaseDone, Warned, WorkerSpawned

pytestmark = ON_HOSTS
STEPS = "80"
OWN = """
from pathlib import Path
from outlast.health.check_contract import Check, Probe, Observation, Sample

class Flag(Sample, frozen=True):
    is_bad: bool

def take():
    return Flag(is_bad=Path("/dev/shm/bad").exists())

def judge(sample, about):
    if sample.is_bad:
        yield Observation("now", "the fan stands still"{device})
    else:
        yield Observation("healthy", "all fans turn")

CHECKS = Check("fans", "thermal", Flag, lambda settings: [Probe("", take)], judge)
"""


@pytest.fixture(scope="module")
def expected(undisturbed: Undisturbed) -> list[str]:
    return undisturbed(4)


@pytest.mark.parametrize("cluster", [3], indirect=True)
@pytest.mark.parametrize(("device", "ranks"), [("", [2, 3]), (", device='GPU 1'", [3])])
def test_ranks_leave_a_host_with_a_finding(
    cluster: Cluster,
    device: str,
    ranks: list[int],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks of the host, or the one of the local rank that has the device."""
    settings, hold = cluster.folder / "check.toml", cluster.folder / "hold"
    (cluster.folder / "fans_check.py").write_text(OWN.replace("{device}", device))
    settings.write_text('own = ["fans_check:CHECKS"]\n[profiles]\nperiodic = ["fans"]\n')
    monkeypatch.setenv("PYTHONPATH", str(cluster.folder))
    hold.touch()
    checks = ("--check-every=1s", f"--check-settings={settings}", "--migrate-on=now")
    cluster.start("2:3", 2, *checks, job=(STEPS, "ddp", str(hold)))
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 30, "step 30")
    cluster.hosts.run("n2", "touch", "/dev/shm/bad")
    cluster.wait_for_event(lambda one: isinstance(one, Decided), "the decision")
    hold.unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    assert cluster.results() == expected
    found = cluster.events()
    (decided,) = [one for one in found if isinstance(one, Decided)]
    host_of = {one.worker: one.host for one in found if isinstance(one, WorkerSpawned)}
    assert decided.rung == "migrate" and "fans: thermal" in decided.reason
    assert [(seat, host_of[new]) for seat, _, new in decided.replaced] == [
        (rank, "n3") for rank in ranks
    ]
    (incident,) = cluster.summary().incidents
    assert incident.committed_steps_lost == 0
    assert {one.host for one in found if isinstance(one, Warned)} == {"n2"}
    assert sorted(path.name for path in (cluster.run_dir / "health").iterdir()) == cluster.hosts.up
    command = [sys.executable, "-m", "outlast", "explain", str(cluster.run_dir)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "before: now: fans: thermal" in told and "n2" in told
