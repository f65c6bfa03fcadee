"""Checkpoint copies between stores: verified, resumable, and without duplicates."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoint.bucket_server import BUCKET, BucketServer, SlowProxy
from tests.checkpoint.checkpoint_maker import make
from tests.checkpoint.sample_checkpoint import checkpoint, flip, place

from outlast.checkpoint.format.manifests import COMMIT, LATEST
from outlast.checkpoint.stores.catalog import (
    checkpoint_places,
    newest_checkpoint,
    open_checkpoint,
    verify,
)
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.object_store import open_store
from outlast.checkpoint.upkeep.checkpoint_copy import copy_checkpoint
from outlast.errors import CorruptionError, StorageError

pytestmark = pytest.mark.process
WORLD = 8


@pytest.fixture
def source(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "target")


def same(source: Path, target: Path) -> bool:
    return {p.name: p.read_bytes() for p in source.iterdir()} == {
        p.name: p.read_bytes() for p in target.iterdir()
    }


def test_there_and_back_through_a_bucket(
    source: Folder, target: Folder, server: BucketServer, address: str
) -> None:
    checkpoint(source.root)
    bucket = open_store(address)
    told: list[tuple[int, int]] = []
    copied = copy_checkpoint(source, place(1), bucket, on_progress=lambda *done: told.append(done))
    size = open_checkpoint(source, place(1)).size_bytes
    assert (copied.sent_bytes, copied.present_bytes) == (size, 0)
    assert told[-1] == (2 * size, 2 * size)
    assert told == sorted(told)
    copy_checkpoint(bucket, place(1), target)
    assert same(source.root / place(1).directory, target.root / place(1).directory)
    for root in (target.root, server.bucket / address.rsplit("/", 1)[-1]):
        assert (root / LATEST).read_text() == f"{place(1).directory}\n"


def test_a_copy_done_again_sends_nothing_and_mends_what_broke(
    source: Folder, target: Folder
) -> None:
    written = checkpoint(source.root)
    size = open_checkpoint(source, place(1)).size_bytes
    copy_checkpoint(source, place(1), target)
    assert copy_checkpoint(source, place(1), target).sent_bytes == 0
    copied = target.root / place(1).directory
    flip(copied / "shard-00003", 5000)
    (copied / "shard-00000").write_bytes(b"short")
    flip(copied / "rank-00001.json", 100)
    assert copy_checkpoint(source, place(1), target).sent_bytes == 2 * (size // 4)
    assert same(written, copied)


@pytest.mark.parametrize("name", ["shard-00002", "rank-00002.json", COMMIT])
def test_a_damaged_source_is_named_and_nothing_committed(
    source: Folder, target: Folder, name: str
) -> None:
    flip(checkpoint(source.root) / name, 100)
    with pytest.raises(CorruptionError, match=name):
        copy_checkpoint(source, place(1), target)
    assert checkpoint_places(target) == []
    assert not (target.root / LATEST).exists()


def test_the_damaged_chunk_is_named(source: Folder, target: Folder) -> None:
    flip(checkpoint(source.root) / "shard-00002", 5000)
    with pytest.raises(CorruptionError, match=r"source.*shard-00002: chunk 1 .*weight"):
        copy_checkpoint(source, place(1), target)


def test_another_checkpoint_of_the_same_name_is_left_alone(
    source: Folder, target: Folder, tmp_path: Path
) -> None:
    checkpoint(source.root)
    make(target.root, place(1), {"weight": np.zeros(10)}, 4, job="other")
    before = {p.name: p.read_bytes() for p in (target.root / place(1).directory).iterdir()}
    with pytest.raises(CorruptionError, match="another checkpoint"):
        copy_checkpoint(source, place(1), target)
    assert before == {p.name: p.read_bytes() for p in (target.root / place(1).directory).iterdir()}


class Lying(Folder):
    """A store that loses a bit of each shard it writes."""

    def put(self, directory: str, name: str, parts: object, size_bytes: int) -> None:
        super().put(directory, name, parts, size_bytes)  # pyright: ignore[reportArgumentType]
        if name.startswith("shard"):
            flip(self.root / directory / name, 10)


def test_a_copy_is_verified_by_reading_it_back(source: Folder, tmp_path: Path) -> None:
    checkpoint(source.root)
    target = Lying(tmp_path / "target")
    with pytest.raises(StorageError, match="differs from the bytes that were sent"):
        copy_checkpoint(source, place(1), target)
    assert checkpoint_places(target) == []


def test_latest_does_not_go_back(source: Folder, target: Folder) -> None:
    for step in (1, 2):
        checkpoint(source.root, step)
    copy_checkpoint(source, place(2), target)
    copy_checkpoint(source, place(1), target)
    assert (target.root / LATEST).read_text() == f"{place(2).directory}\n"


def test_a_copy_resumes_after_its_server_was_killed(
    source: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint(source.root, size=4_000_000, chunk=1 << 18, world=WORLD)
    server = BucketServer(tmp_path / "s3")
    server.into(monkeypatch)
    there = server.bucket / "runs" / place(1).directory
    bucket = open_store(f"s3://{BUCKET}/runs", request_s=5, retries=1, retry_s=1)
    killing = threading.Lock()

    def acknowledged() -> list[str]:
        """Shards that the server, in any of its lives, has said that it has."""
        puts = server.requests("PUT", "shard-")
        return [path.rsplit("/", 1)[-1] for path, status in puts if status == 200]

    def kill(done: int, size: int) -> None:
        with killing:
            if len(acknowledged()) >= 3 and server.process.poll() is None:
                server.kill()

    try:
        with pytest.raises(StorageError, match="cannot be reached"):
            copy_checkpoint(source, place(1), bucket, on_progress=kill)
        finished = acknowledged()
        assert 3 <= len(finished) < WORLD
        assert not (there / COMMIT).exists()
        server.start()
        assert checkpoint_places(bucket) == []
        copied = copy_checkpoint(source, place(1), bucket)
        assert copied.present_bytes > 0
        assert not set(finished) & set(acknowledged()[len(finished) :])
        assert verify(open_checkpoint(bucket, place(1))) == []
        assert newest_checkpoint(bucket, pytest.fail) is not None
    finally:
        server.kill()


HOG = """
import sys
from pathlib import Path
from outlast.checkpoint.upkeep.checkpoint_copy import copy_checkpoint as copy
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.object_store import open_store
from outlast.checkpoint.stores.catalog import checkpoint_places as places

