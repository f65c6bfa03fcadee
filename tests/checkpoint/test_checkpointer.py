"""Checkpointer without the launcher: bit-identical resume and reported failures."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outlast.checkpoint import Checkpointer, CheckpointWarning
from outlast.checkpoint.format import codec
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import ConfigError, CorruptionError, MismatchError, StorageError, UsageError

pytestmark = pytest.mark.process
REPOSITORY = Path(__file__).parents[2]


def make(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
        "best": 9.0,
    }


def train(state: dict[str, Any], steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        loss = state["model"](torch.randn(16, 4)).square().mean()
        state["scaler"].scale(loss).backward()
        state["scaler"].step(state["optimizer"])
        state["scaler"].update()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        losses.append(loss.item())
    state["best"] = min(losses)
    return losses


def weights(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state["model"].state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))


def keepers() -> list[int]:
    """The processes that this one has started and not yet reaped."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            children += (task / "children").read_text().split()
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in set(children)}
    return [int(pid) for pid, line in lines.items() if b"checkpoint/keeper/" in line]


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No keeper of this process can make a file of more than a few bytes."""
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in keepers()}
    assert limits
    for pid, (_, hard) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, hard))
    yield
    for pid, before in limits.items():
        with contextlib.suppress(ProcessLookupError):  # it was closed meanwhile
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def test_resumed_training_has_the_same_bits(tmp_path: Path) -> None:
    state = make()
    with Checkpointer(tmp_path) as saves:
        assert saves.load(state) is None
        train(state, 3)
        saves.save(3, state)
        best, rest = state["best"], train(state, 4)
        saves.save(7, state)
    for step, losses in ((3, rest), (None, train(state, 4))):
        resumed = make(1)
        with Checkpointer(tmp_path) as saves:
            restored = saves.load(resumed, step=step)
        assert restored is not None and restored.notes == () and restored.step == (step or 7)
        if step:
            assert resumed["best"] == best
        assert train(resumed, 4) == losses
    assert equal(weights(state), weights(resumed)) and keepers() == []


def test_two_ranks_and_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.checkpointer_ranks"]
    ranks = [
        subprocess.Popen(
            [*command, tmp_path, tmp_path / "store", str(rank), "2"], cwd=REPOSITORY,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        out, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0, out
    from tests.checkpoint.checkpointer_ranks import make as make_one
    from tests.checkpoint.checkpointer_ranks import seen, stage

    for root in (tmp_path, tmp_path / "sharded"):
        state = make_one(7)
        with Checkpointer(root) as saves:
            restored = saves.load(state, {"position": {}} if root == tmp_path else None)
        assert restored is not None and "2 ranks saved and 1 load" in restored.notes[0]
        expected = codec.decode((root / "seen").read_bytes())
        assert equal(seen(state), expected), root
    whole = {"model": stage([0, 1], 3)["model"]}
    with Checkpointer(tmp_path / "stages", complete=False) as saves:
        assert saves.load(whole)
    last = codec.decode((tmp_path / "stages" / "seen").read_bytes())
    assert equal({k: v for k, v in weights(whole).items() if k in last}, last)


def test_a_failed_save_warns_and_keeps_older_checkpoints(tmp_path: Path) -> None:
    state = make()
    with Checkpointer(tmp_path) as saves:
        train(state, 1)
        saves.save(1, state)
        saves.wait()
        at_1 = weights(state)
        with full_disk():
            train(state, 1)
            saves.save(2, state)
            deadline = time.monotonic() + 20
            with pytest.warns(CheckpointWarning, match="step 2 failed on rank 0.*File too large"):
                saves.wait(deadline - time.monotonic())
        found = make(1)
        restored = saves.load(found)
        assert restored is not None and restored.step == 1 and equal(weights(found), at_1)
        train(state, 1)
        saves.save(3, state)
    with Checkpointer(tmp_path) as saves:
        restored = saves.load(make(1))
        assert restored is not None and restored.step == 3


def test_a_failed_save_is_an_error_where_that_is_wanted(tmp_path: Path) -> None:
    state = make()
    saves = Checkpointer(tmp_path, on_failure="raise")
    saves.save(1, state)
    saves.wait()
    with full_disk():
        saves.save(2, state)
        with pytest.raises(StorageError, match="step 2 failed"):
            saves.wait()
        saves.save(3, state)
        with pytest.raises(StorageError, match="step 3 failed"):
            saves.close()
    assert keepers() == []
    with pytest.raises(UsageError, match="closed"):
        saves.save(4, state)
    with pytest.warns(CheckpointWarning, match="step 5 failed"), pytest.raises(KeyError):
        save_and_fail(tmp_path / "another", state)


def save_and_fail(root: Path, state: dict[str, Any]) -> None:
    """A save fails, and then the script does: that is what must be seen."""
    with Checkpointer(root, on_failure="raise") as saves:
        saves.save(4, state)
        saves.wait()
        with full_disk():
            saves.save(5, state)
            assert saves._driver
            saves._driver.engine.wait(2, 20)
        raise KeyError


def test_a_relative_root_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    with Checkpointer("saves", on_failure="raise") as saves:
        saves.save(1, make())
        saves.wait()
        monkeypatch.chdir(tmp_path / "second")
        saves.save(2, make())
        saves.wait()
        restored = saves.load(make())
    assert restored is not None and restored.step == 2
    assert not list((tmp_path / "second").iterdir())


def test_unsupported_saves_and_loads_are_refused(tmp_path: Path) -> None:
    state = make()
    with Checkpointer(tmp_path, job="a") as saves:
        with pytest.raises(UsageError, match="no optimizer is given"):
            saves.save(1, {"model": state["model"]})
        with pytest.raises(UsageError, match="step is -1"):
            saves.save(-1, state)
        saves.save(1, state)
        with pytest.raises(UsageError, match="earlier saves had best"):
            saves.save(2, {k: v for k, v in state.items() if k != "best"})
    with Checkpointer(tmp_path, job="b") as saves, pytest.raises(UsageError, match="of job 'a'"):
        saves.load(state)
    before = weights(state)
    state["model"].append(nn.Linear(1, 1))
    with Checkpointer(tmp_path) as saves, pytest.raises(MismatchError, match=r"model\.4\.bias"):
        saves.load(state)
    after = weights(state)
    assert all(torch.equal(before[k], after[k]) for k in before)
    with pytest.raises(UsageError, match="directory of checkpoints is ''"):
        Checkpointer("")
    with pytest.raises(ConfigError, match="s3:/bucket is no URL"):
        Checkpointer("s3:/bucket")
    with pytest.raises(ConfigError, match="gs:bucket/a is no URL"):
        Checkpointer(tmp_path, durable="gs:bucket/a every=2")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    for name, what in (("file", "it is no directory"), ("link", "it is a link that leads nowhere")):
        with Checkpointer(tmp_path / name) as saves, pytest.raises(StorageError, match=what):
            saves.save(1, make())
    alone = {"model": make(1)["model"]}
    drawn = torch.get_rng_state()
    with Checkpointer(tmp_path, complete=False) as saves:
        assert saves.load(alone)
    assert equal(weights(alone), before) and torch.equal(drawn, torch.get_rng_state())


@pytest.mark.parametrize(
    "option",
    [{"on_failure": "Raise"}, {"when_busy": "drop"}, {"on_unreadable": "old"}, {"save_s": 0},
     {"save_s": math.nan}, {"save_s": 1e300}, {"answer_s": math.inf}, {"arenas": 0}],
)  # fmt: skip
def test_an_option_that_would_mean_another_is_refused(
    tmp_path: Path, option: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(option))}=.*nothing was started"):
        Checkpointer(tmp_path / "saves", **option)
    assert not (tmp_path / "saves").exists()


def test_damaged_checkpoints_are_skipped_and_never_restart_from_zero(tmp_path: Path) -> None:
    state = make()
    with Checkpointer(tmp_path) as saves:
        for step in (1, 2):
            train(state, 1)
            saves.save(step, state)
            saves.wait()
    older, newer = sorted(tmp_path.glob("step-*"))
    (newer / "rank-00000.json").write_text("{}")
    with Checkpointer(tmp_path) as saves:
        restored = saves.load(make(1))
        assert restored is not None and restored.step == 1
        assert "rank-00000.json" in restored.notes[0]
        (older / "commit.json").write_bytes(b"\0" * 100)
        with pytest.raises(CorruptionError, match=r"no checkpoint .* can be read"):
            saves.load(make(1))


def test_damage_that_only_reading_finds_leaves_the_older_one_whole(tmp_path: Path) -> None:
    state = {"model": nn.Linear(2300, 2300)}  # more than one chunk: blobs lie in another one
    with Checkpointer(tmp_path, complete=False) as saves:
        kept = weights(state)
        for step in (1, 2):
            saves.save(step, state)
            saves.wait()
            state["model"].weight.data.add_(1)
        older, newer = sorted(tmp_path.glob("step-*/shard-00000"))
        flip(newer)
        restored = saves.load(state)
        assert restored is not None and restored.step == 1 and equal(weights(state), kept)
        assert "shard-00000" in restored.notes[0] and "model." in restored.notes[0]
        flip(older)
        with pytest.raises(CorruptionError, match="filled in part"):
            saves.load(state)


def test_incomplete_saves_are_removed_when_no_process_can_write_them(tmp_path: Path) -> None:
    old, new = (tmp_path / f"step-{step:09d}-n{step}-dead{step}" for step in (1, 2))
    for directory in (old, new):
        directory.mkdir()
        (directory / "shard-00000.part").write_bytes(b"half")
    os.utime(old, (0, 0))
    with Checkpointer(tmp_path) as saves:
        assert saves.load(make()) is None and old.exists()
        saves.save(3, make())
    assert not old.exists() and new.exists()
    assert len(Folder(tmp_path).directories()) == 2


SCRIPT = """
import sys, torch
from torch import nn
from outlast.checkpoint import Checkpointer
model = nn.Linear(64, 64)
state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}
with Checkpointer(sys.argv[1]) as saves:
    step = 0
    while True:
        model(torch.ones(1, 64)).sum().backward()
        state["optimizer"].step()
        step += 1
        if step <= 3:
            saves.save(step, state)
            print(step, flush=True)
