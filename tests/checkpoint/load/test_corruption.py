"""Corruption of checkpoint files: found and named, and the checkpoint before is loaded."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.checkpoint.checkpoint_maker import Array, make

from outlast.checkpoint.format.manifests import (
    COMMIT,
    FORMATS,
    Commit,
    Manifest,
    ManifestEntry,
    SavePoint,
    digest_of,
    seal,
    unseal,
)
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader, ReadTarget
from outlast.checkpoint.stores.catalog import Checkpoint, newest_checkpoint, open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import CorruptionError

FILES = ["shard-00000", "shard-00001", "rank-00000.json", "rank-00001.json", COMMIT]
FLIPS_A_FILE = 50
OLD, NEW = SavePoint(100, 100, "a"), SavePoint(200, 200, "b")


def state(step: int) -> dict[str, Array]:
    return {
        "weight": np.arange(step, step + 4000, dtype=np.float32).reshape(40, 100),
        "bias": np.full(7, step, np.int16),
        "empty": np.zeros((0, 3)),
        "count": np.array(step),
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of one job, and the same of another one."""
    root = tmp_path_factory.mktemp("written")
    for job in ("job", "other"):
        for place in (OLD, NEW):
            shared = f"{job} at {place.step}".encode()
            make(
                root / job, place, state(place.step), job=job, shared=shared, own={1: job.encode()},
                chunk_bytes=4096,
            )  # fmt: skip
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """A copy of it; the job's is to be damaged."""
    shutil.copytree(written, tmp_path / "root")
    return tmp_path / "root"


def load(checkpoint: Checkpoint) -> dict[str, Array]:
    arrays = {name: np.zeros_like(array) for name, array in state(0).items()}
    it = CheckpointReader(checkpoint)
    it.read([ReadTarget(name, Box.whole(into.shape), into) for name, into in arrays.items()])
    assert it.blob(0, "shared") == f"job at {checkpoint.place.step}".encode()
    assert it.blob(1, "own") == b"job"
    return arrays


def check_whole(checkpoint: Checkpoint) -> None:
    loaded, wanted = load(checkpoint), state(checkpoint.place.step)
    assert all(loaded[name].tobytes() == wanted[name].tobytes() for name in wanted)


def check_survived(root: Path, file: str) -> None:
    """The damage is found and its file named, nothing wrong is ever loaded, the older one loads."""
    said: list[str] = []
    found = newest_checkpoint(Folder(root), said.append, verify=True)
    assert found and found.place == OLD, said
    assert len(said) == 1 and f"{NEW.directory} is skipped" in said[0]
    assert f"{NEW.directory}/{file}" in said[0] or f"{NEW.directory}: {file}" in said[0], said
    with suppress(CorruptionError):
        check_whole(open_checkpoint(Folder(root), NEW))  # where the damage is of no matter


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_without_damage_the_newest_loads(root: Path) -> None:
    found = newest_checkpoint(Folder(root / "job"), pytest.fail, verify=True)
    assert found and found.place == NEW
    check_whole(found)


@pytest.mark.parametrize("file", FILES)
def test_every_flipped_bit_is_found(root: Path, file: str) -> None:
    path = root / "job" / NEW.directory / file
    draw = random.Random(file)
    for bit in draw.sample(range(path.stat().st_size * 8), FLIPS_A_FILE):
        flip(path, bit)
        check_survived(root / "job", file)
        flip(path, bit)
    found = newest_checkpoint(Folder(root / "job"), pytest.fail, verify=True)
    assert found and found.place == NEW


