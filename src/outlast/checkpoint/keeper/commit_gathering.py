"""The commit record, written by rank 0's keeper once all ranks' parts exist and agree."""

from __future__ import annotations

import contextlib
import errno
import re
import time
from pathlib import Path

import msgspec

from outlast.checkpoint.format.manifest_checks import check_part, find_disagreements
from outlast.checkpoint.format.manifests import (
    COMMIT,
    LATEST,
    Commit,
    Manifest,
    ManifestEntry,
    SavePoint,
    Tensor,
    ValueSample,
    digest_of,
    manifest_name,
    seal,
    unseal,
)
from outlast.checkpoint.keeper.keeper_disk import KeeperDisk, write_file
from outlast.checkpoint.keeper.part_files import PART, failure_path
from outlast.errors import CorruptionError, StorageError

_SAVE_FILE = re.compile(
    rf"((?:shard|frozen)-\d{{5,}}|rank-\d{{5,}}\.json|{re.escape(COMMIT)})({re.escape(PART)})?"
    r"|rank-\d{5,}\.failed"
)
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
_NAMED_MAX = 8


class CommitGathering:
    """One incomplete checkpoint. Call `read_new_parts` repeatedly, then `commit` or `clear`."""

    def __init__(self, disk: KeeperDisk, root: Path, commit: Commit) -> None:
        self.disk = disk
        self.root = root
        self.directory = root / commit.place.directory
        self.size_bytes = 0
        self._commit = commit
        self._linked = False
        self._format = 0
        self._entries: dict[int, ManifestEntry] = {}
        self._samples: dict[int, tuple[ValueSample, ...]] = {}
        self._tensors: dict[str, tuple[int, Tensor]] = {}
        self._failed: dict[int, str] = {}

    @property
    def missing(self) -> list[int]:
        """Return the ranks that have neither finished nor reported a failure."""
        return [
            rank
            for rank in range(self._commit.world)
            if rank not in self._entries and rank not in self._failed
        ]

    def record_failure(self, rank: int, why: str) -> None:
        """Expect no part of this rank. Its disk may refuse even the failure file."""
        self._failed[rank] = why

    def read_new_parts(self) -> bool:
        """Read new parts; return whether all parts of this checkpoint are complete.

        Raises StorageError or CorruptionError naming ranks, if it cannot become complete.
        """
        names = {path.name for path in self.directory.iterdir()}
        wrong: dict[int, str] = {}
        for rank in self.missing:
            record = self.directory / manifest_name(rank)
            if record.name in names:
                wrong.update(self._record_manifest(rank, record))
            elif failure_path(record).name in names:
                why = failure_path(record).read_text(encoding="utf-8", errors="replace")
                self._failed[rank] = why or "its part failed"
        if wrong:
            self._failed.update(wrong)
            reasons = "; ".join(f"rank {rank}: {why}" for rank, why in _named(wrong))
            raise CorruptionError(
                f"{self.directory} cannot be committed, its parts do not match: {reasons}"
            )
        if self._failed:
            reasons = "; ".join(f"rank {rank}: {why}" for rank, why in _named(self._failed))
            raise StorageError(f"{self.directory} cannot be committed: {reasons}")
        if not self.missing and (mixed := find_disagreements(self._samples)):
            raise CorruptionError(
                f"{self.directory} cannot be committed, values that ranks hold in common differ:"
                f" {'; '.join(mixed[:_NAMED_MAX])}; each wrote a part of it, and a mixture would be"
                " restored; make them equal before a save, or save them as the ranks' own"
            )
        return not self.missing

    def commit(self) -> Commit:
        """Write the commit record, at most once. Returns when it is durable."""
        entries = tuple(self._entries[rank] for rank in range(self._commit.world))
        record = msgspec.structs.replace(
            self._commit,
            format=max(self._commit.format, self._format),
            time_ns=self._now_ns(),
            size_bytes=self.size_bytes,
            manifests=entries,
        )
        path = self.directory / COMMIT
        try:
            self._create(path, seal(record))
        except FileExistsError:
            record = self._existing_record(path, record)
        self._linked = True
        self.disk.sync_directory(self.directory)
        self.disk.sync_directory(self.root)
        return record

    def move_latest(self) -> None:
        """Move `latest` to this checkpoint."""
        latest = self.root / LATEST
        aside = self.root / f"{LATEST}-{self._commit.place.attempt}{PART}"
        self.disk.remove(aside)
        write_file(self.disk, aside, self._commit.place.directory.encode() + b"\n")
        self.disk.rename(aside, latest)
        self.disk.sync_directory(self.root)

    def clear(self) -> None:
        """Remove the files of the directory, the commit record first; ignore errors.

        No-op where the commit record belongs to another attempt.
        """
        with contextlib.suppress(OSError):
            if not self._linked and (self.directory / COMMIT).exists():
                return
            self.disk.remove(self.directory / COMMIT)
            names = [path.name for path in self.directory.iterdir()]
            for name in filter(_SAVE_FILE.fullmatch, names):
                self.disk.remove(self.directory / name)
            self.disk.remove_directory(self.directory)
            self.disk.sync_directory(self.root)

    def _now_ns(self) -> int:
        """Return a time after all commits at this position, even if the clock was set back."""
        place, now_ns = self._commit.place, time.time_ns()
        for other in self.root.iterdir():
            known = SavePoint.parse(other.name)
            if known and known.position == place.position:
                with contextlib.suppress(OSError, CorruptionError):  # no readable commit
                    record = unseal((other / COMMIT).read_bytes(), Commit, str(other))
                    now_ns = max(now_ns, record.time_ns + 1)
        return now_ns

    def _record_manifest(self, rank: int, record: Path) -> dict[int, str]:
        """Check and record one manifest; return its faults by rank."""
        data = record.read_bytes()
        try:
            manifest = unseal(data, Manifest, str(record))
        except CorruptionError as error:
            return {rank: str(error)}
        faults = list(check_part(manifest, rank, self._commit))
        for name, wanted in manifest.files.items():
            size_bytes = _size_bytes(self.directory / name)
            if size_bytes < 0:
                self.directory.stat()  # raises FileNotFoundError where all was removed
                faults.append(f"gives {wanted} bytes for {name}, which is missing")
            elif size_bytes != wanted:
                faults.append(f"gives {wanted} bytes for {name}, which has {size_bytes}")
        for name, tensor in manifest.tensors.items():
            other, known = self._tensors.setdefault(name, (rank, tensor))
            if known != tensor:
                faults.append(
                    f"has {name} as {tensor.dtype} {tensor.shape}, where rank {other} has"
                    f" {known.dtype} {known.shape}"
                )
        if faults:
            return {rank: f"its manifest {faults[0]}"}
        self._samples[rank] = manifest.samples
        self._entries[rank] = ManifestEntry(rank, record.name, len(data), digest_of(data))
        self.size_bytes += manifest.size_bytes
        self._format = max(self._format, manifest.format)
        return {}

    def _create(self, path: Path, data: bytes) -> None:
        """Write the record's file, complete and synced before it has its name.

        Raises FileExistsError where there is one.
        """
        part = path.with_name(path.name + PART)
        self.disk.remove(part)  # left by a keeper that died here
        write_file(self.disk, part, data)
        try:
            self.disk.link(part, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            write_file(self.disk, path, data)  # a partial one is not a valid commit record
        finally:
            self.disk.remove(part)

    def _existing_record(self, path: Path, record: Commit) -> Commit:
        """Return the existing record if it differs from `record` in time only.

        It exists when a keeper died between linking the record and reporting it.
        """
        try:
            existing = unseal(path.read_bytes(), Commit, str(path))
        except CorruptionError as error:
            raise StorageError(f"{path} exists already, and is damaged: {error}") from error
        alike = msgspec.structs.replace(record, time_ns=existing.time_ns, digest=existing.digest)
        if existing != alike:
            raise StorageError(
                f"{path} exists already, of another attempt at this place; it was not changed"
            )
        return existing


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def join_ranks(numbers: list[int]) -> str:
    """Return the ranks as text, at most the first few."""
    named = ", ".join(str(number) for number in numbers[:_NAMED_MAX])
    more = f" and {len(numbers) - _NAMED_MAX} more" if len(numbers) > _NAMED_MAX else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {named}{more}"


def _named(faults: dict[int, str]) -> list[tuple[int, str]]:
    return sorted(faults.items())[:_NAMED_MAX]
