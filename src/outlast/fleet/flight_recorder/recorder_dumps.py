"""Flight-recorder dumps: their files, ranks and hosts, and their decoding as plain values.

A pickle is never loaded: its opcodes are interpreted one by one (`outlast.checkpoint.interop`) and
no global name is resolved, so that nothing can be called. The expanded size is counted before use:
a few bytes that refer to each other can stand for billions of values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from outlast import pickle_reader
from outlast.errors import CodecError, CorruptionError, StorageError, UsageError

BYTES_MAX = 64 << 20  # torch's default buffer of 2,000 entries is some 2 MB
OPCODES_MAX = 8_000_000
VALUES_MAX = 8_000_000
DEPTH_MAX = 32
MAJOR = "2"  # of the recorder's version: 2.0 came with torch 2.4, 2.10 is torch 2.13's
_PICKLE = b"\x80"
_ALIKE = (
    "profiling_name",
    "state",
    "process_group",
    "input_sizes",
    "output_sizes",
    "input_dtypes",
    "output_dtypes",
    "frames",
)

WholeNumber = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
# Bounded: a pickle can repeat one value a million times.
Sizes = tuple[Annotated[tuple[WholeNumber, ...], Meta(max_length=64)], ...]
Name = Annotated[str, Meta(max_length=256)]


class StackFrame(Struct, frozen=True, gc=False):
    """Frame of the script's stack when a collective was entered. Only pickles have them."""

    name: str = ""
    filename: str = ""
    line: WholeNumber = 0


class RecorderEntry(Struct, frozen=True, gc=False):
    """One record of the ring buffer, as torch writes it."""

    profiling_name: Name
    collective_seq_id: WholeNumber
    record_id: WholeNumber
    state: str
    pg_id: WholeNumber = (
        0  # of the backend in its process: another one is another life of the group
    )
    p2p_seq_id: WholeNumber = 0
    process_group: tuple[str, str] = ("", "")
    is_p2p: bool = False
    retired: bool = False
    time_created_ns: WholeNumber = 0
    time_discovered_started_ns: WholeNumber | None = None
    time_discovered_completed_ns: WholeNumber | None = None
    input_sizes: Sizes = ()
    output_sizes: Sizes = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    frames: tuple[StackFrame, ...] = ()

    @property
    def backend(self) -> str:
        """Backend, nccl or gloo; a group with both numbers the operations of each."""
        return self.profiling_name.partition(":")[0]

    @property
    def kind(self) -> str:
        """Kind of the operation: all_reduce, coalesced, send 0->1."""
        return kind_of(self.profiling_name)


def kind_of(profiling_name: str) -> str:
    """Return all_reduce for nccl:all_reduce."""
    return profiling_name.partition(":")[2] or profiling_name


class GroupConfig(Struct, frozen=True):
    """A process group in a dump. `ranks`: "[0, 1]"; empty from gloo of torch 2.13."""

    name: str = ""
    desc: str = ""
    ranks: str | tuple[WholeNumber, ...] = ()


class RecorderDump(Struct, frozen=True):
    """One rank's dump.

    Entries are sorted by `record_id`, which counts from 0 since recording began: a buffer that
    begins with another one has wrapped around. torch's JSON omits an empty list.
    """

    version: str
    entries: tuple[RecorderEntry, ...] = ()
    pg_config: dict[str, GroupConfig] = {}


def decode_dump(data: bytes, where: str, alike: dict[Any, Any] | None = None) -> RecorderDump:
    """Decode a dump; `where` is for messages.

    `alike`: values of earlier dumps that this one shares. Raises CodecError for other data or for
    more than plain values, and CorruptionError for a truncated or damaged dump.
    """
    if not data.strip():
        raise CorruptionError(f"{where}: the file is empty")
    if len(data) > BYTES_MAX:
        raise CodecError(f"{where}: larger than any dump ({len(data) >> 20} MiB)")
    try:
        dump = _decode(data, where)
    except msgspec.ValidationError as error:
        raise CodecError(f"{where}: no flight-recorder dump ({error})") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CorruptionError(f"{where}: cut off or damaged ({error})") from error
    if dump.version.partition(".")[0] != MAJOR:
        raise CodecError(
            f"{where}: version {dump.version[:20]} of the recorder, of which {MAJOR}.x is read"
        )
    entries = sorted(dump.entries, key=lambda entry: entry.record_id)
    _share(entries, {} if alike is None else alike)
    return msgspec.structs.replace(dump, entries=tuple(entries))


