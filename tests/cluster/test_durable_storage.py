"""Durable storage, and replays, of runs on several hosts."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import ON_HOSTS, Undisturbed

from outlast.checkpoint.stores.catalog import checkpoint_places, open_checkpoint, verify
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE
from outlast.events import PhaseDone, RunStarted

pytestmark = ON_HOSTS
STEPS = "80"
SAVES = ("--checkpoint-every=10", "--limit=lease_s=3")
PLACED = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
names = ("LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
where = torch.tensor([float(os.environ[name]) for name in names])
loader = DataLoader(torch.linspace(0, 1, 16), 2)
session.protect(model=model, optimizer=optimizer, loader=loader)

def train_step(batch):
    optimizer.zero_grad()
    loss = (model(where + batch.mean()) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()

for batch in session.batches(loader, until=40):
    session.report(loss=session.run(train_step, batch))
"""


@pytest.fixture(scope="module")
def expected(undisturbed: Undisturbed) -> list[str]:
    return undisturbed(2)


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_a_new_controller_copies_checkpoints_to_durable_storage(
    cluster: Cluster, expected: list[str]
) -> None:
    far = cluster.folder / "far"
    hold = cluster.folder / "hold"
    hold.touch()
    flags = (*SAVES, f"--durable={far}", "--keep=last=3")
    cluster.start("2:3", 1, *flags, job=(STEPS, "ddp", str(hold)))
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 30, "step 30")
    cluster.hosts.run("n1", "pkill", "-KILL", "-o", "-f", "outlast run")
    hold.unlink()
    ends = [cluster.end(name) for name in ("n2", "n3")]
    assert [code for code, _ in ends] == [EXIT_DONE, EXIT_DONE], ends
    assert sum("takes over as controller, term 2" in output for _, output in ends) == 1
    assert cluster.results() == expected
    here, there = Folder(cluster.run_dir / "checkpoints"), Folder(far)
    assert checkpoint_places(here)[0] == checkpoint_places(there)[0]
    for place in checkpoint_places(there):
        assert verify(open_checkpoint(there, place)) == []
    assert not (far / "meeting").exists()


def test_an_empty_directory_goes_on_from_durable_storage(
    cluster: Cluster, expected: list[str]
) -> None:
    far, hold = cluster.folder / "far", cluster.folder / "hold"
    hold.touch()
    job = (STEPS, "ddp", str(hold))
    cluster.start("2", 1, *SAVES, f"--durable={far}", job=job)
    cluster.wait_for_event(lambda one: isinstance(one, PhaseDone) and one.step >= 30, "step 30")
    cluster.hosts.run("n2", "pkill", "-TERM", "-o", "-f", "outlast run")
    assert [cluster.end(name)[0] for name in ("n1", "n2")] == [EXIT_INTERRUPTED] * 2
    (first,) = [one for one in cluster.events() if isinstance(one, RunStarted)]
    hold.unlink()
    cluster.run_dir = cluster.disk / "another"
    cluster.start("2", 1, *SAVES, f"--durable={far}", job=job)
    assert [cluster.end(name)[0] for name in ("n1", "n2")] == [EXIT_DONE] * 2
    assert cluster.results() == expected
    (second,) = [one for one in cluster.events() if isinstance(one, RunStarted)]
    assert (second.run, second.resumed_step > 0, second.term > first.term) == (
        first.run,
        True,
        True,
    )


def test_a_durable_directory_of_one_host_alone_is_named_there(cluster: Cluster) -> None:
    cluster.start("2", 1, *SAVES, "--durable=/dev/shm/far", "--limit=hello_s=15")
    code, output = cluster.end("n2")
    assert code == EXIT_USAGE
    assert "its --durable /dev/shm/far is not the directory of the controller's node" in output
    code, output = cluster.end("n1")
    assert code == EXIT_USAGE and "1 of 2 nodes came to the endpoint" in output


def test_a_replay_of_several_nodes_runs_on_one_host(cluster: Cluster) -> None:
    """Ranks have the local ranks of the run, by which its script chooses its data."""
    script = cluster.folder / "placed.py"
    script.write_text(PLACED)
    cluster.start("2", 2, "--checkpoint-every=10", "--keep=last=9", script=script)
    assert [cluster.end(name)[0] for name in ("n1", "n2")] == [EXIT_DONE] * 2
    command = [sys.executable, "-m", "outlast", "replay", str(cluster.run_dir), "--from=20"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == EXIT_DONE, ended.stdout + ended.stderr
    assert "bit-identical" in ended.stdout and "10 steps" in ended.stdout
