"""Checkpointer with retention and durable storage."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.bucket_server import BucketServer
from torch import nn

from outlast.checkpoint import Checkpointer, CheckpointWarning
from outlast.checkpoint.stores.catalog import checkpoint_places, open_checkpoint, verify
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.object_store import open_store
from outlast.checkpoint.stores.store_interfaces import StoreSource
from outlast.errors import ConfigError, StorageError, UsageError

pytestmark = pytest.mark.process
DEADLINE_S = 60.0


def make(step: int = 0) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(step)
    return {"model": model}


def train(root: Path, steps: range, **settings: Any) -> None:
    """One save a step, of which each is committed before the next one begins."""
    with Checkpointer(root, complete=False, **settings) as saves:
        saves.load(make())
        for step in steps:
            saves.save(step, make(step))
            saves.wait()


def steps(store: StoreSource) -> list[int]:
    return [place.step for place in checkpoint_places(store)]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, what
        os.sched_yield()


def behind(parent: int) -> list[int]:
    """The processes behind the saves of this one."""
    children, found = list[str](), list[int]()
    for task in Path(f"/proc/{parent}/task").iterdir():
        with suppress(OSError):  # this thread has ended
            children += (task / "children").read_text().split()
    for pid in children:
        with suppress(OSError):  # this process has ended
            if b"checkpoint/upkeep/" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def told(saves: Checkpointer) -> str:
    """The next failure, whenever it comes."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            saves.wait()
        except StorageError as error:
            return str(error)
    return ""


def test_pruning_spares_checkpoints_that_a_reader_holds(tmp_path: Path) -> None:
    root = Folder(tmp_path)
    train(tmp_path, range(1, 3))
    (_, first) = checkpoint_places(root)
    with root.hold(first.directory):
        train(tmp_path, range(3, 9), keep="last=2,every=4")
        assert steps(root) == [8, 7, 4, 1]
    train(tmp_path, range(9, 10), keep="last=2,every=4")
    assert steps(root) == [9, 8, 4] and behind(os.getpid()) == []


def test_nothing_goes_before_a_newer_one_is_whole(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4))
    for shard in tmp_path.glob("step-*/shard-*"):
        flip(shard)
    with Checkpointer(tmp_path, complete=False, keep="last=1", branch=True) as saves:
        saves.save(4, make(4))
        (process,) = behind(os.getpid())  # which has only just begun to start
        os.kill(process, signal.SIGSTOP)
        saves.wait()
        (newest, *_) = tmp_path.glob("step-000000004-*/shard-*")
        flip(newest)
        os.kill(process, signal.SIGCONT)
    assert steps(Folder(tmp_path)) == [4, 3, 2, 1]


def test_durable_storage_has_what_this_disk_lost(
    tmp_path: Path, server: BucketServer, address: str
) -> None:
    root = tmp_path / "here"
    train(root, range(1, 4), keep="last=2", durable=[address, f"{tmp_path}/mirror keep=last=1"])
    assert steps(open_store(address)) == [3, 2] and steps(Folder(tmp_path / "mirror")) == [3]
    shutil.rmtree(root)
    state = make()
    with Checkpointer(root, complete=False, durable=address) as saves:
        restored = saves.load(state)
    assert restored and restored.step == 3 and state["model"].weight[0, 0] == 3
    assert f"is read from {address}" in restored.notes[0] and not root.exists()
    server.kill()
    try:
        with pytest.warns(CheckpointWarning, match="cannot be reached"):
            saves = Checkpointer(root, complete=False, durable=[address, tmp_path / "mirror"])
        restored = saves.load(make())  # of two, one answers, and has it
        assert restored and "cannot be reached" in restored.notes[0]
        shutil.rmtree(tmp_path / "mirror")
        with pytest.raises(StorageError, match=r"nothing was touched: .*cannot be reached"):
            saves.load(make())
    finally:
        server.start()


@pytest.mark.parametrize("file", ["shard-00000", "rank-00000.json"])
def test_damage_is_repaired_from_durable_storage(tmp_path: Path, file: str) -> None:
    root, far = tmp_path / "here", tmp_path / "far"
    train(root, range(1, 3), durable=far)
    (damaged,) = root.glob(f"step-000000002-*/{file}")
    flip(damaged)
    state = make()
    with Checkpointer(root, complete=False, durable=far) as saves:
        restored = saves.load(state)
        assert restored and restored.step == 2 and state["model"].weight[0, 0] == 2
        chunkwise = "it was read from" in restored.notes[0]  # else all of it comes from there
        assert chunkwise == (file == "shard-00000")
        assert file in restored.notes[0] and str(far) in " ".join(restored.notes)
        newest = checkpoint_places(saves._store)[0]
        eventually(lambda: not verify(open_checkpoint(Folder(root), newest)), "it is mended")
    with Checkpointer(root, complete=False) as saves:
        restored = saves.load(state)
    assert restored and restored.step == 2 and restored.notes == ()


def test_a_failing_target_is_reported_and_receives_all_later(tmp_path: Path) -> None:
    far = tmp_path / "far"
    saves = Checkpointer(tmp_path / "here", complete=False, durable=far, on_failure="raise")
    far.rmdir()
    far.write_text("a file where the folder should be")
    saves.save(1, make(1))
    assert f"was not carried to {far}" in told(saves)
    (alone,) = behind(os.getpid())
    os.kill(alone, signal.SIGKILL)
    assert "copies checkpoints was killed by signal 9" in told(saves)
    far.unlink()
    saves.close()
    assert steps(Folder(far)) == [1]


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from outlast.checkpoint import Checkpointer
saves = Checkpointer(sys.argv[1], complete=False, durable=sys.argv[2])
state = {"large": torch.ones(4 << 20)}
saves.save(1, state)
while not list(Path(sys.argv[2]).glob("*/commit.json")):
    saves.wait()
keeper = saves._driver.keeper._end.process.pid
os.kill(keeper, signal.SIGSTOP)  # it writes later than this lives
saves.save(2, state)
print(keeper, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_saves_of_a_killed_trainer_reach_durable_storage(tmp_path: Path) -> None:
    root, far = tmp_path / "here", tmp_path / "far"
    command = [sys.executable, "-c", SCRIPT, root, far]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert child.returncode == -signal.SIGKILL and steps(Folder(far)) == [1]
    os.kill(int(child.stdout), signal.SIGCONT)
    eventually(lambda: steps(Folder(far)) == [2, 1], "both are there")


def test_invalid_targets_are_refused_before_any_process_starts(tmp_path: Path) -> None:
    root = tmp_path / "here"
    with pytest.raises(UsageError, match=r"durable='s3://bucket/x'"):
        Checkpointer("s3://bucket/x")
    with pytest.raises(ConfigError, match="first=2"):
        Checkpointer(root, keep="first=2")
    with pytest.raises(UsageError, match="is where this run already saves"):
        Checkpointer(root, durable=root)
    train(tmp_path / "far", range(1, 2), job="another")
    with pytest.raises(UsageError, match=r"job 'another'.*nothing was started"):
        Checkpointer(root, job="this", durable=tmp_path / "far")
    with pytest.raises(UsageError, match=r"job 'another'.*nothing was started"):
        Checkpointer(tmp_path / "far", job="this", keep="last=1")
    assert not list(root.glob("*"))