def peak():
    return int(next(s for s in open("/proc/self/status") if s.startswith("VmHWM")).split()[1])

source, target = Folder(Path(sys.argv[1])), open_store(sys.argv[2])
before = peak()
copy(source, places(source)[0], target, verify=False)
print(peak() - before)
"""


def test_a_slow_store_costs_no_memory(
    source: Folder, server: BucketServer, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 160 << 20
    make(source.root, place(1), {"weight": np.zeros(size, np.uint8)}, 1)
    proxy = SlowProxy(server.port, 150e6)
    server.into(monkeypatch, proxy.port)
    try:
        done = subprocess.run(
            [sys.executable, "-c", HOG, str(source.root), address],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    finally:
        proxy.close()
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) << 10 < 112 << 20  # a chunk, and four parts of 16 MiB on their way


def test_a_limit_is_kept(source: Folder, target: Folder) -> None:
    checkpoint(source.root, size=400_000)
    begin = time.monotonic()
    copy_checkpoint(source, place(1), target, limit_bytes_per_s=1_000_000)
    assert 0.4 < time.monotonic() - begin < 60  # twice 400 kB, less what haste is allowed


def test_a_stopped_copy_can_be_resumed(source: Folder, target: Folder) -> None:
    checkpoint(source.root)
    stop = threading.Event()

    def halfway(done: int, size: int) -> None:
        if done > size // 2:
            stop.set()

    with pytest.raises(StorageError, match="stopped"):
        copy_checkpoint(source, place(1), target, on_progress=halfway, stop=stop)
    assert checkpoint_places(target) == []
    assert copy_checkpoint(source, place(1), target).present_bytes > 0
    assert verify(open_checkpoint(target, place(1))) == []
