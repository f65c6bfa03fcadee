"""Frozen regions: written twice, then linked in turn, under damage and deletions."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.checkpoint.bucket_server import BucketServer
from tests.checkpoint.keeper_orders import (
    CHUNK_BYTES,
    SIZE_BYTES,
    TIMEOUT_S,
    commit_of,
    directory,
    filled,
    manifest_of,
    newest,
    place_of,
)

from outlast.checkpoint.format.manifest_checks import check_part
from outlast.checkpoint.format.manifests import FORMAT_FROZEN, Commit, Manifest
from outlast.checkpoint.keeper.arena import Arena
from outlast.checkpoint.keeper.commit_gathering import CommitGathering
from outlast.checkpoint.keeper.frozen_files import FrozenFiles
from outlast.checkpoint.keeper.keeper_disk import FaultyDisk, KeeperDisk
from outlast.checkpoint.keeper.part_files import PartFiles
from outlast.checkpoint.stores.catalog import open_checkpoint, verify
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.object_store import open_store
from outlast.checkpoint.upkeep.checkpoint_copy import copy_checkpoint
from outlast.checkpoint.upkeep.retention_policy import Keep, prune_store
from outlast.errors import StorageError

FROZEN_BYTES = 3 * CHUNK_BYTES
NAME = "frozen-00000"
SAVES = 60


def frozen_manifest(step: int) -> Manifest:
    return msgspec.structs.replace(manifest_of(step), format=FORMAT_FROZEN, frozen=FROZEN_BYTES)


class Saves:
    """Saves by the keeper's own hands, in this process; what is not frozen differs each time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.arena: Arena = filled()
        self.files = FrozenFiles()

    def save(self, *steps: int, disk: KeeperDisk | None = None) -> None:
        for step in steps:
            self.arena.view[FROZEN_BYTES:SIZE_BYTES] = os.urandom(SIZE_BYTES - FROZEN_BYTES)
            manifest, due = frozen_manifest(step), time.monotonic() + TIMEOUT_S
            part = PartFiles(disk or KeeperDisk(), self.root, manifest, due, self.files)
            part.write(self.arena.view[:SIZE_BYTES], is_retry=False)
            gathering = CommitGathering(KeeperDisk(), self.root, commit_of(step))
            assert gathering.read_new_parts()
            gathering.commit()

    def change(self) -> None:
        self.arena.view[CHUNK_BYTES] ^= 1

    def path(self, step: int) -> Path:
        return directory(self.root, step) / NAME

    def inode(self, step: int) -> int:
        return self.path(step).stat().st_ino

    def data(self, step: int) -> bytes:
        place = directory(self.root, step)
        return (place / NAME).read_bytes() + (place / "shard-00000").read_bytes()

    def whole(self, step: int) -> bool:
        """Return whether the frozen bytes of the checkpoint are the arena's at its save."""
        found = open_checkpoint(Folder(self.root), place_of(step))
        frozen = self.path(step).read_bytes() == bytes(self.arena.view[:FROZEN_BYTES])
        return not verify(found) and frozen


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[Saves]:
    saves = Saves(tmp_path / "root")
    yield saves
    saves.arena.close()


