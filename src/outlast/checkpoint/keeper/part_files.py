"""One rank's part of a checkpoint: from shared memory to a synced shard and its manifest."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from outlast.checkpoint.format.manifests import (
    COMMIT,
    Manifest,
    digest_of,
    frozen_name,
    manifest_name,
    seal,
    shard_name,
    unseal,
)
from outlast.checkpoint.keeper.frozen_files import FrozenFiles
from outlast.checkpoint.keeper.keeper_disk import KeeperDisk, write_file
from outlast.errors import CorruptionError, StorageError

PART = ".part"
_THREADS = 2


class PartFiles:
    """The files of one rank in one directory.

    `write` returns once shard, manifest and their names are durable. If it raises, the files that
    it created are removed. It changes no file that it did not create, except in a retry: then files
    of this rank are those of a keeper that died during this order.
    """

    def __init__(
        self,
        disk: KeeperDisk,
        root: Path,
        manifest: Manifest,
        due: float,
        frozen: FrozenFiles | None = None,
    ) -> None:
        """Prepare the files of a part. `frozen`: known files of earlier checkpoints."""
        self.disk = disk
        self._root = root
        self.directory = root / manifest.place.directory
        self.due = due  # on the monotonic clock
        self.is_taken = False  # another save has files under this rank's names
        self._manifest = manifest
        self._frozen_files = frozen or FrozenFiles()
        self._created: list[Path] = []

    def write(self, memory: memoryview, is_retry: bool) -> Manifest:
        """Write the part; return the manifest with its chunks.

        `memory`: the bytes of the shard, page aligned.
        """
        manifest = self._manifest
        shard = self.directory / shard_name(manifest.rank)
        frozen = self.directory / frozen_name(manifest.rank)
        record = self.directory / manifest_name(manifest.rank)
        self.disk.make_directory(self.directory)
        if is_retry and (finished := self._finished_manifest(record)):
            self.disk.sync_directory(self.directory)
            return finished
        if is_retry:
            for path in (shard, frozen):
                self.disk.remove(_part(path))
                self.disk.remove(path)
            for path in (_part(record), failure_path(record)):
                self.disk.remove(path)
        try:
            claim = self._create(_part(shard))
            try:
                self._refuse_another(shard, frozen, record)
                chunks = self._write_frozen(frozen, memory[: manifest.frozen_bytes])
                chunks += self._fill(claim, memory[manifest.frozen_bytes :])
            finally:
                self.disk.close(claim)
            self._rename(_part(shard), shard)
            full = msgspec.structs.replace(manifest, chunks=chunks)
            self._created.append(_part(record))
            write_file(self.disk, _part(record), seal(full))
            self._rename(_part(record), record)
            self.disk.sync_directory(self.directory)
        except BaseException:  # an incomplete part must not use up space
            self.remove_created()
            raise
        return full

    def _write_frozen(self, path: Path, memory: memoryview) -> tuple[str, ...]:
        """Link or write the frozen region at `path`; return its digests."""
        if not memory:
            return ()
        files = self._frozen_files
        try:
            linked = files.link(self.disk, self._root, self._manifest, memory, self._check_time)
        except FileExistsError as error:
            raise self._taken_error(path) from error
        if linked is not None:
            self._created.append(path)
            return linked
        fd = self._create(_part(path))
        try:
            digests = self._fill(fd, memory)
        finally:
            self.disk.close(fd)
        self._rename(_part(path), path)
        files.record_written(digests)
        return digests

    def _fill(self, fd: int, memory: memoryview) -> tuple[str, ...]:
        """Write and sync a file; return its digests."""
        chunk_bytes = self._manifest.chunk_bytes
        digests = _Chunks(self.disk, fd, memory, chunk_bytes, self.due).write()
        self.disk.sync(fd)
        return digests

    def _check_time(self) -> None:
        if time.monotonic() > self.due:
            raise StorageError("the deadline passed before the first byte was written")

    def remove_created(self) -> None:
        """Remove the files created here; ignore errors."""
        for path in reversed(self._created):
            with contextlib.suppress(OSError):  # a failing disk may refuse this, too
                self.disk.remove(path)
        self._created.clear()

    def announce_failure(self, why: str) -> None:
        """Write a file that announces the failure of this part, so that no rank waits for it."""
        if self.is_taken:
            return
        path = failure_path(self.directory / manifest_name(self._manifest.rank))
        with contextlib.suppress(OSError):  # else rank 0 waits until its deadline
            path.write_text(why, encoding="utf-8")

    def _create(self, path: Path) -> int:
        try:
            fd = self.disk.create(path)
        except FileExistsError as error:
            raise self._taken_error(path) from error
        self._created.append(path)
        return fd

    def _rename(self, path: Path, to: Path) -> None:
        self.disk.rename(path, to)
        self._created[self._created.index(path)] = to

    def _refuse_another(self, *paths: Path) -> None:
        """Raise StorageError where files of another save exist.

        Call it after creating the part's file: of two concurrent keepers one fails here.
        """
        for path in (*paths, self.directory / COMMIT):
            if path.exists():
                raise self._taken_error(path)

    def _taken_error(self, path: Path) -> StorageError:
        self.is_taken = True
        return StorageError(
            f"{path} exists already: this place was saved before; its files were not changed"
        )

    def _finished_manifest(self, record: Path) -> Manifest | None:
        """Return this rank's manifest, where an earlier keeper has finished the part."""
        try:
            manifest = unseal(record.read_bytes(), Manifest, str(record))
        except (FileNotFoundError, CorruptionError):
            return None
        bare = msgspec.structs.replace(manifest, chunks=(), digest="")
        return manifest if bare == msgspec.structs.replace(self._manifest, digest="") else None


