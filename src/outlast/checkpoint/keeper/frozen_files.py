"""Files of frozen regions: hard links to an earlier checkpoint's where bytes are equal.

digests of the memory equal an earlier manifest's?     no: write
        | yes
a file other than the previous checkpoint's exists?    no: write a second one
        | yes
its bytes on disk match the digests?                   no: next file, or write
        | yes
link
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from outlast.checkpoint.format.manifests import (
    Manifest,
    SavePoint,
    digest_of,
    frozen_name,
    manifest_name,
    unseal,
)
from outlast.checkpoint.keeper.keeper_disk import KeeperDisk
from outlast.errors import CorruptionError

READ_BACK = 16  # number of links in which every byte of a file is read back once
FILES = 2  # with the same bytes: consecutive checkpoints use different files
_MANIFESTS_MAX = 4  # earlier checkpoints that are considered
_KNOWN_MAX = 64


class FrozenFile(NamedTuple):
    """The frozen region of one rank in an earlier checkpoint.

    `identity`: device, inode, and time of the last change of its bytes; None where there is no such
    region, or no matching file.
    """

    path: Path
    digests: tuple[str, ...]
    chunk_bytes: int
    size_bytes: int
    identity: tuple[int, int, int] | None


class FrozenFiles:
    """The files that a keeper has linked and written. One thread at a time."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int, int], int] = {}  # the chunk to be read back next
        self._written: tuple[tuple[str, ...], int] = (), 0  # digests, files written of them
        self._damaged: set[tuple[int, int, int]] = set()
        self._damages: list[str] = []  # not reported yet

    def link(
        self,
        disk: KeeperDisk,
        root: Path,
        manifest: Manifest,
        memory: memoryview,
        check: Callable[[], None],
    ) -> tuple[str, ...] | None:
        """Link a file with the bytes of `memory` into the manifest's directory.

        Returns its digests, or None where there is no such file, or it cannot be linked. `check`
        raises after the deadline. Raises FileExistsError where the name is taken.
        """
        known = _earlier_regions(root, manifest)
        digests, equal = _match_digests(known, memory, manifest.chunk_bytes, check)
        if digests is None:
            return None
        whole = [each for each in equal if each.identity not in self._damaged]
        eligible = [each for each in whole if each.identity != known[0].identity]
        if len(known) == 1 and self._written[0] == digests and self._written[1] >= FILES:
            eligible = whole  # no older checkpoint is kept, which another file could protect
        to = root / manifest.place.directory / frozen_name(manifest.rank)
        files = {each.identity: each for each in reversed(eligible)}
        linked = any(self._link(disk, each, to, check) for each in reversed(files.values()))
        return digests if linked else None

    def take_damages(self) -> str:
        """Return the damage found since the last call, as a sentence; "" for none."""
        damages, self._damages = self._damages, []
        return (
            f"{'; '.join(damages)}; it was not linked, the bytes in memory were saved instead;"
            " older checkpoints with that file are damaged: see 'outlast ckpt verify --all'"
            if damages
            else ""
        )

    def require_read_back(self) -> None:
        """Make each file be read back completely before it is linked again."""
        self._next.clear()

    def record_written(self, digests: tuple[str, ...]) -> None:
        """Record that a file with these bytes was written."""
        before, count = self._written
        self._written = digests, count + 1 if digests == before else 1

    def _link(
        self, disk: KeeperDisk, file: FrozenFile, to: Path, check: Callable[[], None]
    ) -> bool:
        try:
            fd = disk.open(file.path)
        except OSError:  # pruned meanwhile
            return False
        try:
            if _identity(os.fstat(fd), file.size_bytes) != file.identity:
                return False
            self._read_back(disk, fd, file, check)
            disk.link(file.path, to)
            if os.path.samestat(os.fstat(fd), to.stat(follow_symlinks=False)):
                return True
            disk.remove(to)
        except FileExistsError:
            raise
        except CorruptionError as error:
            assert file.identity
            self._damaged.add(file.identity)
            self._damages.append(str(error))
        except OSError:
            pass  # links unsupported or exhausted, or the file is unreadable
        finally:
            disk.close(fd)
        return False

    def _read_back(
        self, disk: KeeperDisk, fd: int, file: FrozenFile, check: Callable[[], None]
    ) -> None:
        """Compare bytes with their digests: all for the first link, later a part in turn."""
        count = len(file.digests)
        assert file.identity
        begin = self._next.get(file.identity)
        numbers = range(count) if begin is None else range(begin, begin + -(-count // READ_BACK))
        buffer = memoryview(mmap.mmap(-1, file.chunk_bytes))
        disk.go_direct(fd, True)
        for number in numbers:
            check()
            at = number % count * file.chunk_bytes
            disk.read(fd, buffer, at)
            if digest_of(buffer) != file.digests[number % count]:
                self._next.pop(file.identity, None)
                raise CorruptionError(
                    f"{file.path}: bytes {at} to {at + file.chunk_bytes} do not match their digest"
                )
        self._next[file.identity] = numbers.stop % count
        while len(self._next) > _KNOWN_MAX:
            del self._next[next(iter(self._next))]


def _earlier_regions(root: Path, manifest: Manifest) -> list[FrozenFile]:
    """Return this rank's frozen regions in the newest other directories, newest first."""
    places = [place for path in root.iterdir() if (place := SavePoint.parse(path.name))]
    places.sort(key=lambda place: (place.position, place.attempt), reverse=True)
    regions: list[FrozenFile] = []
    for place in places:
        if place == manifest.place or len(regions) >= _MANIFESTS_MAX:
            continue
        try:
            earlier = _manifest_in(root / place.directory, manifest.rank)
        except (OSError, CorruptionError):
            continue  # no valid part of this rank
        regions.append(_file_of(root / place.directory, earlier, manifest))
    return regions


def _file_of(directory: Path, earlier: Manifest, manifest: Manifest) -> FrozenFile:
    size_bytes, chunk_bytes = manifest.frozen_bytes, manifest.chunk_bytes
    path = directory / frozen_name(manifest.rank)
    theirs = (earlier.job, earlier.rank, earlier.frozen_bytes, earlier.chunk_bytes)
    identity = None
    if theirs == (manifest.job, manifest.rank, size_bytes, chunk_bytes):
        with contextlib.suppress(OSError):
            identity = _identity(path.stat(follow_symlinks=False), size_bytes)
    digests = earlier.chunks[: size_bytes // chunk_bytes]
    return FrozenFile(path, digests, chunk_bytes, size_bytes, identity)


def _manifest_in(directory: Path, rank: int) -> Manifest:
    path = directory / manifest_name(rank)
    if directory.is_symlink():
        raise CorruptionError(f"{directory} is a symbolic link")
    return unseal(path.read_bytes(), Manifest, str(path))


def _identity(status: os.stat_result, size_bytes: int) -> tuple[int, int, int] | None:
    """Return device, inode and change time; None for no regular file of that size."""
    if not stat.S_ISREG(status.st_mode) or status.st_size != size_bytes:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _match_digests(
    known: Iterable[FrozenFile], memory: memoryview, chunk_bytes: int, check: Callable[[], None]
) -> tuple[tuple[str, ...] | None, list[FrozenFile]]:
    """Return the digests of `memory` and the files that have the same; None without any."""
    equal, digests = [each for each in known if each.identity], list[str]()
    for number, at in enumerate(range(0, len(memory), chunk_bytes)):
        if not equal:
            break
        check()
        digests.append(digest_of(memory[at : at + chunk_bytes]))
        equal = [each for each in equal if each.digests[number] == digests[number]]
    return (tuple(digests), equal) if equal else (None, [])