def flip(path: Path, at: int = CHUNK_BYTES + 7, *, unseen: bool = False) -> None:
    """One bit, in place; `unseen`: the file's time stays as it was, as when a disk loses it."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    if unseen:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_saves_link_the_last_but_one(saves: Saves) -> None:
    """And write nothing of it. Formats: 4 where a region is frozen, 3 elsewhere."""
    taken: list[tuple[str, str]] = []
    saves.save(1, 2)
    saves.save(3, 4, 5, disk=FaultyDisk(lambda step, name: taken.append((step, name))))
    assert saves.inode(1) == saves.inode(3) == saves.inode(5)
    assert saves.inode(2) == saves.inode(4) != saves.inode(1)
    assert saves.path(1).stat().st_nlink == 3
    written = [name for step, name in taken if step in ("write", "create")]
    assert written and not any("frozen" in name for name in written)
    assert newest(saves.root) == 5 and saves.data(5) == bytes(saves.arena.view[:SIZE_BYTES])
    commit = open_checkpoint(Folder(saves.root), place_of(5)).commit
    assert (commit.format, commit.size_bytes) == (FORMAT_FROZEN, SIZE_BYTES)


def test_what_changes_is_written(saves: Saves) -> None:
    saves.save(1, 2, 3)
    saves.change()
    saves.save(4, 5, 6)
    assert len({saves.inode(step) for step in (1, 2, 4, 5)}) == 4
    assert saves.inode(6) == saves.inode(4) and newest(saves.root) == 6
    assert saves.whole(6) and not saves.whole(3) and saves.data(3) != saves.data(6)


def test_each_checkpoint_is_whole_without_the_others(saves: Saves) -> None:
    saves.save(1, 2, 3, 4)
    for step in (1, 2):
        Folder(saves.root).remove(place_of(step).directory)
    assert newest(saves.root) == 4 and saves.path(4).stat().st_nlink == 1
    saves.save(5)
    assert saves.inode(5) == saves.inode(3) and saves.whole(5)


def test_by_size_shared_files_count_once(saves: Saves) -> None:
    saves.save(*range(1, 9))
    room = 2 * SIZE_BYTES + 3 * (SIZE_BYTES - FROZEN_BYTES)
    verdicts = prune_store(Folder(saves.root), Keep(last=1, size_bytes=room), time.time_ns())
    assert [verdict.place.step for verdict in verdicts if verdict.keep] == [8, 7, 6, 5, 4]
    assert newest(saves.root) == 8 and saves.path(8).stat().st_nlink == 3


def test_where_one_checkpoint_is_kept_its_file_is_linked(saves: Saves) -> None:
    for step in range(1, 6):
        saves.save(step)
        if step > 1:
            Folder(saves.root).remove(place_of(step - 1).directory)
    assert len({saves.inode(5)}) == 1 and saves.whole(5)
    before = saves.inode(5)
    saves.save(6)
    assert saves.inode(6) == before and newest(saves.root) == 6


@pytest.mark.parametrize("known", [True, False])
def test_a_damaged_file_is_named_and_never_linked(saves: Saves, known: bool) -> None:
    saves.save(1, 2, 3, 4)
    flip(saves.path(1), unseen=not known)
    if not known:
        saves.files = FrozenFiles()  # of a keeper that has never read it
    for step in (1, 3):
        (damage,) = verify(open_checkpoint(Folder(saves.root), place_of(step)))
        assert damage.file.endswith(f"{place_of(step).directory}/{NAME}") and damage.chunk == 1
    saves.save(5, 6, 7)
    assert saves.inode(5) not in (saves.inode(1), saves.inode(2))
    assert all(saves.whole(step) for step in (2, 4, 5, 6, 7))
    assert saves.inode(6) == saves.inode(2) and saves.inode(7) == saves.inode(5)
    said = saves.files.take_damages()
    assert f"{NAME}: bytes {CHUNK_BYTES} to" in said and saves.files.take_damages() == ""


def test_bytes_that_rot_unseen_are_found_after_some_links(saves: Saves) -> None:
    """Of three chunks one is read back at each link."""
    saves.save(1, 2, 3, 4)
    flip(saves.path(1), unseen=True)
    rotten = saves.inode(1)
    saves.save(*range(5, 13))
    linked = [step for step in range(5, 13) if saves.inode(step) == rotten]
    assert len(linked) <= 2 and max(linked, default=0) < 9
    assert all(saves.whole(step) for step in range(9, 13))


@pytest.mark.parametrize("size", [0, FROZEN_BYTES - 4096, FROZEN_BYTES + 4096])
def test_a_file_of_another_size_is_not_linked(saves: Saves, size: int) -> None:
    """Though its manifest has the right digests."""
    saves.save(1, 2)
    os.truncate(saves.path(1), size)
    saves.save(3)
    assert saves.inode(3) not in (saves.inode(1), saves.inode(2)) and saves.whole(3)
    assert verify(open_checkpoint(Folder(saves.root), place_of(1)))


@pytest.mark.parametrize("name", ["EPERM", "EXDEV", "EMLINK", "EOPNOTSUPP", "ENOENT", "EIO"])
def test_where_no_link_can_be_made_it_is_written(saves: Saves, name: str) -> None:
    class Linkless(KeeperDisk):
        def link(self, path: Path, to: Path) -> None:
            raise OSError(getattr(errno, name), name)

    saves.save(1, 2)
    saves.save(3, disk=Linkless())
    assert saves.path(3).stat().st_nlink == 1 and saves.whole(3) and newest(saves.root) == 3


@pytest.mark.parametrize("moment", ["open", "read", "link"])
def test_pruned_or_renamed_at_this_moment(saves: Saves, moment: str) -> None:
    store = Folder(saves.root)

    def gone(step: str, name: str) -> None:
        if step == moment and "frozen" in name:
            store.remove(place_of(1).directory)

    saves.save(1, 2)
    saves.save(3, disk=FaultyDisk(gone))
    assert saves.path(3).stat().st_nlink == 1 and saves.whole(3) and newest(saves.root) == 3


def test_another_file_in_its_place_at_this_moment_is_not_kept(saves: Saves) -> None:
    """The one that was read back is linked, or none."""

    class Swapping(KeeperDisk):
        def link(self, path: Path, to: Path) -> None:
            if path.name == NAME:
                path.unlink()
                path.write_bytes(bytes(FROZEN_BYTES))
            super().link(path, to)

    saves.save(1, 2)
    saves.save(3, disk=Swapping())
    assert saves.inode(3) != saves.inode(1) and saves.whole(3)


def test_no_symbolic_link_is_followed(saves: Saves, tmp_path: Path) -> None:
    saves.save(1, 2)
    aside = tmp_path / "aside"
    shutil.move(directory(saves.root, 1), aside)
    directory(saves.root, 1).symlink_to(aside)
    saves.save(3)
    assert saves.inode(3) != (aside / NAME).stat().st_ino and saves.whole(3)
    saves.path(2).rename(aside / "file")
    saves.path(2).symlink_to(aside / "file")
    saves.save(4)
    assert saves.inode(4) != saves.inode(2) and not saves.path(4).is_symlink()


def test_of_another_job_or_rank_nothing_is_linked(saves: Saves) -> None:
    saves.save(1, 2)
    for step, change in ((1, {"job": "other"}), (2, {"rank": 1})):
        path = directory(saves.root, step) / "rank-00000.json"
        record = msgspec.json.decode(path.read_bytes()) | change
        path.write_bytes(msgspec.json.encode(record))  # of a digest that does not fit
    saves.save(3)
    assert saves.path(3).stat().st_nlink == 1 and saves.whole(3)


def test_a_full_disk_leaves_nothing_and_shared_bytes_alone(saves: Saves) -> None:
    class Full(KeeperDisk):
        def allocate(self, fd: int, size_bytes: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saves.save(1, 2)
    with pytest.raises(OSError, match="No space"):
        saves.save(3, disk=Full())
    assert list(directory(saves.root, 3).iterdir()) == []
    assert saves.path(1).stat().st_nlink == 1 and saves.whole(1)
    saves.save(4)
    assert saves.inode(4) == saves.inode(1) and newest(saves.root) == 4


def test_a_rivals_file_is_not_replaced(saves: Saves) -> None:
    class Beaten(KeeperDisk):
        def link(self, path: Path, to: Path) -> None:
            if to.name == NAME:
                to.write_bytes(b"theirs")
            super().link(path, to)

    saves.save(1, 2)
    with pytest.raises(StorageError, match="exists already"):
        saves.save(3, disk=Beaten())
    assert saves.path(3).read_bytes() == b"theirs" and saves.whole(1)


def test_a_draft_that_is_a_link_is_not_truncated(saves: Saves) -> None:
    """Nobody leaves one; a copy that found one would empty the other checkpoint's file."""
    saves.save(1)
    draft = directory(saves.root, 1) / "other.part"
    draft.hardlink_to(saves.path(1))
    Folder(saves.root).put(place_of(1).directory, "other", [b"x" * 10], 10)
    assert saves.whole(1) and saves.path(1).stat().st_nlink == 1