def _share(entries: Iterable[RecorderEntry], alike: dict[Any, Any]) -> None:
    """Replace equal values by one object: a job has few different ones in millions of records.

    The entries are not yet visible elsewhere, so they may be changed.
    """
    for entry in entries:
        for name in _ALIKE:
            value = getattr(entry, name)
            msgspec.structs.force_setattr(entry, name, alike.setdefault(value, value))


def _decode(data: bytes, where: str) -> RecorderDump:
    if data.lstrip()[:1] == b"{":
        return msgspec.json.decode(data, type=RecorderDump, strict=False)
    if data[:1] != _PICKLE:
        raise CodecError(f"{where}: neither JSON nor a pickle")
    value = pickle_reader.read_pickle(data, {}, where, opcodes_max=OPCODES_MAX, keys=(str,))
    if _count_values(value, {}, 0) > VALUES_MAX:
        raise CodecError(f"{where}: its pickle refers to itself more often than data needs")
    return msgspec.convert(value, type=RecorderDump, strict=False)


def _count_values(value: Any, known: dict[int, int], depth: int) -> int:
    """Return the number of values with nothing shared. `known`: counts by object id."""
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return 1
    if depth > DEPTH_MAX:
        return VALUES_MAX + 1
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = VALUES_MAX + 1  # a reference to itself never ends
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    count = 1 + sum(_count_values(item, known, depth + 1) for item in inner)
    known[id(value)] = count
    return count


RANK_MAX = 10_000_000
_RANK = re.compile(r"(?i)rank[-_.]?([0-9]{1,8})(?![0-9])(?:@(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*))?")
_LAST = re.compile(r"(?<![0-9])([0-9]{1,8})$")
_SUFFIXES = {".json", ".pickle", ".pkl", ".bin", ".dump", ".txt", ".trace"}
_STARTS = (b"{", b"\x80")


class NamedDump(NamedTuple):
    """File of a dump, with the rank and host in its name."""

    path: Path
    rank: int | None
    host: str


class UnusedDump(NamedTuple):
    """File that is not used, and the reason. `rank`: the rank in its name."""

    path: str
    rank: int | None
    reason: str


class DumpCollection(NamedTuple):
    """Dumps by rank, and the files not used.

    `second`: ranks with several dumps, of which the longest is used.
    """

    dumps: dict[int, RecorderDump]
    hosts: dict[int, str]
    unread: list[UnusedDump]
    folders: dict[int, Path]
    second: set[int]


def identify_dump(path: Path) -> NamedDump:
    """Return the rank and host in a file name; the host is "" if it has none.

    `rank3`, `nccl_trace_rank_3`, `rank_3@node17.json`, or the number at the end of the name.
    """
    stem = path.name
    while (suffix := Path(stem).suffix.lower()) in _SUFFIXES:
        stem = stem[: -len(suffix)]
    match = _RANK.search(stem) or _LAST.search(stem)
    if match is None or int(match[1]) > RANK_MAX:
        return NamedDump(path, None, "")
    return NamedDump(path, int(match[1]), match.groupdict().get("host") or "")


