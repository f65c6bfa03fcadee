"""Which files are dumps, and of which rank and host: their names say it, they themselves do not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outlast.errors import CodecError, CorruptionError, StorageError, UsageError
from outlast.fleet.trace.dumps import BYTES_MAX, Dump, decode

RANK_MAX = 10_000_000
_RANK = re.compile(r"(?i)rank[-_.]?([0-9]{1,8})(?![0-9])(?:@(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*))?")
_LAST = re.compile(r"(?<![0-9])([0-9]{1,8})$")
_SUFFIXES = {".json", ".pickle", ".pkl", ".bin", ".dump", ".txt", ".trace"}
_STARTS = (b"{", b"\x80")


class Named(NamedTuple):
    path: Path
    rank: int | None
    host: str


class Unread(NamedTuple):
    """A file that is not used, and why. `rank`: whose it would have been."""

    path: str
    rank: int | None
    reason: str


class Read(NamedTuple):
    """All dumps by rank, and what else was found. `second`: ranks with several dumps, of which the
    one that goes furthest is taken."""

    dumps: dict[int, Dump]
    hosts: dict[int, str]
    unread: list[Unread]
    folders: dict[int, Path]
    second: set[int]


def named(path: Path) -> Named:
    """Rank and host as the name says them: `rank3`, `nccl_trace_rank_3`, `rank_3@node17.json`; or
    the number at the end of the name. Without a host in the name there is none."""
    stem = path.name
    while (suffix := Path(stem).suffix.lower()) in _SUFFIXES:
        stem = stem[: -len(suffix)]
    match = _RANK.search(stem) or _LAST.search(stem)
    if match is None or int(match[1]) > RANK_MAX:
        return Named(path, None, "")
    return Named(path, int(match[1]), match.groupdict().get("host") or "")


def read(paths: Sequence[Path], tell: Callable[[int, int], None] = lambda *_: None) -> Read:
    """All dumps in these directories (and the directories in them, which then name the hosts) and
    files. `tell` hears how many are read, and of how many.

    Raises UsageError where there is nothing to read, StorageError where a directory cannot be
    listed, and CorruptionError where nothing of what is there is a dump.
    """
    found = [one for path in paths for one in _found(path)]
    if not found:
        raise UsageError(
            f"{', '.join(map(str, paths))}: there is no file; torch writes one dump for each rank"
            " (TORCH_FR_DUMP_TEMP_FILE), and `outlast run` writes them to RUN_DIR/traces"
        )
    all_read = Read({}, {}, [], {}, set())
    alike: dict[Any, Any] = {}
    for count, one in enumerate(found):
        tell(count, len(found))
        _take(one, all_read, alike)
    tell(len(found), len(found))
    if not all_read.dumps:
        reasons = "; ".join(unread.reason for unread in all_read.unread[:5])
        raise CorruptionError(f"none of {len(found)} file(s) is a dump that can be read: {reasons}")
    return all_read


def _found(path: Path) -> Iterator[Named]:
    if path.is_file():
        yield named(path)
        return
    if not path.is_dir():
        raise UsageError(f"{path}: no such file or directory")
    if (path / "run.json").is_file():  # of `outlast run`
        path = _only(path)
    folders = []
    for entry in _listed(path):
        if entry.is_file(follow_symlinks=False):
            yield named(Path(entry.path))
        elif entry.is_dir(follow_symlinks=False):
            folders.append(entry)
    for folder in folders:
        for entry in _listed(Path(folder.path)):
            if entry.is_file(follow_symlinks=False):
                one = named(Path(entry.path))
                yield one if one.host else one._replace(host=folder.name)


def _only(run_dir: Path) -> Path:
    """The traces of a run in which something hung once. Raises UsageError for another one."""
    room = run_dir / "traces"
    times = [entry.name for entry in _listed(room)] if room.is_dir() else []
    if len(times) == 1:
        return room / times[0]
    if not times:
        raise UsageError(f"{run_dir} is a run directory, and has no traces: nothing hung in it")
    raise UsageError(
        f"{run_dir} is a run directory with traces of {', '.join(times[-8:])}: name one, as in"
        f" {room / times[-1]}"
    )


def _listed(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise StorageError(f"{path} cannot be listed: {error.strerror}") from error


def _take(one: Named, into: Read, alike: dict[Any, Any]) -> None:
    where = str(one.path)
    try:
        data = _bytes(one.path)
        if one.rank is None and data.lstrip()[:1] not in _STARTS:
            into.unread.append(Unread(where, None, f"{where}: neither JSON nor a pickle"))
            return
        dump = decode(data, where, alike)
    except (CodecError, CorruptionError, StorageError) as error:
        into.unread.append(Unread(where, one.rank, str(error)))
        return
    if one.rank is None:
        reason = f"{where}: its name has no rank; call it rank_3.json, or rank_3@node17.json"
        into.unread.append(Unread(where, None, reason))
        return
    known = into.dumps.get(one.rank)
    if known is not None and one.path.parent != into.folders[one.rank]:
        raise UsageError(
            f"rank {one.rank} has a dump in {into.folders[one.rank]} and one in {one.path.parent}:"
            " are they of one moment? Name the directory of one"
        )
    if known is not None:
        into.second.add(one.rank)
    if known is None or _reach(dump) > _reach(known):
        into.dumps[one.rank] = dump
        into.folders[one.rank] = one.path.parent
    if one.host:
        into.hosts[one.rank] = one.host


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(BYTES_MAX + 1)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error


def _reach(dump: Dump) -> tuple[int, bool]:
    """How far it goes; of two that go as far, the one with stacks says more."""
    if not dump.entries:
        return -1, False
    return dump.entries[-1].record_id, bool(dump.entries[-1].frames)


def hosts_of(path: Path) -> Mapping[int, str]:
    """A file of `RANK HOST` lines. Raises UsageError, with the line that is none."""
    found: dict[int, str] = {}
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
        found[int(words[0])] = words[1]
    return found