def test_copies_link_in_a_directory_by_the_same_rule(saves: Saves, tmp_path: Path) -> None:
    source, target = Folder(saves.root), Saves(tmp_path / "target")
    store = Folder(target.root)
    saves.save(1, 2, 3, 4, 5)
    for step in (1, 2):
        assert copy_checkpoint(source, place_of(step), store).sent_bytes == SIZE_BYTES
    copied = copy_checkpoint(source, place_of(3), store)
    assert copied.sent_bytes == SIZE_BYTES - FROZEN_BYTES and target.inode(3) == target.inode(1)
    flip(target.path(2))
    assert copy_checkpoint(source, place_of(4), store).sent_bytes == SIZE_BYTES, (
        "found wrong, and sent"
    )
    assert target.inode(4) != target.inode(2) and target.path(2).stat().st_nlink == 1
    flip(target.path(1))
    assert copy_checkpoint(source, place_of(1), store).sent_bytes == FROZEN_BYTES
    assert target.path(1).stat().st_nlink == 1, "mended by a file of its own"
    for step in (1, 4):
        assert target.path(step).read_bytes() == saves.path(step).read_bytes()
    target.arena.close()


@pytest.mark.process
def test_a_bucket_copies_within_itself(saves: Saves, server: BucketServer, address: str) -> None:
    source, bucket = Folder(saves.root), open_store(address)
    saves.save(1, 2)
    assert copy_checkpoint(source, place_of(1), bucket).sent_bytes == SIZE_BYTES
    assert copy_checkpoint(source, place_of(2), bucket).sent_bytes == SIZE_BYTES - FROZEN_BYTES
    assert not verify(open_checkpoint(bucket, place_of(2)))
    stored = server.bucket / address.rsplit("/", 1)[-1] / place_of(2).directory / NAME
    flip(stored)
    saves.save(3)
    assert copy_checkpoint(source, place_of(3), bucket).sent_bytes == SIZE_BYTES, (
        "read back, and wrong"
    )
    assert not verify(open_checkpoint(bucket, place_of(3)))
    (damage,) = verify(open_checkpoint(bucket, place_of(2)))
    assert damage.file.endswith(NAME)


