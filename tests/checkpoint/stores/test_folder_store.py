"""Folder store: the contract of stores, and errors of file systems."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.checkpoint.format.manifests import COMMIT, LATEST
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.errors import CorruptionError, StorageError
from outlast.testing.extension_contracts import PLACE, StoreContract

WRITER = """
import sys
from pathlib import Path
from outlast.checkpoint.stores.folder_store import Folder

def parts():
    yield bytes(10_000)
    print("half", flush=True)
    sys.stdin.read(1)
    yield bytes(10_000)

Folder(Path(sys.argv[1])).put(sys.argv[2], "shard-00000", parts(), 20_000)
"""


class TestFolder(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Folder(tmp_path / "root")


class TestFolderInMemory(StoreContract):
    """A file system that may refuse O_DIRECT."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        memory = Path("/dev/shm")  # the kernel's, on every Linux
        if not os.access(memory, os.W_OK):
            pytest.skip("no /dev/shm to write to")
        root = memory / f"{tmp_path.parent.name}-{tmp_path.name}-{os.getpid()}"
        return Folder(root)

    @pytest.fixture(autouse=True)
    def removed(self, store: Folder):
        yield
        subprocess.run(["rm", "-rf", str(store.root)], check=True)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "root")
    folder.put(PLACE, "shard-00000", [b"inside"], 6)
    return folder


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_latest_names_the_newest(folder: Folder) -> None:
    folder.point(PLACE)
    assert (folder.root / LATEST).read_text() == f"{PLACE}\n"
    assert names(folder.root) == [LATEST, PLACE]


def test_nothing_is_left_beside_what_was_written(folder: Folder) -> None:
    folder.create(PLACE, COMMIT, b"1")
    folder.create(PLACE, COMMIT, b"2")
    with pytest.raises(StorageError, match="were given"):
        folder.put(PLACE, "shard-00001", [b"1"], 2)
    assert names(folder.root / PLACE) == [COMMIT, "shard-00000"]


def test_the_root_may_be_a_link_but_nothing_below(folder: Folder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (outside / COMMIT).write_text("keep")
    (folder.root / PLACE / "link").symlink_to(outside / "secret")
    (folder.root / "linked").symlink_to(outside)
    (tmp_path / "door").symlink_to(folder.root)
    linked = Folder(tmp_path / "door")
    assert linked.get(PLACE, "shard-00000") == b"inside"
    assert linked.files(PLACE)["link"] == -1
    into = memoryview(bytearray(6))
    with pytest.raises(CorruptionError, match="not followed"):
        linked.get(PLACE, "link")
    with pytest.raises(CorruptionError, match="not followed"):
        linked.read(PLACE, "link", 0, into)
    for attempt in (
        lambda: linked.get("linked", "secret"),
        lambda: linked.files("linked"),
    ):
        with pytest.raises(CorruptionError, match="no directory of this root"):
            attempt()
    for attempt in (
        lambda: linked.put("linked", "new", [b"x"], 1),
        lambda: linked.create("linked", "new", b"x"),
        lambda: linked.remove("linked"),
    ):
        with pytest.raises(StorageError):
            attempt()
    assert names(outside) == [COMMIT, "secret"]


def test_a_link_in_a_drafts_place_is_not_written_through(folder: Folder, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (folder.root / PLACE / "shard-00001.part").symlink_to(victim)
    with pytest.raises(StorageError, match="shard-00001"):
        folder.put(PLACE, "shard-00001", [b"x"], 1)
    assert victim.read_text() == "untouched"


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_only_regular_files_are_read(folder: Folder, kind: str) -> None:
    path = folder.root / PLACE / "odd"
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    assert folder.files(PLACE)["odd"] == -1
    with pytest.raises(CorruptionError, match="no regular file"):
        folder.get(PLACE, "odd")


def test_a_read_fills_the_memory_that_it_is_given(folder: Folder) -> None:
    """Aligned (past the page cache) and not aligned, the same bytes."""
    data = os.urandom(3 * 4096)
    folder.put(PLACE, "shard-00001", [data], len(data))
    aligned = memoryview(mmap.mmap(-1, 4 * 4096))
    for into in (aligned[: len(data)], aligned[100 : 100 + len(data)]):
        folder.read(PLACE, "shard-00001", 0, into)
        assert bytes(into) == data


def test_a_file_too_large_for_a_record_is_refused(folder: Folder) -> None:
    with (folder.root / PLACE / "huge").open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(CorruptionError, match="more than a record"):
        folder.get(PLACE, "huge")


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    folder = Folder(tmp_path / "root")
    with pytest.raises(StorageError, match="root"):
        folder.directories()
    with pytest.raises(StorageError, match="root"):
        folder.put(PLACE, "shard-00000", [b"x"], 1)


def test_the_commit_record_goes_before_anything_else(folder: Folder) -> None:
    """With one file descriptor left a directory's entries cannot be listed, and so not removed."""
    folder.create(PLACE, COMMIT, b"x")
    os.close(free := os.dup(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
    try:
        with pytest.raises(
            StorageError, match=r"could not be removed.*commit record was removed first"
        ):
            folder.remove(PLACE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert names(folder.root / PLACE) == ["shard-00000"]
    folder.remove(PLACE)
    assert folder.directories() == []


def test_a_full_disk_is_an_error_and_leaves_no_file(folder: Folder) -> None:
    """The limit of a process's files stands for the disk's: the write is refused half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageError, match=r"could not be written.*older checkpoints are unto"):
            folder.put(PLACE, "shard-00000", [bytes(3000), bytes(3000)], 6000)
        with pytest.raises(StorageError, match="could not be written"):
            folder.create(PLACE, COMMIT, bytes(6000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(folder.root / PLACE) == ["shard-00000"]
    assert folder.get(PLACE, "shard-00000") == b"inside"


@pytest.mark.process
def test_a_killed_writer_leaves_nothing_and_no_lock(folder: Folder) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder.root), PLACE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert writer.stdin and writer.stdout
    with writer:
        assert writer.stdout.readline() == b"half\n"
        with pytest.raises(StorageError, match="another process is writing it"):
            folder.put(PLACE, "shard-00000", [b"mine"], 4)
        assert folder.get(PLACE, "shard-00000") == b"inside"
        writer.send_signal(signal.SIGKILL)
        assert writer.wait(timeout=30) == -signal.SIGKILL
    assert folder.get(PLACE, "shard-00000") == b"inside"
    folder.put(PLACE, "shard-00000", [b"mine"], 4)
    assert folder.get(PLACE, "shard-00000") == b"mine"
    assert names(folder.root / PLACE) == ["shard-00000"]
