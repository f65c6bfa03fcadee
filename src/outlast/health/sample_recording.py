"""Recordings of samples as JSON lines, to be judged again with other settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from outlast.atomic_files import draft_path
from outlast.errors import ConfigError, SourceError, StorageError
from outlast.health.check_memory import CheckMemory
from outlast.health.check_settings import CheckSettings, Profile
from outlast.health.probe_runner import TakenSample

VERSION = 1
FILE_BYTES_MAX = 256 << 20


class RecordingHead(msgspec.Struct, frozen=True, kw_only=True):
    """Head of a recording.

    `samples`: number of samples that follow; None in old recordings.
    """

    version: int = VERSION
    cluster: str
    node: str
    profile: Profile
    t_ns: int
    settings: CheckSettings
    memory: CheckMemory
    samples: int | None = None


class Recording(NamedTuple):
    """Head and samples of a recording."""

    head: RecordingHead
    taken: list[TakenSample]


def write_recording(path: Path, head: RecordingHead, taken: Sequence[TakenSample]) -> None:
    """Write a recording atomically. Raises StorageError."""
    draft = draft_path(path)
    head = replace(head, samples=len(taken))
    try:
        try:
            with draft.open("wb") as file:
                file.write(msgspec.json.encode(head) + b"\n")
                file.writelines(msgspec.json.encode(one) + b"\n" for one in taken)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror}") from error


def read_recording(path: Path) -> Recording:
    """Read a recording. Raises SourceError if it is damaged or incomplete."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise SourceError(f"{path}: larger than {FILE_BYTES_MAX:,} bytes; that is no recording")
    first, *rest = data.rstrip(b"\n").split(b"\n")
    try:
        head = msgspec.json.decode(first, type=RecordingHead)
        if head.version != VERSION:
            raise SourceError(
                f"{path}: a recording of version {head.version}; this reads {VERSION}"
            )
        if head.samples not in (None, len(rest)):
            raise SourceError(
                f"{path}: {len(rest)} samples, and {head.samples} were recorded: the file is not"
                " whole; copy it again"
            )
        decoder = msgspec.json.Decoder(TakenSample)
        return Recording(head, [decoder.decode(line) for line in rest])
    except (ValueError, RecursionError, ConfigError) as error:
        raise SourceError(f"{path}: no recording of `outlast check`: {error}") from error


EXPECTED_BY = {
    "gpu": "gpus", "leftover": "gpus", "disk": "disks", "smart": "disks", "service": "services",
    "matmul": "compute",
}  # fmt: skip
"""The part of the settings by which each check's probe decides that a device may be absent."""
_NOT_SEEN = "it was not looked at when this was recorded"


def apply_settings(
    taken: Iterable[TakenSample], now: CheckSettings, before: CheckSettings
) -> list[TakenSample]:
    """Return the samples as other settings would see them.

    A device that only the new settings expect, and that was not probed, becomes a failed sample.
    `before`: the settings of the recording.
    """
    if now == before:
        return list(taken)
    known = [_expected(one, now, before) for one in taken]
    mounts = [one for one in known if one.check == "mount"]
    if mounts:
        recorded = {one.device for one in mounts}
        known += [
            replace(mounts[0], device=path, **_failed(_NOT_SEEN))
            for path in now.mounts.expected
            if path not in recorded and path not in now.mounts.ignore
        ]
    return known


def _expected(one: TakenSample, now: CheckSettings, before: CheckSettings) -> TakenSample:
    part = EXPECTED_BY.get(one.check)
    if not one.absent or part is None or getattr(now, part) == getattr(before, part):
        return one
    return replace(one, **_failed(f"{_NOT_SEEN}: {one.absent}"))


def _failed(why: str) -> dict[str, Any]:
    bare = TakenSample(check="", device="", t_ns=0, took_s=0.0, failed=why)
    return {name: getattr(bare, name) for name in ("sample", "absent", "failed", "late", "stuck")}
