"""Start point of a launcher: local or durable checkpoints of the same job."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.checkpoint.checkpoint_maker import make
from tests.checkpoint.sample_checkpoint import checkpoint, flip, place

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.stores.catalog import checkpoint_places, open_checkpoint, verify
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.upkeep.checkpoint_copy import copy_checkpoint
from outlast.errors import ConfigError, CorruptionError, StorageError
from outlast.launch import run_directory, start_point
from outlast.launch.run_directory import RunDir
from outlast.launch.start_point import CheckpointSearch, begin, find_copies
from outlast.launch.terms.run_identity import VERSION, RunningJob


@pytest.fixture
def far(tmp_path: Path) -> Folder:
    """Durable storage with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        checkpoint(tmp_path / "far", step, size=9000, world=1)
    return Folder(tmp_path / "far")


def job_of(store: Folder) -> str:
    return open_checkpoint(store, place(1)).job


def taken(tmp_path: Path, job: str = "", term: int = 1) -> RunDir:
    """A run directory; with `job`, of that one, in `term` from now on."""
    path = tmp_path / "run"
    if job:
        path.mkdir(exist_ok=True)
        before = RunningJob(
            version=VERSION, run=job, script="s", args=(), world=1, created_ns=1,
            term=term - 1,
        )  # fmt: skip
        (path / "run.json").write_bytes(msgspec.json.encode(before))
    return run_directory.take(path, "s", (), 1)


def started(run_dir: RunDir, *durable: Folder) -> tuple[int, list[str], list[str]]:
    """The step that it begins at, notes, and what was told meanwhile."""
    told: list[str] = []
    try:
        found, notes = begin(run_dir, durable, told.append)
    finally:
        run_dir.release()
    return found.step if found else 0, notes, told


def test_a_fresh_directory_takes_the_job_over(tmp_path: Path, far: Folder) -> None:
    checkpoint(far.root, 3, size=9000, world=1)
    run_dir = taken(tmp_path)
    fresh = run_dir.job.run
    step, notes, told = started(run_dir, far)
    assert step == 3 and "step 3 is copied here" in told[0]
    assert any("goes on here, at step 3" in note for note in notes)
    assert run_dir.job.run == job_of(far) != fresh
    kept = msgspec.json.decode((run_dir.path / "run.json").read_bytes(), type=RunningJob)
    assert kept == run_dir.job
    local = Folder(run_dir.room("checkpoints"))
    assert checkpoint_places(local) == [place(3)] and verify(open_checkpoint(local, place(3))) == []


def test_the_newest_whole_one_of_all_targets_wins(tmp_path: Path, far: Folder) -> None:
    mirror = Folder(tmp_path / "mirror")
    for step in (2, 3, 4):
        checkpoint(mirror.root, step, size=9000, world=1)
    flip(mirror.root / place(4).directory / "shard-00000", 5)
    step, notes, told = started(taken(tmp_path), far, mirror)
    assert step == 3 and mirror.where in told[-1]
    assert any("step-000000004-n4-a1 is skipped" in note for note in notes)


def test_what_one_target_has_damaged_comes_from_the_next(tmp_path: Path, far: Folder) -> None:
    mirror = Folder(tmp_path / "mirror")
    copy_checkpoint(far, place(2), mirror)
    flip(far.root / place(2).directory / "shard-00000", 5)
    step, notes, told = started(taken(tmp_path), far, mirror)
    assert step == 2 and any("is skipped" in note for note in notes)
    assert [far.where in told[0], mirror.where in told[1]] == [True, True]


class Gone(Folder):
    """A store whose endpoint is out of reach."""

    def directories(self) -> list[str]:
        raise StorageError("its endpoint cannot be reached")


def test_a_target_that_is_gone_is_no_fresh_start(tmp_path: Path, far: Folder) -> None:
    gone, nothing = Gone(tmp_path / "gone"), Folder(tmp_path / "nothing")
    with pytest.raises(
        StorageError, match=r"cannot be reached; nothing whole .* may hold this run"
    ):
        started(taken(tmp_path), nothing, gone)
    step, notes, _ = started(taken(tmp_path), gone, far)
    assert step == 2 and "durable storage: its endpoint cannot be reached" in notes
    resumed = taken(tmp_path)
    assert resumed.resumed
    step, notes, _ = started(resumed, gone)
    assert step == 2 and "durable storage: its endpoint cannot be reached" in notes


def test_targets_of_two_jobs_are_refused(tmp_path: Path, far: Folder) -> None:
    make(tmp_path / "mirror", place(9), {"weight": np.zeros(9)}, 1, job="another")
    with pytest.raises(
        ConfigError, match=r"mirror holds checkpoints of job another, and .*/far is"
    ):
        started(taken(tmp_path), far, Folder(tmp_path / "mirror"))


def test_storage_of_another_job_is_refused(tmp_path: Path, far: Folder) -> None:
    run_dir = taken(tmp_path, job="another", term=2)
    (run_dir.room("journal") / "term000001").write_text("it has begun")
    with pytest.raises(ConfigError, match=r"holds checkpoints of job .*nothing was started"):
        started(run_dir, far)
    assert len(checkpoint_places(far)) == 2


