"""Orders to a keeper with small random shards, and checks of the files on disk."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outlast.checkpoint.format.manifests import (
    Blob,
    Commit,
    Manifest,
    SavePoint,
    manifest_name,
    shard_name,
)
from outlast.checkpoint.keeper.arena import Arena
from outlast.checkpoint.keeper.commit_gathering import CommitGathering
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_disk import DiskFault, FaultyDisk, KeeperDisk
from outlast.checkpoint.keeper.keeper_frames import Outcome, SaveOrder
from outlast.checkpoint.keeper.part_files import PartFiles
from outlast.checkpoint.stores import catalog
from outlast.checkpoint.stores.folder_store import Folder

CHUNK_BYTES = 64 << 10
SIZE_BYTES = 5 * CHUNK_BYTES + 4096
TIMEOUT_S = 30.0


def place_of(step: int) -> SavePoint:
    return SavePoint(step, step, f"a{step}")


def manifest_of(
    step: int, rank: int = 0, world: int = 1, size_bytes: int = SIZE_BYTES, plan: str = "plan"
) -> Manifest:
    return Manifest(
        job="job",
        place=place_of(step),
        rank=rank,
        world=world,
        shard=shard_name(rank),
        size_bytes=size_bytes,
        chunk_bytes=CHUNK_BYTES,
        chunks=(),
        plan=plan,
        tensors={},
        pieces=(),
        blobs=(Blob("own", 0, size_bytes),),
    )


def commit_of(step: int, world: int = 1) -> Commit:
    return Commit(
        job="job",
        place=place_of(step),
        world=world,
        time_ns=0,
        plan="plan",
        size_bytes=0,
        manifests=(),
        origin={"host": "here"},
    )


def order_of(
    step: int,
    root: Path,
    *faults: DiskFault,
    arena: int = 0,
    rank: int = 0,
    world: int = 1,
    deadline_s: float = TIMEOUT_S,
    manifest: Manifest | None = None,
) -> SaveOrder:
    """Return an order; a save has the number of its step."""
    return SaveOrder(
        save=step,
        arena=arena,
        root=str(root),
        manifest=manifest or manifest_of(step, rank, world),
        commit=None if rank else commit_of(step, world),
        deadline_s=deadline_s,
        faults=faults,
    )


def filled(size_bytes: int = SIZE_BYTES) -> Arena:
    arena = Arena.create(size_bytes)
    arena.view[:size_bytes] = os.urandom(size_bytes)
    return arena


@dataclass
class Desk:
    """A root, and keepers with one filled arena each, numbered 0."""

    root: Path
    keepers: list[KeeperClient] = field(default_factory=list)
    arenas: list[Arena] = field(default_factory=list)

    def keeper(self) -> KeeperClient:
        keeper = KeeperClient.start(f"rank {len(self.keepers)}")
        self.adopt(keeper)
        return keeper

    def adopt(self, keeper: KeeperClient) -> None:
        arena = filled()
        keeper.lend(arena)
        self.keepers.append(keeper)
        self.arenas.append(arena)

    def save(self, keeper: KeeperClient, step: int, *faults: DiskFault, **how: Any) -> Outcome:
        keeper.order(order_of(step, self.root, *faults, **how))
        return keeper.wait(step, TIMEOUT_S)

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.close(TIMEOUT_S)
        for arena in self.arenas:
            arena.close()


def directory(root: Path, step: int) -> Path:
    return root / place_of(step).directory


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def newest(root: Path) -> int | None:
    """Verify all bytes of all checkpoints; return the step of the newest committed one."""
    store = Folder(root)
    found = catalog.checkpoint_places(store)
    for place in found:
        assert catalog.verify(catalog.open_checkpoint(store, place)) == []
    return found[0].step if found else None


def holds(root: Path, step: int, arena: Arena, rank: int = 0) -> bool:
    """Return whether a rank's shard equals the arena."""
    shard = (directory(root, step) / shard_name(rank)).read_bytes()
    return shard == bytes(arena.view[: len(shard)])


def complete(root: Path, step: int, world: int = 1) -> bool:
    """Return whether a directory has the files of a checkpoint, and no others."""
    files = [name(rank) for rank in range(world) for name in (shard_name, manifest_name)]
    return names(directory(root, step)) == sorted([*files, "commit.json"])


def until(true: Callable[[], object], what: str) -> None:
    """Poll until a condition is true, with a deadline."""
    deadline = time.monotonic() + TIMEOUT_S
    with selectors.DefaultSelector() as pause:
        while not true():
            assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s: {what}"
            pause.select(0.005)


def gone(pid: int) -> bool:
    """Return whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def save_here(disk: KeeperDisk, root: Path, arena: Arena) -> None:
    """Make the save of step 1 with the keeper's code in this process."""
    manifest = manifest_of(1)
    due = time.monotonic() + TIMEOUT_S
    PartFiles(disk, root, manifest, due).write(arena.view[: manifest.size_bytes], is_retry=False)
    gathering = CommitGathering(disk, root, commit_of(1))
    assert gathering.read_new_parts()
    gathering.commit()
    gathering.move_latest()


def steps_of_a_save(root: Path) -> list[tuple[str, str]]:
    """Return all steps of a save on the disk, with the file names."""
    taken: list[tuple[str, str]] = []

    class Sized(FaultyDisk):
        def sync(self, fd: int) -> None:
            assert os.fstat(fd).st_size, "a sync of nothing"
            super().sync(fd)

    arena = filled()
    save_here(Sized(lambda step, name: taken.append((step, name))), root, arena)
    arena.close()
    return taken
