"""Saves after a rollback, a new run, or beside another job: newest, or refused by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outlast.checkpoint import Checkpointer, CheckpointWarning
from outlast.checkpoint.format.manifests import COMMIT, SavePoint
from outlast.checkpoint.stores.catalog import checkpoint_places, open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import StorageError, UsageError

pytestmark = pytest.mark.process
SECOND_JOB = """
import sys, torch
from outlast.checkpoint import Checkpointer
saves = Checkpointer(sys.argv[1])
state = {"weight": torch.full((4,), 7.0)}
saves.load(state)
saves.save(int(sys.argv[2]), state)
saves.wait()
print("saved", flush=True)
sys.stdin.read()
"""


def state(value: float = 0.0) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def save(root: Path, steps: Sequence[int], load: int | None = None, **how: Any) -> dict[str, Any]:
    """Each step's weights are the step."""
    live = state()
    with Checkpointer(root, on_failure="raise", **how) as saves:
        if not how.get("branch"):
            saves.load(live, step=load)
        for step in steps:
            nn.init.constant_(live["model"].weight, step)
            saves.save(step, live)
            saves.wait()
    return live


def newest(root: Path) -> tuple[int, float]:
    live = state()
    with Checkpointer(root) as saves:
        restored = saves.load(live)
    assert restored
    return restored.step, live["model"].weight[0, 0].item()


def steps(root: Path) -> list[int]:
    return [place.step for place in checkpoint_places(Folder(root))]


def test_going_back_keeps_the_new_work(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    how = {"keep": "last=2", "durable": str(mirror)}
    save(root, [100, 200, 300])
    save(root, [110, 120], load=100, **how)
    for where in (root, mirror):
        assert steps(where) == [120, 110, 300]
        assert newest(where) == (120, 120.0)
        assert (where / "latest").read_text().startswith("step-000000120-n120-l1-")
    commit = open_checkpoint(Folder(root), checkpoint_places(Folder(root))[0]).commit
    assert commit.parent.startswith("step-000000110-") and commit.base.startswith("step-000000100-")
    save(root, [130], **how)  # goes on, on the same line
    assert steps(root) == [130, 120, 300]
    save(root, [140], keep="last=1,lines=0")
    assert steps(root) == [140]


def test_a_new_run_in_a_used_directory_must_pass_branch(tmp_path: Path) -> None:
    save(tmp_path, [100, 200])
    with Checkpointer(tmp_path) as saves, pytest.raises(UsageError, match=r"branch=True"):
        saves.save(10, state())
    assert steps(tmp_path) == [200, 100]
    save(tmp_path, [10, 20], branch=True, keep="last=2")
    assert steps(tmp_path) == [20, 10, 200]
    assert newest(tmp_path) == (20, 20.0)


def test_a_load_in_the_middle_goes_back_as_well(tmp_path: Path) -> None:
    live = state()
    with Checkpointer(tmp_path, keep="last=2") as saves:
        saves.load(live)
        for step in (1, 2, 3):
            saves.save(step, live)
            saves.wait()
        saves.load(live, step=2)
        saves.save(3, live)
    found = checkpoint_places(Folder(tmp_path))
    assert (found[0].step, found[0].line) == (3, 1)
    assert newest(tmp_path)[0] == 3


def test_another_job_in_the_directory_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, [100], job="one")
    with pytest.raises(UsageError, match="job 'one', and this is 'two'"):
        save(tmp_path, [110], branch=True, job="two")
    assert steps(tmp_path) == [100]


def test_a_second_process_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SECOND_JOB, tmp_path, "100"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout and other.stdout.readline() == "saved\n"
        live = {"weight": torch.zeros(4)}
        with Checkpointer(tmp_path) as saves:
            restored = saves.load(live)  # to read is nobody's loss
            assert restored and restored.step == 100 and live["weight"][0] == 7
            with pytest.raises(UsageError, match=f"pid {other.pid} on "):
                saves.save(110, live)
            other.kill()
            other.wait()
            saves.save(110, live)
            saves.wait()
    assert steps(tmp_path) == [110, 100]