def test_regions_that_cannot_be_are_refused() -> None:
    commit: Commit = commit_of(1)

    def faults(**change: object) -> list[str]:
        chunks = ("0" * 32,) * (SIZE_BYTES // CHUNK_BYTES + 1)
        manifest = msgspec.structs.replace(frozen_manifest(1), chunks=chunks, **change)
        return list(check_part(manifest, 0, commit))

    assert faults() == []
    for wrong in (0, -CHUNK_BYTES, 4096, SIZE_BYTES + CHUNK_BYTES, msgspec.UNSET):
        assert len(faults(frozen=wrong)) == 1, wrong
    assert len(faults(format=3)) == len(faults(format=2)) == 1
    assert faults(format=3, frozen=msgspec.UNSET) == []


def test_saves_by_chance(saves: Saves) -> None:
    """Changes, damage, deletions and new keepers in any order: what was saved whole stays so, and
    no two neighbours share a file where an older one is there."""
    luck = random.Random(5)
    content: dict[int, bytes] = {}
    for step in range(1, SAVES + 1):
        match luck.randrange(8):
            case 0:
                saves.change()
            case 1:
                saves.files = FrozenFiles()
            case 2 | 3 if content:
                gone = luck.choice(list(content))
                Folder(saves.root).remove(place_of(gone).directory)
                del content[gone]
            case _:
                pass
        saves.save(step)
        content[step] = saves.data(step)
        assert content[step] == bytes(saves.arena.view[:SIZE_BYTES])
        if len(content) > 2 and step - 1 in content:
            assert saves.inode(step) != saves.inode(step - 1)
    for step, data in content.items():
        assert saves.data(step) == data
    assert newest(saves.root) == SAVES