"""


def test_control_c_ends_cleanly_with_every_save_on_the_disk(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, tmp_path], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert child.stdout
    assert [next(child.stdout).strip() for _ in range(3)] == ["1", "2", "3"]
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does
    _, errors = child.communicate(timeout=60)
    own = errors.partition("\nnanobind: ")[0]  # torch 2.15 lists what it leaks at exit
    assert child.returncode == -signal.SIGINT and own.rstrip().endswith("KeyboardInterrupt")
    assert "Warning" not in errors
    committed = {path.parent.name[:14] for path in tmp_path.glob("step-*/commit.json")}
    assert committed == {f"step-{step:09d}" for step in (1, 2, 3)}


def test_the_first_save_finds_its_memory_made(tmp_path: Path) -> None:
    """Prepared before the optimizer has any state, saved once it has."""
    model = nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path) as saves:
        saves.prepare(state)
        assert saves._driver
        slots = saves._driver.engine._slots
        slots.join()
        ahead = {slot.arena for slot in slots.ahead}
        model(torch.ones(600)).sum().backward()
        optimizer.step()
        saves.save(1, state)
        assert {slot.arena for slot in slots} == ahead and len(ahead) == 2
        saves.prepare(state)  # too late, and no harm
        assert not slots.ahead
    with Checkpointer(tmp_path) as saves, pytest.raises(UsageError, match="has loaded none"):
        saves.prepare(state)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_is_refused_and_disturbs_no_save(tmp_path: Path) -> None:
    """A fork has no thread that reads the keeper's answers: it waited until `save_s`."""
    state, refused, seen = make(), tmp_path / "refused", torch.arange(4.0)
    with Checkpointer(tmp_path / "saves", on_failure="raise", save_s=30) as saves:
        saves.save(1, state | {"seen": seen})
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException), saves:  # ends as the parent's block does
                for call in (lambda: saves.save(2, state), saves.wait, lambda: saves.load(state)):
                    with contextlib.suppress(UsageError):
                        call()
                        os._exit(1)
                refused.touch()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0 and refused.exists()
        saves.save(3, state | {"seen": seen + 1})
        saves.wait()
    restored = state | {"seen": torch.zeros(4)}
    with Checkpointer(tmp_path / "saves") as saves:
        result = saves.load(restored)
        assert result and result.step == 3
        assert torch.equal(restored["seen"], seen + 1)
