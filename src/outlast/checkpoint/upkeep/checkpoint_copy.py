"""Resumable copy of a checkpoint between stores, verified byte by byte.

A copy reads each chunk against its manifest's digest, writes shards and manifests, reads back what
it wrote, and creates the commit record last: before that, the target has no checkpoint there.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from threading import Event, Lock
from typing import NamedTuple

from outlast.checkpoint.format.manifests import COMMIT, Manifest, SavePoint, manifest_name, seal
from outlast.checkpoint.stores.catalog import Checkpoint, checkpoint_places, open_checkpoint
from outlast.checkpoint.stores.chunk_reader import Chunk, RateLimiter, chunks_of, fetch
from outlast.checkpoint.stores.store_interfaces import (
    DuplicatingStore,
    Inode,
    LinkingStore,
    Store,
    StoreSource,
    hold_checkpoint,
)
from outlast.errors import CorruptionError, StalledError, StorageError

AT_ONCE = 4  # ranks copied in parallel: a bucket has high latency
_LOOKED_AT = 4  # of the target's checkpoints, for a file to link
Progress = Callable[[int, int], None]


class CopyResult(NamedTuple):
    """The result of a copy.

    `present_bytes`: of shards that the target had already. `seconds`: until it was committed,
    including the time to read it back.
    """

    place: SavePoint
    sent_bytes: int
    present_bytes: int
    seconds: float


def copy_checkpoint(
    source: StoreSource,
    place: SavePoint,
    target: Store,
    *,
    on_progress: Progress = lambda _done, _all: None,
    limit_bytes_per_s: float | None = None,
    verify: bool = True,
    stop: Event | None = None,
) -> CopyResult:
    """Copy a checkpoint. Its commit record is written last.

    Files that the target has already, of the right size (with `verify`: and the right bytes), are
    not sent again; with `verify`, sent files are read back. Memory: AT_ONCE chunks, and the buffers
    of the target's `put`. `limit_bytes_per_s` counts bytes to and from the target. `on_progress`
    gets the bytes done and the total, sent and read back, from any thread. Once `stop` is set, the
    copy ends after a chunk.

    Raises CorruptionError for a damaged source, or another checkpoint at the same place, and
    StorageError where either store fails. Nothing is committed then, and a later copy resumes.
    """
    begin_s = time.monotonic()
    checkpoint = open_checkpoint(source, place)
    checkpoint.check()
    record = seal(checkpoint.commit)
    present = target.files(place.directory)
    if COMMIT in present:
        _refuse_another(target, place, record)
    pace = RateLimiter(limit_bytes_per_s, stop or Event())
    parts = _Parts(checkpoint, target, present, pace, on_progress, verify)
    with hold_checkpoint(source, place.directory):
        parts.copy()
    if not target.create(place.directory, COMMIT, record):
        _refuse_another(target, place, record)
    if checkpoint_places(target)[:1] == [place]:
        target.point(place.directory)
    return CopyResult(
        place,
        parts.sent_bytes,
        checkpoint.size_bytes - parts.sent_bytes,
        time.monotonic() - begin_s,
    )


def _refuse_another(target: Store, place: SavePoint, record: bytes) -> None:
    if target.get(place.directory, COMMIT) != record:
        raise CorruptionError(
            f"{target.where}/{place.directory}: another checkpoint is there, under the same name;"
            " it was left as it is"
        )


class _Parts:
    """The shards and manifests of all ranks that one commit record names."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Store,
        there: dict[str, int],
        pace: RateLimiter,
        on_progress: Progress,
        verify: bool,
    ) -> None:
        self.sent_bytes = 0
        self._checkpoint = checkpoint
        self._directory = checkpoint.place.directory
        self._target = target
        self._present = there
        self._pace = pace
        self._on_progress = on_progress
        self._verify = verify
        self._passes = 2 if verify else 1
        self._done_bytes = 0
        self._lock = Lock()

    def copy(self) -> None:
        """Copy AT_ONCE ranks at a time. The first error ends it; no thread runs any more then."""
        manifests = self._checkpoint.manifests
        with ThreadPoolExecutor(min(AT_ONCE, len(manifests)), "copy") as pool:
            running = [pool.submit(self._copy_rank, manifest) for manifest in manifests]
            try:
                for one in as_completed(running):
                    one.result()
            except BaseException:  # an error or Ctrl-C: the other threads end after their chunk
                self._pace.end()
                pool.shutdown(cancel_futures=True)
                raise

    def _copy_rank(self, manifest: Manifest) -> None:
        buffer = memoryview(mmap.mmap(-1, max(min(manifest.chunk_bytes, manifest.size_bytes), 1)))
        for name, size_bytes in manifest.files.items():
            chunks = [chunk for chunk in chunks_of(manifest) if chunk.file == name]
            present = self._present.get(name, -1) == size_bytes
            if (present or self._is_taken_over(manifest, name)) and self._right(chunks, buffer):
                self._progress(self._passes * size_bytes)
            else:
                self._send(name, size_bytes, chunks, buffer)
        self._send_manifest(manifest)

    def _right(self, chunks: Sequence[Chunk], buffer: memoryview) -> bool:
        """Return whether the target's file is right; without `verify`, its size is enough."""
        if not self._verify:
            return True
        try:
            for _ in self._read(self._target, chunks, buffer):
                pass
        except CorruptionError:
            return False
        return True

    def _is_taken_over(self, manifest: Manifest, name: str) -> bool:
        """Return whether the target took frozen bytes from an earlier checkpoint of its own.

        They must be read back. As in a save, no two checkpoints in a row share the same file.
        """
        target = self._target
        if name == manifest.shard or not self._verify:
            return False
        if isinstance(target, DuplicatingStore):
            earlier = self._earlier(manifest)
            return any(
                alike and target.duplicate(self._directory, name, directory)
                for directory, alike in earlier
            )
        if not isinstance(target, LinkingStore):
            return False
        newest: list[Inode | None] = []
        for directory, alike in self._earlier(manifest):
            inode = target.inodes(directory).get(name)
            newest = newest or [inode]
            another = inode and not (newest[0] and newest[0].number == inode.number)
            if alike and another and target.link(self._directory, name, directory):
                return True
        return False

    def _earlier(self, manifest: Manifest) -> Iterator[tuple[str, bool]]:
        """Yield the target's newest checkpoints, newest first.

        With each, whether the rank's frozen bytes are the same there.
        """
        rank, wanted = manifest.rank, _frozen_of(manifest)
        places = (
            place for place in checkpoint_places(self._target) if place != self._checkpoint.place
        )
        for place in islice(places, _LOOKED_AT):
            try:
                checkpoint = open_checkpoint(self._target, place)
                for entry in checkpoint.commit.manifests[rank : rank + 1]:
                    yield place.directory, _frozen_of(checkpoint.manifest(entry)) == wanted
            except StalledError:
                raise
            except (CorruptionError, StorageError):
                continue

    def _send(
        self, name: str, size_bytes: int, chunks: Sequence[Chunk], buffer: memoryview
    ) -> None:
        def counted(store: StoreSource) -> Iterator[memoryview]:
            for part in self._read(store, chunks, buffer):
                yield part
                self._progress(len(part))

        parts = counted(self._checkpoint.store)
        self._target.put(self._directory, name, parts, size_bytes)
        if self._verify:
            try:
                for _ in counted(self._target):
                    pass
            except CorruptionError as error:
                raise self._changed(name, error) from error
        with self._lock:
            self.sent_bytes += size_bytes

    def _send_manifest(self, manifest: Manifest) -> None:
        name, data = manifest_name(manifest.rank), seal(manifest)
        if self._present.get(name) == len(data) and self._target.get(self._directory, name) == data:
            return
        self._target.put(self._directory, name, [data], len(data))
        if self._verify and self._target.get(self._directory, name) != data:
            raise self._changed(name, "it reads otherwise")

    def _read(
        self, store: StoreSource, chunks: Sequence[Chunk], buffer: memoryview
    ) -> Iterator[memoryview]:
        """Yield a file's chunks from `store`, each verified, all in one buffer."""
        for chunk in chunks:
            self._pace.spend(chunk.size_bytes)
            part = buffer[: chunk.size_bytes]
            fetch(store, chunk, part)
            yield part

    def _progress(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            self._on_progress(self._done_bytes, self._passes * self._checkpoint.size_bytes)

    def _changed(self, name: str, why: object) -> StorageError:
        return StorageError(
            f"{self._target.where}/{self._directory}/{name}: differs from the bytes that were sent:"
            f" {why}; nothing was committed; check the store, then copy again"
        )


def _frozen_of(manifest: Manifest) -> tuple[int, tuple[str, ...]]:
    """Return the chunk size and the digests of a rank's frozen region."""
    count = manifest.frozen_bytes // manifest.chunk_bytes
    return manifest.chunk_bytes, manifest.chunks[:count]
