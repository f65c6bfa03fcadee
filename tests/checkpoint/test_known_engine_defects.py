"""Known defects of other checkpoint engines, each as a test of this one.

torch.distributed.checkpoint tears a save while a stager is used again, tells nobody of a failed
asynchronous save, has no checkpoints once its daemon was killed, and overwrites in place; all of
them load flipped bits (load/test_corruption.py) and sync before they flush
(keeper/test_keeper_disk.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outlast.checkpoint import Checkpointer, CheckpointWarning
from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.save.save_engine import SaveEngine
from outlast.checkpoint.save.save_request import SaveRequest, SaveSettings
from outlast.checkpoint.stores.catalog import checkpoint_places, open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import CorruptionError

pytestmark = pytest.mark.process
DEADLINE_S = 30.0
SOAK = Path(__file__).parents[1] / "soak" / "save_kills.py"


def engine_at(root: Path, arenas: int = 2) -> tuple[SaveEngine, KeeperClient]:
    keeper = KeeperClient.start("the test")
    settings = SaveSettings(root=root, rank=0, world=1, job="job", arenas=arenas)
    engine = SaveEngine(settings, lambda message: [message], keeper)
    return engine, keeper


def save(
    engine: SaveEngine, step: int, tensors: dict[str, torch.Tensor], attempt: str = "a"
) -> int:
    place = SavePoint(step, step, attempt)
    return engine.save(SaveRequest(place, tensors))


def values(root: Path, step: int) -> set[float]:
    """Every different value in the newest checkpoint of this step."""
    store = Folder(root)
    place = next(place for place in checkpoint_places(store) if place.step == step)
    reader = CheckpointReader(open_checkpoint(store, place))
    found = {name: torch.full(t.shape, -1.0) for name, t in reader.checkpoint.tensors.items()}
    SaveEngine.read(reader, found)
    return {float(end) for t in found.values() for end in (t.numpy().min(), t.numpy().max())}


def fill(state: dict[str, torch.Tensor], value: float) -> None:
    for tensor in state.values():
        tensor.numpy().fill(value)


@pytest.mark.parametrize("arenas", [1, 2])
def test_saves_that_overlap_with_training_are_never_torn(tmp_path: Path, arenas: int) -> None:
    """Three in a row, with updates in place in between; DCP with a stager that is used again gives
    {1, 2, 3}, {2, 3} and {3}."""
    state = {f"t{i}": torch.zeros(1 << 20) for i in range(10)}
    with Checkpointer(tmp_path, complete=False, arenas=arenas, on_failure="raise") as saves:
        for step in (1, 2, 3):
            fill(state, step)
            saves.save(step, {"state": state})
        fill(state, 9)
    assert [values(tmp_path, step) for step in (1, 2, 3)] == [{1}, {2}, {3}]


def test_a_failure_in_the_background_reaches_the_next_save(tmp_path: Path) -> None:
    """Nobody asks for a future: the loop that only ever saves hears of it."""
    state = {"state": {"w": torch.zeros(1000)}}
    with Checkpointer(tmp_path / "root", complete=False) as saves:
        saves.save(1, state)
        saves.wait()
        (tmp_path / "root").rename(tmp_path / "moved")
        (tmp_path / "root").write_text("in the way")
        saves.save(2, state)
        with pytest.warns(CheckpointWarning, match=r"step 2 failed .*root"):
            saves.wait(DEADLINE_S)
        (tmp_path / "root").unlink()
        (tmp_path / "moved").rename(tmp_path / "root")
        saves.save(3, state)
        saves.wait()
    assert values(tmp_path / "root", 3) == {0}


def test_a_killed_keeper_comes_back_again_and_again(tmp_path: Path) -> None:
    """Before a save, during one, after one: none is lost, nothing is said but in `ps`."""
    state = {"w": torch.zeros(4 << 20)}
    engine, keeper = engine_at(tmp_path)
    pids: list[int] = []
    for step in range(1, 7):
        fill(state, step)
        number = save(engine, step, state)
        end = keeper._end
        if end and end.process and step % 2:
            pids.append(end.process.pid)
            os.kill(end.process.pid, signal.SIGKILL)
        fill(state, -1)
        assert engine.wait(number, DEADLINE_S).kind == "committed"
    engine.close(DEADLINE_S)
    assert len(set(pids)) == 3
    assert [values(tmp_path, step) for step in range(1, 7)] == [{n} for n in range(1, 7)]


def test_the_same_place_twice_leaves_the_first_as_it_was(tmp_path: Path) -> None:
    """DCP unlinks its metadata first, and then writes over its files."""
    state = {"w": torch.ones(1000)}
    engine, _ = engine_at(tmp_path)
    assert engine.wait(save(engine, 1, state), DEADLINE_S).kind == "committed"
    before = files(tmp_path / SavePoint(1, 1, "a").directory)
    fill(state, 2)
    outcome = engine.wait(save(engine, 1, state), DEADLINE_S)
    assert outcome.kind == "failed" and "saved before; its files were not changed" in outcome.error
    assert files(tmp_path / SavePoint(1, 1, "a").directory) == before
    assert engine.wait(save(engine, 1, state, "b"), DEADLINE_S).kind == "committed"
    engine.close(DEADLINE_S)
    assert values(tmp_path, 1) == {2} and len(Folder(tmp_path).directories()) == 2


def files(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()}


def test_latest_is_not_trusted_and_never_names_an_incomplete_save(tmp_path: Path) -> None:
    """Others move it before the data is durable."""
    state = {"w": torch.ones(1000)}
    with Checkpointer(tmp_path, complete=False, on_failure="raise") as saves:
        saves.save(1, {"state": state})
        saves.wait()
    half = tmp_path / SavePoint(2, 2, "b").directory
    half.mkdir()
    (half / "shard-00000").write_bytes(bytes(4096))
    assert not (tmp_path / "latest").read_text().startswith(half.name)
    (tmp_path / "latest").write_text(f"{half.name}\n")
    with Checkpointer(tmp_path, complete=False) as saves:
        restored = saves.load({"state": state})
    assert restored and restored.step == 1


def test_a_truncated_file_is_never_a_success(tmp_path: Path) -> None:
    """torchsnapshot fills what it can, and says nothing."""
    state = {f"t{i}": torch.ones(1 << 20) for i in range(5)}  # more than one chunk
    with Checkpointer(tmp_path, complete=False, on_failure="raise") as saves:
        saves.save(1, {"state": state})
        saves.wait()
    (shard,) = tmp_path.glob("step-*/shard-00000")
    os.truncate(shard, shard.stat().st_size * 3 // 4)
    with pytest.raises(CorruptionError, match="shard-00000"):
        values(tmp_path, 1)


@pytest.mark.extended
def test_ten_random_kills(tmp_path: Path) -> None:
    """`make soak` has two hundred; a failure prints the seed to see it again."""
    done = subprocess.run(
        [sys.executable, str(SOAK), "--kills", "10", "--elements", "100000"],
        capture_output=True, text=True, timeout=150, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
