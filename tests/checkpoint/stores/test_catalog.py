"""Catalog: choice of a checkpoint, reported refusals, and removals."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.checkpoint.checkpoint_maker import make

from outlast.checkpoint.format.manifests import (
    COMMIT,
    LATEST,
    Commit,
    Manifest,
    ManifestEntry,
    SavePoint,
    Tensor,
    TensorPiece,
    digest_of,
    manifest_name,
    seal,
    unseal,
)
from outlast.checkpoint.stores.catalog import (
    checkpoint_places,
    newest_checkpoint,
    open_checkpoint,
    remove_uncommitted,
    verify,
)
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import CorruptionError

TENSORS = {"w": np.arange(3000.0), "b": np.arange(5, dtype=np.int16)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, to be copied: writing them durably takes longer."""
    root = tmp_path_factory.mktemp("written")
    for step in (1, 2):
        make(root, SavePoint(step, step, "a"), TENSORS)
    return root


def none(text: str) -> None:
    pytest.fail(f"nothing is damaged here: {text}")


def forge(path: Path, rank: int = 0, /, **changes: object) -> None:
    """Another manifest, sealed and named by a commit record that is sealed, too."""
    file, record = path / manifest_name(rank), path / COMMIT
    manifest = unseal(file.read_bytes(), Manifest, "")
    data = seal(msgspec.structs.replace(manifest, **changes))
    file.write_bytes(data)
    commit = unseal(record.read_bytes(), Commit, "")
    entries = list(commit.manifests)
    entries[rank] = ManifestEntry(rank, entries[rank].name, len(data), digest_of(data))
    record.write_bytes(seal(msgspec.structs.replace(commit, manifests=tuple(entries))))


def test_the_newest_is_the_furthest_then_the_one_committed_last(tmp_path: Path) -> None:
    order = [
        SavePoint(20, 30, "c"),
        SavePoint(20, 30, "a"),
        SavePoint(20, 30, "b"),
        SavePoint(20, 4, "z"),
        SavePoint(9, 99, "y"),
    ]
    for time, place in enumerate(reversed(order)):
        make(tmp_path, place, TENSORS, time_ns=time)
    make(tmp_path, SavePoint(21, 31, "d"), TENSORS, commit=False)
    folder = Folder(tmp_path)
    assert checkpoint_places(folder) == order
    folder.point(order[-1].directory)
    found = newest_checkpoint(folder, none)
    assert found and found.place == order[0]


def test_looking_at_checkpoints_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, outlast.checkpoint.stores.catalog, outlast.checkpoint.stores.folder_store;"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "set()\n"


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert checkpoint_places(Folder(tmp_path / "none")) == []
    assert newest_checkpoint(Folder(tmp_path / "none"), none) is None
    assert remove_uncommitted(Folder(tmp_path / "none")) == []


def test_an_open_checkpoint_describes_its_content(tmp_path: Path) -> None:
    make(tmp_path, SavePoint(5, 5, "a"), TENSORS, world=3, job="mine")
    found = open_checkpoint(Folder(tmp_path), SavePoint(5, 5, "a"))
    assert (found.job, found.commit.world, len(found.manifests)) == ("mine", 3, 3)
    assert found.tensors == {"w": Tensor("float64", (3000,)), "b": Tensor("int16", (5,))}
    assert found.size_bytes == sum(manifest.size_bytes for manifest in found.manifests)
    assert found.where.endswith("step-000000005-n5-a")


def test_foreign_things_are_left_alone(tmp_path: Path) -> None:
    path = make(tmp_path, SavePoint(5, 5, "a"), TENSORS)
    (tmp_path / "notes.txt").write_text("mine")
    names = ["mine", "step-5-n5-a", "step-0000000005-n5-a", "step-000000009-n9-A",
             "step-000000006-n06-a", "step-00000000\N{ARABIC-INDIC DIGIT NINE}-n9-a",
             "step-000000007-n7-a.bak", ".step-000000007-n7-a"]  # fmt: skip
    for name in names:
        shutil.copytree(path, tmp_path / name)
    (tmp_path / "step-000000099-n99-a").write_text("a file")
    assert checkpoint_places(Folder(tmp_path)) == [SavePoint(5, 5, "a")]
    assert remove_uncommitted(Folder(tmp_path)) == []
    assert {p.name for p in tmp_path.iterdir()} == {
        path.name, "notes.txt", LATEST, "step-000000099-n99-a", *names
    }  # fmt: skip