def test_a_load_waits_for_the_keeper_of_a_dead_trainer(tmp_path: Path) -> None:
    """It was killed behind its last save: the next one begins from that, and not from before."""
    with subprocess.Popen(
        [sys.executable, "-c", SECOND_JOB.replace("saves.wait()", ""), tmp_path, "100"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout and other.stdout.readline() == "saved\n"
        children = Path(f"/proc/{other.pid}/task/{other.pid}/children").read_text().split()
        keepers = [
            int(pid)
            for pid in children
            if b"checkpoint/keeper/" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        for pid in keepers:
            os.kill(pid, signal.SIGSTOP)
        other.kill()
        other.wait()
        resume = subprocess.Popen(["sh", "-c", "sleep 1; kill -CONT $0", str(keepers[0])])
        with Checkpointer(tmp_path) as saves:
            restored = saves.load({"weight": torch.zeros(4)})
        resume.wait()
    assert restored and restored.step == 100 and restored.notes == ()


def test_a_renamed_root_is_found_before_anything_is_written(tmp_path: Path) -> None:
    root, live = tmp_path / "root", state()
    saves = Checkpointer(root)
    saves.save(1, live)
    saves.wait()
    root.rename(tmp_path / "renamed")
    saves.save(2, live)
    with pytest.warns(CheckpointWarning, match="was renamed"):
        saves.close()
    assert not root.exists() and steps(tmp_path / "renamed") == [1]


@pytest.mark.parametrize("step", [True, np.True_, 10**18, -1, 1.0, "1"])
def test_steps_other_than_counts_are_refused(tmp_path: Path, step: Any) -> None:
    with Checkpointer(tmp_path) as saves:
        with pytest.raises(UsageError, match="must be a whole number from 0"):
            saves.save(step, state())
        with pytest.raises(UsageError, match="must be a whole number from 0"):
            saves.load(state(), step=step)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [np.int64(7), np.uint8(7), 10**18 - 1, 0])
def test_any_integer_is_a_step(tmp_path: Path, step: Any) -> None:
    save(tmp_path, [step])
    assert checkpoint_places(Folder(tmp_path))[0].step == int(step)
    live = state()
    with Checkpointer(tmp_path) as saves:
        restored = saves.load(live, step=step)
    assert restored and type(restored.step) is int and restored.step == step


def test_a_newest_checkpoint_without_commit_record_is_noted(tmp_path: Path) -> None:
    save(tmp_path, [1, 2])
    lost = checkpoint_places(Folder(tmp_path))[0].directory
    (tmp_path / lost / COMMIT).unlink()
    with Checkpointer(tmp_path) as saves:
        restored = saves.load(state())
        assert restored and restored.step == 1
        assert len(restored.notes) == 1 and lost in restored.notes[0]
        saves.save(2, state())  # what is left there may yet be committed: this is newer
    found = checkpoint_places(Folder(tmp_path))
    assert (found[0].step, found[0].line) == (2, 0)
    assert newest(tmp_path)[0] == 2


def test_an_only_checkpoint_without_commit_record_is_reported(tmp_path: Path) -> None:
    save(tmp_path, [1])
    (tmp_path / checkpoint_places(Folder(tmp_path))[0].directory / COMMIT).unlink()
    with Checkpointer(tmp_path) as saves, pytest.warns(CheckpointWarning, match="no commit record"):
        assert saves.load(state()) is None


@pytest.mark.parametrize("name", [COMMIT, "rank-00000.json", "shard-00000"])
def test_an_error_of_the_disk_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    save(root, [1, 2], durable=str(mirror))
    bad: SavePoint = checkpoint_places(Folder(root))[0]
    for method in ("get", "read"):
        real = getattr(Folder, method)

        def failing(self: Folder, directory: str, file: str, *rest: Any, real: Any = real) -> Any:
            if (self.root, directory, file) == (root, bad.directory, name):
                raise StorageError(f"{directory}/{file}: could not be read: Input/output error")
            return real(self, directory, file, *rest)

        monkeypatch.setattr(Folder, method, failing)
    with (
        Checkpointer(root) as saves,
        pytest.raises(StorageError, match=r"Input/output error.*on_unreadable='older'"),
    ):
        saves.load(state())
    with Checkpointer(root, on_unreadable="older") as saves:
        restored = saves.load(state())
    assert restored and restored.step == 1 and "Input/output error" in restored.notes[0]
    with Checkpointer(root, durable=str(mirror)) as saves:
        restored = saves.load(state())
    assert restored and restored.step == 2