def read_dumps(
    paths: Sequence[Path], report: Callable[[int, int], None] = lambda *_: None
) -> DumpCollection:
    """Read all dumps in these files and directories.

    Subdirectories are read as well and name the hosts. `report` is called with the number of dumps
    read and their total. Raises UsageError without any file, StorageError if a directory cannot be
    listed, and CorruptionError if no file is a dump.
    """
    dumps = [dump for path in paths for dump in _find_dumps(path)]
    if not dumps:
        raise UsageError(
            f"{', '.join(map(str, paths))}: there is no file; torch writes one dump for each rank"
            " (TORCH_FR_DUMP_TEMP_FILE), and `outlast run` writes them to RUN_DIR/traces"
        )
    all_read = DumpCollection({}, {}, [], {}, set())
    alike: dict[Any, Any] = {}
    for count, dump in enumerate(dumps):
        report(count, len(dumps))
        _add_dump(dump, all_read, alike)
    report(len(dumps), len(dumps))
    if not all_read.dumps:
        reasons = "; ".join(unread.reason for unread in all_read.unread[:5])
        raise CorruptionError(f"none of {len(dumps)} file(s) is a dump that can be read: {reasons}")
    return all_read


def _find_dumps(path: Path) -> Iterator[NamedDump]:
    if path.is_file():
        yield identify_dump(path)
        return
    if not path.is_dir():
        raise UsageError(f"{path}: no such file or directory")
    if (path / "run.json").is_file():  # of `outlast run`
        path = _single_folder(path)
    folders = []
    for entry in _list_directory(path):
        if entry.is_file(follow_symlinks=False):
            yield identify_dump(Path(entry.path))
        elif entry.is_dir(follow_symlinks=False):
            folders.append(entry)
    for folder in folders:
        for entry in _list_directory(Path(folder.path)):
            if entry.is_file(follow_symlinks=False):
                dump = identify_dump(Path(entry.path))
                yield dump if dump.host else dump._replace(host=folder.name)


def _single_folder(run_dir: Path) -> Path:
    """Return the only traces directory of a run. Raises UsageError for none or several."""
    room = run_dir / "traces"
    times = [entry.name for entry in _list_directory(room)] if room.is_dir() else []
    if len(times) == 1:
        return room / times[0]
    if not times:
        raise UsageError(f"{run_dir} is a run directory, and has no traces: nothing hung in it")
    raise UsageError(
        f"{run_dir} is a run directory with traces of {', '.join(times[-8:])}: name one, as in"
        f" {room / times[-1]}"
    )


def _list_directory(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise StorageError(f"{path} cannot be listed: {error.strerror}") from error


def _add_dump(new: NamedDump, into: DumpCollection, alike: dict[Any, Any]) -> None:
    where = str(new.path)
    try:
        data = _bytes(new.path)
        if new.rank is None and data.lstrip()[:1] not in _STARTS:
            into.unread.append(UnusedDump(where, None, f"{where}: neither JSON nor a pickle"))
            return
        dump = decode_dump(data, where, alike)
    except (CodecError, CorruptionError, StorageError) as error:
        into.unread.append(UnusedDump(where, new.rank, str(error)))
        return
    if new.rank is None:
        reason = f"{where}: its name has no rank; call it rank_3.json, or rank_3@node17.json"
        into.unread.append(UnusedDump(where, None, reason))
        return
    known = into.dumps.get(new.rank)
    if known is not None and new.path.parent != into.folders[new.rank]:
        raise UsageError(
            f"rank {new.rank} has a dump in {into.folders[new.rank]} and one in {new.path.parent}:"
            " name the directory of one trace"
        )
    if known is not None:
        into.second.add(new.rank)
    if known is None or _last_record(dump) > _last_record(known):
        into.dumps[new.rank] = dump
        into.folders[new.rank] = new.path.parent
    if new.host:
        into.hosts[new.rank] = new.host


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(BYTES_MAX + 1)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error


def _last_record(dump: RecorderDump) -> tuple[int, bool]:
    """Return a sort key: the last record, then whether it has stacks."""
    if not dump.entries:
        return -1, False
    return dump.entries[-1].record_id, bool(dump.entries[-1].frames)


def read_hosts(path: Path) -> Mapping[int, str]:
    """Read a file of `RANK HOST` lines. Raises UsageError, which names an invalid line."""
    hosts: dict[int, str] = {}
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"--hosts {path}: {error.strerror}") from error
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not words[0].isdecimal() or len(words[0]) > 8:
            raise UsageError(f"--hosts {path}, line {number}: not a rank and a host: {line[:80]!r}")
        hosts[int(words[0])] = words[1]
    return hosts