def failure_path(record: Path) -> Path:
    """Return the path of the failure file of the rank whose manifest is `record`."""
    return record.with_suffix(".failed")


def _part(path: Path) -> Path:
    return path.with_name(path.name + PART)


class _Chunks:
    """Writes memory to a new file, chunk by chunk, from a few threads at once."""

    def __init__(
        self, disk: KeeperDisk, fd: int, memory: memoryview, chunk_bytes: int, due: float
    ) -> None:
        self._disk = disk
        self._fd = fd
        self._memory = memory
        self._due = due
        self._chunk_bytes = chunk_bytes
        self._digests = [""] * -(-len(memory) // chunk_bytes)
        self._lock = threading.Lock()
        self._next = 0
        self._errors: list[BaseException] = []
        self._direct = False

    def write(self) -> tuple[str, ...]:
        """Write and digest each chunk; return the digests. The file is not synced yet."""
        if self._memory:
            self._disk.allocate(self._fd, len(self._memory))
        self._direct = self._disk.go_direct(self._fd, True)
        count = min(_THREADS, len(self._digests))
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count - 1)]
        for thread in threads:
            thread.start()
        self._work()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return tuple(self._digests)

    def _work(self) -> None:
        try:
            before: tuple[int, int] | None = None
            for at in self._offsets():
                piece = self._memory[at : at + self._chunk_bytes]
                self._digests[at // self._chunk_bytes] = digest_of(piece)
                self._write(piece, at)
                if not self._direct:
                    self._disk.write_back(self._fd, at, len(piece), settle=False)
                    if before:
                        self._disk.write_back(self._fd, *before, settle=True)
                    before = at, len(piece)
        except BaseException as error:  # noqa: BLE001 - raised by write(), in the thread that waits
            self._errors.append(error)

    def _offsets(self) -> Iterator[int]:
        while not self._errors:
            with self._lock:
                at = self._next
                self._next += self._chunk_bytes
            if at >= len(self._memory):
                return
            if time.monotonic() > self._due:
                raise StorageError(
                    f"the deadline passed with {at} of {len(self._memory)} bytes written"
                )
            yield at

    def _write(self, piece: memoryview, at: int) -> None:
        done = 0
        while done < len(piece):
            direct = self._direct
            try:
                done += self._disk.write(self._fd, piece[done:], at + done)
            except OSError as error:
                # After a short write, or on a file system that requires another alignment.
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._direct = self._disk.go_direct(self._fd, False)
