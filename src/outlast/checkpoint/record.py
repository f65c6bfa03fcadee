"""What a checkpoint says of itself: a manifest a rank, one commit record (docs/format.md).

Plain structures, sealed as JSON with a digest of themselves. Nothing here touches a file or torch.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
import xxhash

from outlast.errors import CorruptionError

FORMAT = 2
CHUNK_BYTES = 16 << 20
COMMIT = "commit.json"
LATEST = "latest"
_NAME = re.compile(r"step-([0-9]{9,18})-n([0-9]{1,18})-([a-z0-9]{1,32})")


class Place(msgspec.Struct, frozen=True, order=True):
    """Where a run was when it was saved, and which attempt at saving it this is.

    `n`: phases completed (under `outlast run`; else the step). `attempt`: letters and digits, new
    for every attempt, equal on all ranks of one.
    """

    step: int
    n: int
    attempt: str

    @property
    def directory(self) -> str:
        return f"step-{self.step:09d}-n{self.n}-{self.attempt}"

    @classmethod
    def parse(cls, directory: str) -> Place | None:
        """The place that a directory's name says, or None for a name of somebody else's."""
        match = _NAME.fullmatch(directory)
        place = cls(int(match[1]), int(match[2]), match[3]) if match else None
        return place if place and place.directory == directory else None


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole tensor, wherever its pieces are. `dtype`: torch's name without "torch."."""

    dtype: str
    shape: tuple[int, ...]


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A box of a tensor: its elements lie in C order from byte `at` of the shard on."""

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    at: int


class Blob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Bytes in a shard that are no tensor: `shared` (from rank 0) or `own` (this rank's)."""

    name: str
    at: int
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's part of a checkpoint. `chunks`: xxh3_128 in hex of each `chunk_bytes` of the
    shard, the last one shorter. `plan`: a digest of how tensors were divided; equal on all ranks.
    """

    format: int = FORMAT
    job: str
    place: Place
    rank: int
    world: int
    shard: str
    size_bytes: int
    chunk_bytes: int
    chunks: tuple[str, ...]
    plan: str
    tensors: dict[str, Tensor]
    pieces: tuple[Piece, ...]
    blobs: tuple[Blob, ...]
    digest: str = ""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A manifest that belongs to a checkpoint. `size_bytes` and `digest` are the file's own:
    its length, and the xxh3_128 in hex of all its bytes."""

    rank: int
    name: str
    size_bytes: int
    digest: str


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record that makes a checkpoint exist. `time_ns`: Unix, told by the committing host; it
    orders attempts at one place, and tells its age. `origin`: who wrote it (versions, host, ...).
    """

    format: int = FORMAT
    job: str
    place: Place
    world: int
    time_ns: int
    plan: str
    size_bytes: int
    manifests: tuple[Entry, ...]
    origin: dict[str, str]
    digest: str = ""


Sealed = TypeVar("Sealed", Manifest, Commit)


def shard_name(rank: int) -> str:
    return f"shard-{rank:05d}"


def manifest_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def digest_of(data: bytes | memoryview) -> str:
    """xxh3_128 in hex: of a chunk of a shard, of a manifest's file."""
    return xxhash.xxh3_128_hexdigest(data)


def seal(record: Sealed) -> bytes:
    """The record as JSON with its digest filled in, as it lies in a file."""
    empty = msgspec.json.encode(msgspec.structs.replace(record, digest=""))
    return msgspec.json.encode(msgspec.structs.replace(record, digest=digest_of(empty))) + b"\n"


def unseal(data: bytes, kind: type[Sealed], where: str) -> Sealed:
    """The record of a file's bytes; `where` names the file in errors.

    Raises CorruptionError when one bit of it is wrong, or it is of another version.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version != FORMAT:
            raise CorruptionError(
                f"{where}: format {version} where this Outlast reads {FORMAT}; use the Outlast that"
                " wrote it"
            )
        record = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{where}: {error}; nothing was taken over from it") from error
    if seal(record) != data:
        raise CorruptionError(
            f"{where}: its bytes do not match its digest; nothing was taken over from it"
        )
    return record


class _Version(msgspec.Struct):
    format: int
