"""Reader of forensic bundles. They may come from anybody: names and sizes are hostile."""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgspec

from outlast.errors import CorruptionError, StorageError, UsageError
from outlast.launch.bundles.bundle_format import (
    FILES_MAX,
    MANIFEST,
    UNPACKED_MAX,
    VERSION,
    BundleManifest,
)


class _BundleVersion(msgspec.Struct):
    version: int


def unpack(path: Path, into: Path) -> BundleManifest:
    """Unpack a bundle into a new directory, which then has the layout of a run directory.

    Raises UsageError for a file that is no bundle of this version, or a directory that exists;
    CorruptionError for a damaged one, or one with names or sizes that no bundle has; StorageError
    if it cannot be written. Nothing is ever written outside `into`.
    """
    import zstandard  # takes 10 ms, and most commands read no bundle

    try:
        into.mkdir(parents=True)
    except FileExistsError as error:
        raise UsageError(f"{into} exists; nothing was unpacked; give another --into") from error
    except OSError as error:
        raise StorageError(f"{into} cannot be made: {error.strerror}") from error
    try:
        with path.open("rb") as raw:
            reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(raw)
            with tarfile.open(fileobj=reader, mode="r|") as archive:
                _extract(archive, path, into)
        return _manifest(path, into)
    except (zstandard.ZstdError, tarfile.TarError, EOFError) as error:
        raise CorruptionError(f"{path} is no bundle, or is damaged: {error}") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be unpacked: {error.strerror or error}") from error


def _extract(archive: tarfile.TarFile, path: Path, into: Path) -> None:
    total, top = 0, ""
    for number, entry in enumerate(archive):
        parts = PurePosixPath(entry.name).parts
        top = top or parts[0]
        names = parts[1:]
        wrong = not entry.isreg() or parts[0] != top or not names or entry.name.startswith("/")
        if wrong or any(part in ("..", "") or "\0" in part for part in names):
            raise CorruptionError(f"{path}: {entry.name!r} is no name of a bundle's file")
        total += entry.size
        if number >= FILES_MAX or total > UNPACKED_MAX:
            raise CorruptionError(
                f"{path} has over {FILES_MAX} files or {UNPACKED_MAX >> 30} GiB: no bundle has that"
            )
        source = archive.extractfile(entry)
        assert source is not None  # a regular file
        target = into.joinpath(*names)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            _copy(source, file)


def _copy(source: object, file: BinaryIO) -> None:
    while data := source.read(1 << 20):  # type: ignore[attr-defined] - typed as IO[bytes] | None
        file.write(data)


def _manifest(path: Path, into: Path) -> BundleManifest:
    try:
        data = (into / MANIFEST).read_bytes()
        version = msgspec.json.decode(data, type=_BundleVersion).version
        if version != VERSION:
            raise UsageError(
                f"{path} is a bundle of version {version}, and this Outlast reads {VERSION}"
            )
        return msgspec.json.decode(data, type=BundleManifest)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} is no bundle of Outlast: {MANIFEST}: {error}") from error
