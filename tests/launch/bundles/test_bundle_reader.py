"""Bundles from strangers: damaged, hostile, of another version."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import zstandard

from outlast.errors import CorruptionError, OutlastError, UsageError
from outlast.launch.bundles import bundle_reader
from outlast.launch.bundles.bundle_format import MANIFEST
from outlast.launch.bundles.bundle_reader import unpack

REGULAR = tarfile.REGTYPE


def packed(path: Path, entries: list[tuple[str, bytes, bytes]], link: str = "") -> Path:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, kind, data in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.size, entry.linkname = kind, len(data), link
            archive.addfile(entry, io.BytesIO(data))
    path.write_bytes(zstandard.compress(raw.getvalue()))
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("top/../../evil", REGULAR),
        ("/top/evil", REGULAR),
        ("../evil", REGULAR),
        ("top", REGULAR),
        ("other/file", REGULAR),
        ("top/link", tarfile.SYMTYPE),
        ("top/link", tarfile.LNKTYPE),
        ("top/pipe", tarfile.FIFOTYPE),
        ("top/dev", tarfile.CHRTYPE),
    ],
)
def test_nothing_is_written_elsewhere(tmp_path: Path, name: str, kind: bytes) -> None:
    entries = [("top/first", REGULAR, b"x"), (name, kind, b"")]
    path = packed(tmp_path / "b.tar.zst", entries, link="/etc/passwd")
    with pytest.raises(CorruptionError, match="is no name of a bundle's file"):
        unpack(path, tmp_path / "into")
    assert {each.name for each in tmp_path.rglob("*")} == {"b.tar.zst", "into", "first"}


@pytest.mark.parametrize(
    "data",
    [b"", b"no archive", zstandard.compress(b"no tar"), zstandard.compress(b"x" * 9999)[:-3]],
)
def test_what_is_no_bundle_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "b.tar.zst"
    path.write_bytes(data)
    with pytest.raises(OutlastError, match=r"b\.tar\.zst"):
        unpack(path, tmp_path / "into")


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (b"", "is no bundle of Outlast"),
        (b'{"version": 1}', "is no bundle of Outlast"),
        (b'{"version": 2}', "of version 2, and this Outlast reads 1"),
    ],
)
def test_its_manifest_must_be_of_this_version(tmp_path: Path, manifest: bytes, says: str) -> None:
    path = packed(tmp_path / "b.tar.zst", [(f"top/{MANIFEST}", REGULAR, manifest)])
    with pytest.raises(UsageError, match=says):
        unpack(path, tmp_path / "into")


def test_sizes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_reader, "UNPACKED_MAX", 1 << 20)
    monkeypatch.setattr(bundle_reader, "FILES_MAX", 3)
    bomb = packed(tmp_path / "bomb.tar.zst", [("top/a", REGULAR, bytes(2 << 20))])
    with pytest.raises(CorruptionError, match="no bundle has that"):
        unpack(bomb, tmp_path / "one")
    many = [(f"top/{number}", REGULAR, b"") for number in range(9)]
    with pytest.raises(CorruptionError, match="no bundle has that"):
        unpack(packed(tmp_path / "many.tar.zst", many), tmp_path / "two")
    twice = [("top/a", REGULAR, b"1"), ("top/a", REGULAR, b"2")]
    with pytest.raises(OutlastError, match=r"twice\.tar\.zst"):
        unpack(packed(tmp_path / "twice.tar.zst", twice), tmp_path / "three")
    with pytest.raises(UsageError, match="exists; nothing was unpacked"):
        unpack(bomb, tmp_path / "one")