@pytest.mark.parametrize("file", FILES[2:])
def test_no_bit_of_a_record_can_flip(written: Path, file: str) -> None:
    """Each single one, without a disk."""
    kind = Commit if file == COMMIT else Manifest
    data = bytearray((written / "job" / NEW.directory / file).read_bytes())
    unseal(bytes(data), kind, file)
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError, match=file):
            unseal(bytes(data), kind, file)
        data[bit // 8] ^= 1 << bit % 8


def cut(by: int, path: Path) -> None:
    os.truncate(path, max(0, path.stat().st_size - by))


def extend(by: int, path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(by))


def zero_page(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes(4096) + data[4096:])


def swap(a: Path, b: Path) -> None:
    moved = a.with_name("moved")
    a.rename(moved)
    b.rename(a)
    moved.rename(b)


def swap_steps(path: Path) -> None:
    swap(path, path.parent.parent / OLD.directory / path.name)
    shutil.copytree(path.parents[2] / "spare", path.parents[1] / OLD.directory, dirs_exist_ok=True)


def swap_ranks(path: Path) -> None:
    swap(path, path.with_name(path.name.replace("00000", "00001")))


def take_from_another_job(path: Path) -> None:
    shutil.copy(path.parents[2] / "other" / NEW.directory / path.name, path)


def link_out(path: Path) -> None:
    outside = path.parents[2] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def be_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def be_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut by a byte": partial(cut, 1),
    "cut by a page": partial(cut, 4096),
    "empty": partial(cut, 1 << 40),
    "longer by a byte": partial(extend, 1),
    "longer by a page": partial(extend, 4096),
    "zeroed": zero_page,
    "of another job": take_from_another_job,
    "a link out of the root": link_out,
    "a directory": be_directory,
    "a pipe": be_pipe,
    "of the step before": swap_steps,
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_found(root: Path, file: str, damage: str) -> None:
    shutil.copytree(root / "job" / OLD.directory, root / "spare")
    DAMAGES[damage](root / "job" / NEW.directory / file)
    other = damage == "of another job" and file == COMMIT  # it is whole, but names other manifests
    check_survived(root / "job", FILES[2] if other else file)


@pytest.mark.parametrize("file", FILES[:4])
def test_a_missing_file_is_found(root: Path, file: str) -> None:
    (root / "job" / NEW.directory / file).unlink()
    check_survived(root / "job", file)


@pytest.mark.parametrize("file", ["shard-00000", "rank-00000.json"])
def test_files_of_two_ranks_swapped_are_found(root: Path, file: str) -> None:
    swap_ranks(root / "job" / NEW.directory / file)
    check_survived(root / "job", file)


def test_a_directory_that_leads_out_of_the_root_is_not_followed(root: Path) -> None:
    link_out(root / "job" / NEW.directory)
    said: list[str] = []
    found = newest_checkpoint(Folder(root / "job"), said.append)
    assert found and found.place == OLD
    assert len(said) == 1 and "no directory of this root" in said[0]


def test_without_a_commit_record_there_is_no_checkpoint(root: Path) -> None:
    (root / "job" / NEW.directory / COMMIT).unlink()
    found = newest_checkpoint(Folder(root / "job"), pytest.fail, verify=True)
    assert found and found.place == OLD


def test_strangers_in_the_directory_change_nothing(root: Path) -> None:
    path = root / "job" / NEW.directory
    (path / "notes").write_text("mine")
    (path / "shard-00002").write_bytes(bytes(4096))
    (path / "shard-00000.part").write_bytes(b"of a killed writer")
    (path / "more").mkdir()
    found = newest_checkpoint(Folder(root / "job"), pytest.fail, verify=True)
    assert found and found.place == NEW
    check_whole(found)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "..", "a/b", "", "a\0b", ".hidden"])
def test_a_commit_record_leads_nowhere_else(root: Path, name: str) -> None:
    path = root / "job" / NEW.directory / COMMIT
    manifest = (path.parent / "rank-00000.json").read_bytes()
    (root / "job" / "x").write_bytes(manifest)
    commit = unseal(path.read_bytes(), Commit, "")
    first, *rest = commit.manifests
    entries = (ManifestEntry(0, name, first.size_bytes, first.digest), *rest)
    path.write_bytes(seal(msgspec.structs.replace(commit, manifests=entries)))
    check_survived(root / "job", COMMIT)


@pytest.mark.parametrize("file", FILES[2:])
def test_a_newer_format_is_refused_by_its_number(root: Path, file: str) -> None:
    path = root / "job" / NEW.directory / file
    kind = Commit if file == COMMIT else Manifest
    newer = seal(
        msgspec.structs.replace(unseal(path.read_bytes(), kind, ""), format=FORMATS[-1] + 1)
    )
    path.write_bytes(newer.replace(b'"job":', b'"new":1,"job":'))
    if file != COMMIT:
        commit_anew(path)
    check_survived(root / "job", file)
    with pytest.raises(
        CorruptionError, match=f"{file}: format {FORMATS[-1] + 1} where this Outlast"
    ):
        check_whole(open_checkpoint(Folder(root / "job"), NEW))


def commit_anew(manifest: Path) -> None:
    """Let the commit record name a manifest as it is now."""
    path, data = manifest.with_name(COMMIT), manifest.read_bytes()
    commit = unseal(path.read_bytes(), Commit, "")
    entries = tuple(
        ManifestEntry(one.rank, one.name, len(data), digest_of(data))
        if one.name == manifest.name
        else one
        for one in commit.manifests
    )
    path.write_bytes(seal(msgspec.structs.replace(commit, manifests=entries)))
