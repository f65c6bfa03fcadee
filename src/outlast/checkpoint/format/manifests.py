"""Manifests and commit records of a checkpoint (docs/format.md), and the order of checkpoints.

Plain structures, sealed as JSON with a digest of themselves. Nothing here touches a file or torch.

    line 0:  100 -- 200 -- 300               load(step=100) goes back:
              +----- line 1:  110 -- 120      110 is newer than 300, its base is 100

Positions are (line, step, n). A save whose position would be behind the greatest in its directory
begins a line, with a number of its own; at an equal position the later commit is newer. The newest
checkpoint and its predecessors are its *ancestry*. The last checkpoint of a line outside the
ancestry is that line's *end*.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import xxhash

from outlast.errors import CorruptionError, UsageError

FORMAT = 3
FORMAT_FROZEN = 4  # of a part with a frozen region, and of a checkpoint with such a part
FORMATS = (2, 3, 4)  # that are read
STEPS_MAX = 10**18 - 1
LINES_MAX = 10**9 - 1
CHUNK_BYTES = 16 << 20
COMMIT = "commit.json"
LATEST = "latest"
_SINCE_3 = {"samples", "parent", "base"}
_NAME = re.compile(r"step-([0-9]{9,18})-n([0-9]{1,18})(?:-l([1-9][0-9]{0,8}))?-([a-z0-9]{1,32})")


class SavePoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The position of a run at a save, and the attempt at that save.

    `n`: phases completed (under `outlast run`; else the step). `attempt`: letters and digits, new
    for every attempt, equal on all ranks of one. `line`: how often the job had gone back, or begun
    anew, in this directory; a later line is newer, whatever its steps.
    """

    step: int
    n: int
    attempt: str
    line: int = 0

    @property
    def position(self) -> tuple[int, int, int]:
        """Return the sort key of checkpoints; of equal positions the later commit is newer."""
        return self.line, self.step, self.n

    @property
    def directory(self) -> str:
        """Return the name of its directory."""
        line = f"-l{self.line}" if self.line else ""
        return f"step-{self.step:09d}-n{self.n}{line}-{self.attempt}"

    @classmethod
    def parse(cls, directory: str) -> SavePoint | None:
        """Return the place that a directory's name encodes; None for any other name."""
        match = _NAME.fullmatch(directory)
        place = cls(int(match[1]), int(match[2]), match[4], int(match[3] or 0)) if match else None
        return place if place and place.directory == directory else None


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete tensor, independent of its pieces. `dtype`: torch's name without "torch."."""

    dtype: str
    shape: tuple[int, ...]


class TensorPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
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


class ValueSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Sample of tensors that a rank shares with others, to be compared at the commit.

    `key`: equal on all ranks that have these tensors. `ranks`: these. `digest`: xxh3_128 in hex of
    the sample of all of them. `each`: 8 hex digits a tensor, in order of their names. `names`: on
    the first of the ranks; empty on the others.
    """

    key: str
    ranks: tuple[int, ...]
    digest: str
    each: str
    names: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's part of a checkpoint.

    `chunks`: xxh3_128 in hex of each `chunk_bytes` of the shard, the last one shorter. `plan`: a
    digest of the division of tensors; equal on all ranks. `samples`: since format 3. `frozen`: in
    format 4 alone, the bytes of the frozen region, which come first: a multiple of the chunk size.
    """

    format: int = FORMAT
    job: str
    place: SavePoint
    rank: int
    world: int
    shard: str
    size_bytes: int
    chunk_bytes: int
    chunks: tuple[str, ...]
    plan: str
    tensors: dict[str, Tensor]
    pieces: tuple[TensorPiece, ...]
    blobs: tuple[Blob, ...]
    samples: tuple[ValueSample, ...] = ()
    frozen: int | msgspec.UnsetType = msgspec.UNSET
    digest: str = ""

    @property
    def frozen_bytes(self) -> int:
        """Return the bytes of the frozen region, 0 without one."""
        return self.frozen or 0

    @property
    def files(self) -> dict[str, int]:
        """Return the size of each file of the part, in the order of its bytes."""
        frozen = {frozen_name(self.rank): self.frozen_bytes} if self.frozen_bytes else {}
        return frozen | {self.shard: self.size_bytes - self.frozen_bytes}


class ManifestEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A manifest that belongs to a checkpoint.

    `size_bytes` and `digest` are the file's: its length, and the xxh3_128 in hex of its bytes.
    """

    rank: int
    name: str
    size_bytes: int
    digest: str


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record that makes a checkpoint exist.

    `time_ns`: Unix time of the committing host; it orders attempts at one position, and gives the
    age. `origin`: the writer (versions, host). Since format 3: `parent`, the directory of the
    previous save or load ("" for none; that save may have failed), and `base`, the one that its
    line began from ("" for none).
    """

    format: int = FORMAT
    job: str
    place: SavePoint
    world: int
    time_ns: int
    plan: str
    size_bytes: int
    manifests: tuple[ManifestEntry, ...]
    origin: dict[str, str]
    parent: str = ""
    base: str = ""
    digest: str = ""


Sealed = TypeVar("Sealed", Manifest, Commit)


def shard_name(rank: int) -> str:
    """Return the file name of a rank's shard."""
    return f"shard-{rank:05d}"


def frozen_name(rank: int) -> str:
    """Return the file name of a rank's frozen region."""
    return f"frozen-{rank:05d}"


def step_count(step: Any) -> int:
    """Return a number of steps as int, for any type of integer. Raises UsageError for others."""
    try:
        count = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        count = -1
    if not 0 <= count <= STEPS_MAX:
        raise UsageError(
            f"step is {step!r}, and must be a whole number from 0 to 10^18 - 1; nothing was saved"
            " or loaded"
        )
    return count


