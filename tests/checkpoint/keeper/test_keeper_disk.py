"""Steps of a save on disk: order, and disks with fewer features."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.keeper_orders import (
    complete,
    directory,
    filled,
    holds,
    newest,
    save_here,
    steps_of_a_save,
)

from outlast.checkpoint.keeper.arena import Arena
from outlast.checkpoint.keeper.keeper_disk import KeeperDisk
from outlast.errors import StorageError


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = filled()
    yield arena
    arena.close()


def test_nothing_is_named_before_it_is_synced(tmp_path: Path) -> None:
    shard, manifest = "shard-00000", "rank-00000.json"
    step = "step-000000001-n1-a1"
    assert [taken for taken in steps_of_a_save(tmp_path) if taken[0] != "remove"] == [
        ("make_directory", step),
        ("sync_directory", tmp_path.name),
        ("create", f"{shard}.part"),
        ("allocate", f"{shard}.part"),
        *[("write", f"{shard}.part")] * 6,
        ("sync", f"{shard}.part"),
        ("rename", shard),
        ("create", f"{manifest}.part"),
        ("write", f"{manifest}.part"),
        ("sync", f"{manifest}.part"),
        ("rename", manifest),
        ("sync_directory", step),
        ("create", "commit.json.part"),
        ("write", "commit.json.part"),
        ("sync", "commit.json.part"),
        ("link", "commit.json"),
        ("sync_directory", step),
        ("sync_directory", tmp_path.name),
        ("create", "latest-a1.part"),
        ("write", "latest-a1.part"),
        ("sync", "latest-a1.part"),
        ("rename", "latest"),
        ("sync_directory", tmp_path.name),
    ]


def refuse(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Buffered(KeeperDisk):
    """Cannot write past the page cache."""

    def go_direct(self, fd: int, direct: bool) -> bool:
        return False


class Aligned(KeeperDisk):
    """Says that it can, and then wants another alignment."""

    direct = False

    def go_direct(self, fd: int, direct: bool) -> bool:
        self.direct = direct
        return direct

    def write(self, fd: int, data: memoryview, at: int) -> int:
        if self.direct:
            raise refuse(errno.EINVAL)
        return super().write(fd, data, at)


class Sluggish(KeeperDisk):
    """Takes less than it is given, and no multiple of a block."""

    def write(self, fd: int, data: memoryview, at: int) -> int:
        return super().write(fd, data[:30_000], at)


class Linkless(KeeperDisk):
    """Has no second names."""

    def link(self, path: Path, to: Path) -> None:
        raise refuse(errno.EPERM)


@pytest.mark.parametrize("disk", [KeeperDisk, Buffered, Aligned, Sluggish, Linkless])
def test_the_same_bytes_on_any_disk(disk: type[KeeperDisk], tmp_path: Path, arena: Arena) -> None:
    save_here(disk(), tmp_path, arena)
    assert newest(tmp_path) == 1 and complete(tmp_path, 1) and holds(tmp_path, 1, arena)


@pytest.mark.parametrize("disk", [KeeperDisk, Linkless])
def test_there_is_one_commit_record(disk: type[KeeperDisk], tmp_path: Path, arena: Arena) -> None:
    """Of another attempt that took this name: it stays as it is, with all that belongs to it."""
    save_here(KeeperDisk(), tmp_path / "other", arena)
    record = (directory(tmp_path / "other", 1) / "commit.json").read_bytes()

    class Beaten(disk):
        def link(self, path: Path, to: Path) -> None:
            to.write_bytes(record)
            super().link(path, to)

    with pytest.raises(StorageError, match="of another attempt at this place; it was not changed"):
        save_here(Beaten(), tmp_path, filled())
    assert (directory(tmp_path, 1) / "commit.json").read_bytes() == record


def test_a_full_disk_is_heard_of_before_the_first_byte(tmp_path: Path, arena: Arena) -> None:
    class Full(KeeperDisk):
        def write(self, fd: int, data: memoryview, at: int) -> int:
            raise AssertionError("nothing should be written")

        def allocate(self, fd: int, size_bytes: int) -> None:
            super().allocate(fd, 1 << 50)

    with pytest.raises(OSError, match=r"No space left|too large"):
        save_here(Full(), tmp_path, arena)
    assert list(directory(tmp_path, 1).iterdir()) == []