def test_only_what_was_never_committed_is_cleaned(tmp_path: Path) -> None:
    good = make(tmp_path, SavePoint(1, 1, "a"), TENSORS)
    bad = make(tmp_path, SavePoint(2, 2, "a"), TENSORS)
    (bad / COMMIT).write_text("damaged")
    for step in (3, 4):
        make(tmp_path, SavePoint(step, step, "a"), TENSORS, commit=False)
    kept = SavePoint(3, 3, "a")
    assert remove_uncommitted(Folder(tmp_path), spare=lambda place: place == kept) == [
        "step-000000004-n4-a"
    ]
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == {
        good.name, bad.name, kept.directory
    }  # fmt: skip


def test_damaged_checkpoints_are_skipped_and_reported(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, SavePoint(step, step, "a"), TENSORS)
    (tmp_path / "step-000000003-n3-a" / COMMIT).write_text("{}")
    shard = tmp_path / "step-000000002-n2-a" / "shard-00001"
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    said: list[str] = []
    found = newest_checkpoint(Folder(tmp_path), said.append)
    assert found and found.place.step == 2  # no byte of a shard was read
    assert len(said) == 1 and "step-000000003-n3-a is skipped" in said[0]
    said.clear()
    found = newest_checkpoint(Folder(tmp_path), said.append, verify=True)
    assert found and found.place.step == 1
    assert [text.split()[1] for text in said] == ["step-000000003-n3-a", "step-000000002-n2-a"]
    assert "shard-00001: chunk 0" in said[1]


def test_verify_reads_every_byte_and_reports_progress(tmp_path: Path) -> None:
    make(tmp_path, SavePoint(1, 1, "a"), TENSORS, chunk_bytes=4096)
    checkpoint = open_checkpoint(Folder(tmp_path), SavePoint(1, 1, "a"))
    told: list[tuple[int, int]] = []
    assert verify(checkpoint, lambda done, size: told.append((done, size))) == []
    assert [done for done, _ in told] == [4096 * (k + 1) for k in range(len(told))]
    assert {size for _, size in told} == {checkpoint.size_bytes} == {told[-1][0]}