def manifest_name(rank: int) -> str:
    """Return the file name of a rank's manifest."""
    return f"rank-{rank:05d}.json"


def digest_of(data: bytes | memoryview) -> str:
    """Return xxh3_128 in hex: of a chunk of a shard, of a manifest's file."""
    return xxhash.xxh3_128_hexdigest(data)


def seal(record: Sealed) -> bytes:
    """Return the record as JSON with its digest filled in, the contents of its file."""
    empty = _encode(msgspec.structs.replace(record, digest=""))
    return _encode(msgspec.structs.replace(record, digest=digest_of(empty))) + b"\n"


def unseal(data: bytes, kind: type[Sealed], where: str) -> Sealed:
    """Return the record of a file's bytes; `where` names the file in errors.

    Raises CorruptionError when one bit of it is wrong, or it is of another version.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version not in FORMATS:
            raise CorruptionError(
                f"{where}: format {version} where this Outlast reads {FORMATS[0]} to {FORMATS[-1]};"
                " use the Outlast that wrote it"
            )
        record = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{where}: {error}; nothing was loaded from it") from error
    if seal(record) != data:
        raise CorruptionError(
            f"{where}: its bytes do not match its digest; nothing was loaded from it"
        )
    return record


def _encode(record: Manifest | Commit) -> bytes:
    if record.format >= 3:
        return msgspec.json.encode(record)
    fields = msgspec.to_builtins(record)
    return msgspec.json.encode({k: v for k, v in fields.items() if k not in _SINCE_3})


class _Version(msgspec.Struct):
    format: int


_DTYPES_BY_SIZE = {
    1: (
        "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
        " float4_e2m1fn_x2"
    ),
    2: "uint16 int16 float16 bfloat16",
    4: "uint32 int32 float32 complex32",
    8: "uint64 int64 float64 complex64",
    16: "complex128",
}
ITEM_BYTES = {name: size for size, names in _DTYPES_BY_SIZE.items() for name in names.split()}


class Lineage(msgspec.Struct):
    """Position of a run's saves among those of its directory. The same on all ranks.

    `line`, `base`: of the next save, unless that goes back. `last`: the greatest known position;
    `parent`: the directory of the previous save or load.
    """

    line: int = 0
    base: str = ""
    parent: str = ""
    last: tuple[int, int, int] = (-1, -1, -1)

    def go_on(self, step: int, n: int, attempt: str) -> tuple[SavePoint, str, str]:
        """Return the place of the next save, its parent and its base.

        Raises UsageError when there are no more lines.
        """
        if (self.line, step, n) < self.last:
            self.begin_line()
        place, parent = SavePoint(step, n, attempt, self.line), self.parent
        self.last, self.parent = place.position, place.directory
        return place, parent, self.base

    def begin_line(self) -> None:
        """Begin a line at `parent`, so that later saves are newer than all before."""
        self.line = self.last[0] + 1
        self.base = self.parent
        if self.line > LINES_MAX:
            raise UsageError(f"line {self.line}: a directory has at most {LINES_MAX}; use another")

    def loaded(self, place: SavePoint) -> None:
        """Record that the state is that of `place` now; saves after it belong to an ended line."""
        before, self.parent = self.parent, place.directory
        if place.directory != before and self.last >= (0, 0, 0):
            self.begin_line()


def resume_lineage(
    loaded: SavePoint | None, base: str, newest: SavePoint | None, tip: SavePoint | None
) -> Lineage:
    """Return the lineage of a run that loaded `loaded`, of a line that began at `base`.

    `newest`: the newest committed checkpoint, `tip`: the greatest place, committed or not. A run
    that did not load the newest one begins a line.
    """
    parent = loaded.directory if loaded else ""
    places = [place for place in (loaded, newest, tip) if place]
    last = max((place.position for place in places), default=(-1, -1, -1))
    lineage = Lineage(max(last[0], 0), base, parent, last)
    newest_position = newest.position if newest else (-1, -1, -1)
    continues = loaded is not None and loaded.position >= newest_position
    if continues and loaded is not None and loaded.line == lineage.line:
        return lineage
    if places:
        lineage.begin_line()
    return lineage


def ancestry(
    newest_first: Sequence[SavePoint], bases: Mapping[SavePoint, str]
) -> frozenset[SavePoint]:
    """Return the newest place and its predecessors.

    `bases`: bases of the commit records, "" or missing where there is none. Where the records of a
    line are missing, earlier places are unknown and left out.
    """
    if not newest_first:
        return frozenset()
    base_of_line = {place.line: bases.get(place, "") for place in newest_first}
    ancestors, line, bound = set[SavePoint](), newest_first[0].line, newest_first[0].position
    while True:
        ancestors |= {p for p in newest_first if p.line == line and p.position <= bound}
        base = SavePoint.parse(base_of_line.get(line, ""))
        if base is None or base.line >= line:
            return frozenset(ancestors)
        line, bound = base.line, base.position


def line_ends(
    newest_first: Sequence[SavePoint], ancestors: frozenset[SavePoint]
) -> list[SavePoint]:
    """Return the last checkpoint of each abandoned line, the newest line first."""
    ends: dict[int, SavePoint] = {}
    for place in newest_first:
        if place not in ancestors:
            ends.setdefault(place.line, place)
    return list(ends.values())


def pending_commit(manifest: Manifest, origin: dict[str, str], parent: str, base: str) -> Commit:
    """Return a commit record without the time, size and manifests, which the keeper adds."""
    return Commit(
        job=manifest.job,
        place=manifest.place,
        world=manifest.world,
        time_ns=0,
        plan=manifest.plan,
        size_bytes=0,
        manifests=(),
        origin=origin,
        parent=parent,
        base=base,
    )
