"""Samples written down, to be judged again elsewhere: a line of JSON for the node, one a sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from outlast.atomic_files import draft_path
from outlast.errors import ConfigError, SourceError, StorageError
from outlast.health.memory import Memory
from outlast.health.probing import Taken
from outlast.health.settings import Profile, Settings

VERSION = 1
FILE_BYTES_MAX = 256 << 20


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Head of a recording. `samples`: how many follow; None: recorded before they
    were counted."""

    version: int = VERSION
    cluster: str
    node: str
    profile: Profile
    t_ns: int
    settings: Settings
    memory: Memory
    samples: int | None = None


class Recording(NamedTuple):
    head: Head
    taken: list[Taken]


def write(path: Path, head: Head, taken: Sequence[Taken]) -> None:
    """Whole or not at all. Raises StorageError."""
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


def read(path: Path) -> Recording:
    """Raises SourceError."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise SourceError(f"{path}: larger than {FILE_BYTES_MAX:,} bytes; that is no recording")
    first, *rest = data.rstrip(b"\n").split(b"\n")
    try:
        head = msgspec.json.decode(first, type=Head)
        if head.version != VERSION:
            raise SourceError(
                f"{path}: a recording of version {head.version}; this reads {VERSION}"
            )
        if head.samples not in (None, len(rest)):
            raise SourceError(
                f"{path}: {len(rest)} samples, and {head.samples} were recorded: the file is not"
                " whole; copy it again"
            )
        decoder = msgspec.json.Decoder(Taken)
        return Recording(head, [decoder.decode(line) for line in rest])
    except (ValueError, RecursionError, ConfigError) as error:
        raise SourceError(f"{path}: no recording of `outlast check`: {error}") from error