def test_verify_names_every_damage(tmp_path: Path) -> None:
    path = make(tmp_path, SavePoint(1, 1, "a"), TENSORS, world=4, chunk_bytes=4096, own={1: b"x"})
    (path / "shard-00000").unlink()
    shard = bytearray((path / "shard-00001").read_bytes())
    shard[3], shard[4096 + 1900] = shard[3] ^ 1, shard[4096 + 1900] ^ 1
    (path / "shard-00001").write_bytes(shard)
    (path / "shard-00002").write_bytes((path / "shard-00002").read_bytes() + bytes(4096))
    (path / "rank-00003.json").write_text("{}")
    found = verify(open_checkpoint(Folder(tmp_path), SavePoint(1, 1, "a")))
    assert [(Path(d.file).name, d.chunk, d.tensors) for d in found] == [
        ("rank-00003.json", None, ()),
        ("shard-00000", None, ("w",)),
        ("shard-00001", 0, ("w",)),
        ("shard-00001", 1, ("w", "(own)")),
        ("shard-00002", None, ()),
    ]
    assert all(d.file in d.what for d in found)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"job": "another"}, "job 'another'"),
        ({"world": 3}, "world 3"),
        ({"plan": "1" * 32}, "plan"),
        ({"rank": 1}, "rank 1"),
        ({"place": SavePoint(4, 4, "a")}, "place 'step-000000004-n4-a'"),
        ({"shard": "../shard-00000"}, "shard '../shard-00000'"),
        ({"shard": "/dev/zero"}, "shard '/dev/zero'"),
        ({"shard": "shard-00001"}, "shard 'shard-00001'"),
        ({"chunk_bytes": 0}, "chunks of 0 bytes"),
        ({"chunk_bytes": -4096}, "chunks of -4096 bytes"),
        ({"chunk_bytes": 1000}, "chunks of 1000 bytes"),
        ({"chunk_bytes": 1 << 60}, "chunks of"),
        ({"chunks": ()}, "0 digests"),
        ({"size_bytes": 1 << 50}, "digests for"),
        ({"pieces": (TensorPiece("gone", (0,), (1,), 0),)}, "does not describe"),
        ({"pieces": (TensorPiece("w", (0,), (3001,), 0),)}, "outside of its shape"),
        ({"pieces": (TensorPiece("w", (0, 0), (1, 1), 0),)}, "outside of its shape"),
        ({"pieces": (TensorPiece("w", (-1,), (1,), 0),)}, "outside of its shape"),
        ({"pieces": (TensorPiece("w", (0,), (1,), 3),)}, "outside of its shard"),
        ({"pieces": (TensorPiece("w", (0,), (1,), -8),)}, "outside of its shard"),
        ({"pieces": (TensorPiece("w", (0,), (1,), 1 << 40),)}, "outside of its shard"),
        ({"tensors": {"w": Tensor("float7", (3000,))}}, "does not know"),
        ({"tensors": {"w": Tensor("load", (0,))}, "pieces": ()}, "does not know"),
        ({"tensors": {"w": Tensor("float64", (-1,))}, "pieces": ()}, "which no tensor has"),
        ({"tensors": {"w": Tensor("float64", (0, 1 << 62))}, "pieces": ()}, "which no tensor has"),
        ({"blobs": (("own", -1, 5),)}, "outside of its shard"),
        ({"blobs": (("own", 0, 1 << 40),)}, "outside of its shard"),
    ],
)  # fmt: skip
def test_records_that_contradict_each_other_are_refused(
    written: Path, tmp_path: Path, changes: dict[str, object], text: str
) -> None:
    """Each of them with digests that are right: written wrongly, or by somebody who means harm."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    forge(tmp_path / "step-000000002-n2-a", **changes)
    said: list[str] = []
    found = newest_checkpoint(Folder(tmp_path), said.append)
    assert found and found.place.step == 1
    assert len(said) == 1 and manifest_name(0) in said[0] and text in said[0]


def test_shards_of_another_size_than_was_committed_are_refused(tmp_path: Path) -> None:
    path = make(tmp_path, SavePoint(2, 2, "a"), TENSORS)
    forge(path, size_bytes=1 << 16)
    with pytest.raises(CorruptionError, match="where the commit record has"):
        open_checkpoint(Folder(tmp_path), SavePoint(2, 2, "a")).check()


def test_ranks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    path = make(tmp_path, SavePoint(2, 2, "a"), TENSORS)
    forge(path, 1, tensors={"w": Tensor("float64", (3001,)), "b": Tensor("int16", (5,))})
    checkpoint = open_checkpoint(Folder(tmp_path), SavePoint(2, 2, "a"))
    with pytest.raises(CorruptionError, match="tensor w: rank 1 has"):
        _ = checkpoint.tensors
    assert "tensor w: rank 1 has" in verify(checkpoint)[0].what


def test_a_tensor_larger_than_all_shards_is_refused(tmp_path: Path) -> None:
    """Before anybody makes memory for it."""
    path = make(tmp_path, SavePoint(2, 2, "a"), TENSORS)
    forge(path, tensors={"x": Tensor("float64", (1 << 40,))}, pieces=())
    with pytest.raises(CorruptionError, match=r"tensor x: rank 0 has .* of all shards"):
        _ = open_checkpoint(Folder(tmp_path), SavePoint(2, 2, "a")).tensors


def test_a_tensor_with_a_hole_is_found(tmp_path: Path) -> None:
    path = make(tmp_path, SavePoint(2, 2, "a"), TENSORS)
    manifest = unseal((path / "rank-00000.json").read_bytes(), Manifest, "")
    forge(path, pieces=(TensorPiece("w", (0,), (1000,), manifest.pieces[0].at),))
    found = verify(open_checkpoint(Folder(tmp_path), SavePoint(2, 2, "a")))
    assert [(d.chunk, d.tensors) for d in found] == [(None, ("w",))]


@pytest.mark.parametrize("world", [0, -1, 1, 3, 1 << 40])
def test_a_commit_of_another_world_is_refused(tmp_path: Path, world: int) -> None:
    path = make(tmp_path, SavePoint(2, 2, "a"), TENSORS)
    commit = unseal((path / COMMIT).read_bytes(), Commit, "")
    (path / COMMIT).write_bytes(seal(msgspec.structs.replace(commit, world=world)))
    with pytest.raises(CorruptionError, match="does not name the manifests"):
        open_checkpoint(Folder(tmp_path), SavePoint(2, 2, "a"))


def test_a_commit_that_names_other_files_is_refused(tmp_path: Path) -> None:
    """A copy would have them under the names that they should have."""
    path = make(tmp_path, SavePoint(2, 2, "a"), TENSORS)
    commit = unseal((path / COMMIT).read_bytes(), Commit, "")
    (path / "rank-00001.json").rename(path / "mine.json")
    first, second = commit.manifests
    renamed = (first, msgspec.structs.replace(second, name="mine.json"))
    (path / COMMIT).write_bytes(seal(msgspec.structs.replace(commit, manifests=renamed)))
    with pytest.raises(CorruptionError, match="does not name the manifests"):
        open_checkpoint(Folder(tmp_path), SavePoint(2, 2, "a"))


def test_a_record_that_nests_without_end_is_damage(tmp_path: Path) -> None:
    path = make(tmp_path, SavePoint(2, 2, "a"), TENSORS)
    (path / COMMIT).write_bytes(b'{"format":2,"x":' + b"[" * 100_000)
    with pytest.raises(CorruptionError, match=r"commit.json: .*recursion"):
        open_checkpoint(Folder(tmp_path), SavePoint(2, 2, "a"))