def test_what_is_whole_here_is_not_asked_for(tmp_path: Path, far: Folder) -> None:
    run_dir = taken(tmp_path, job=job_of(far), term=2)
    copy_checkpoint(far, place(1), Folder(run_dir.room("checkpoints")))
    assert started(run_dir, far) == (1, [], [])


def test_what_is_damaged_here_is_mended(tmp_path: Path, far: Folder) -> None:
    run_dir = taken(tmp_path, job=job_of(far), term=2)
    local = Folder(run_dir.room("checkpoints"))
    for step in (1, 2):
        copy_checkpoint(far, place(step), local)
    flip(local.root / place(2).directory / "shard-00000", 5)
    step, notes, _ = started(run_dir, far)
    assert step == 2 and "is skipped" in notes[0]
    assert verify(open_checkpoint(local, place(2))) == []


def test_a_damaged_copy_is_passed_over(tmp_path: Path, far: Folder) -> None:
    flip(far.root / place(2).directory / "shard-00000", 5)
    step, notes, _ = started(taken(tmp_path), far)
    assert step == 1 and any("is skipped" in note for note in notes)


def test_storage_without_anything_whole_is_no_fresh_start(tmp_path: Path, far: Folder) -> None:
    for step in (1, 2):
        flip(far.root / place(step).directory / "shard-00000", 5)
    with pytest.raises(CorruptionError, match="none is whole"):
        started(taken(tmp_path), far)


def test_a_checkpoint_of_another_job_is_passed_over(tmp_path: Path, far: Folder) -> None:
    """Somebody has put it there; a start from it would end in the middle."""
    run_dir = taken(tmp_path, "mine")
    copy_checkpoint(far, place(2), Folder(run_dir.room("checkpoints")))
    step, notes, _ = started(run_dir)
    assert step == 0
    assert f"is skipped: it is of job {job_of(far)}, and this is job mine" in notes[0]


def test_terms_go_on_behind_all_attempts_of_storage(tmp_path: Path) -> None:
    """A run that went back has older checkpoints with later terms."""
    far = tmp_path / "far"
    for at in (SavePoint(5, 5, "t2g1"), SavePoint(3, 3, "t7g1")):
        tensor = np.arange(9000, dtype=np.uint8)
        make(far, at, {"weight": tensor}, 1, job="far")
    run_dir = taken(tmp_path)
    assert started(run_dir, Folder(far))[0] == 5
    assert run_dir.job.term == 8


def test_empty_storage_is_a_fresh_start(tmp_path: Path) -> None:
    assert started(taken(tmp_path), Folder(tmp_path / "nothing")) == (0, [], [])


def test_a_restart_looks_further_only_where_something_is_wrong(tmp_path: Path, far: Folder) -> None:
    local = Folder(tmp_path / "here")
    copy_checkpoint(far, place(1), local)
    search = CheckpointSearch(local.root, job_of(far), (), "", [far])
    near = find_copies(search).checkpoint
    assert near is not None and near.step == 1
    flip(local.root / place(1).directory / "shard-00000", 5)
    found = find_copies(search)
    assert found.checkpoint is not None and found.checkpoint.step == 2 and not found.error
    assert "is skipped" in found.damaged[0]


def test_storage_that_is_gone_ends_a_restart_only_where_nothing_is_here(
    tmp_path: Path, far: Folder
) -> None:
    gone, local = Gone(tmp_path / "gone"), Folder(tmp_path / "here")
    assert isinstance(
        find_copies(CheckpointSearch(local.root, job_of(far), (), "", [gone])).error, StorageError
    )
    for step in (1, 2):
        copy_checkpoint(far, place(step), local)
    flip(local.root / place(2).directory / "shard-00000", 5)
    found = find_copies(CheckpointSearch(local.root, job_of(far), (), "", [gone]))
    assert found.checkpoint is not None and found.checkpoint.step == 1 and not found.error
    assert "cannot be reached" in found.damaged[-1]


class Faulty(Folder):
    """A disk with one checkpoint that cannot be read."""

    broken = place(2).directory

    def get(self, directory: str, name: str) -> bytes:
        if directory == self.broken:
            raise StorageError(f"{self.where}/{directory}/{name}: could not be read: I/O error")
        return super().get(directory, name)


def faulty_disk(monkeypatch: pytest.MonkeyPatch, root: Path) -> Path:
    """Only what reads from `root` meets the fault."""
    folder = start_point.Folder
    monkeypatch.setattr(
        start_point, "Folder", lambda at: Faulty(at) if Path(at) == root else folder(at)
    )
    return root


def test_an_io_error_on_the_newest_is_no_damage_and_nothing_older_is_taken(
    tmp_path: Path, far: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = taken(tmp_path, job_of(far))
    root = faulty_disk(monkeypatch, run_dir.room("checkpoints"))
    for step in (1, 2):
        copy_checkpoint(far, place(step), Folder(root))
    with pytest.raises(StorageError, match=r"not known to be damaged.*I/O error"):
        started(run_dir)
    found = find_copies(CheckpointSearch(root, job_of(far), (), ""))
    assert found.checkpoint is None and isinstance(found.error, StorageError)
    assert "I/O error" in str(found.error)
