"""What is mounted, and whether it answers."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from outlast.health.checks.mounts import IN_MEMORY, LOCAL, Mounted, of_servers
from outlast.health.contract import Probe
from outlast.health.settings import Settings

TABLE = Path("/proc/self/mounts")
PROBES_MAX = 256


class Line(NamedTuple):
    source: str
    path: str
    type: str
    options: tuple[str, ...]


def table(text: str) -> list[Line]:
    """/proc/self/mounts, whose blanks are written as \\040."""
    found: list[Line] = []
    for line in text.splitlines():
        words = [re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), w) for w in line.split(" ")]
        if len(words) >= 4:
            found.append(Line(words[0], words[1], words[2], tuple(words[3].split(","))))
    return found


def probes(settings: Settings) -> Iterable[Probe[Mounted]]:
    """Of what is expected, and of the file systems of servers and disks: each source once, where
    its shortest path is, as containers show parts of one in many places."""
    # To read the table asks no server.
    lines = table(TABLE.read_text("utf-8", "surrogateescape"))
    by_source: dict[str, Line] = {}
    for line in sorted(lines, key=lambda line: len(line.path)):
        if of_servers(line.type) or line.type in LOCAL:
            by_source.setdefault(line.source, line)
        elif line.type == "tmpfs" and line.path in IN_MEMORY:
            by_source[line.path] = line
    wanted = settings.mounts
    paths = dict.fromkeys([*wanted.expected, *(line.path for line in by_source.values())])
    kept = [path for path in paths if path not in wanted.ignore][:PROBES_MAX]
    for path in kept:
        yield Probe(_shown(path), partial(take, path, _newest(lines, path)), wanted.deadline_s)


def _shown(name: str) -> str:
    """As text: who may mount chooses names, also of bytes that are none."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _newest(lines: list[Line], path: str) -> Line | None:
    """The one that was mounted last covers the others."""
    place = path.rstrip("/") or "/"
    return next((line for line in reversed(lines) if line.path == place), None)


def take(path: str, line: Line | None) -> Mounted:
    """Asks the file system twice: for its figures, which may be cached, and for its root."""
    if line is None:
        return Mounted(path=_shown(path))
    try:
        figures = os.statvfs(path)
        Path(path).stat()
        if line.type == "autofs":  # it is mounted by being asked
            line = _newest(table(TABLE.read_text("utf-8", "surrogateescape")), path) or line
    except OSError as error:
        return Mounted(
            path=_shown(path), source=_shown(line.source), type=line.type,
            options=tuple(map(_shown, line.options)),
            trouble=f"{error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})",
            denied=error.errno in {errno.EACCES, errno.EPERM},
        )  # fmt: skip
    return Mounted(
        path=_shown(path), source=_shown(line.source), type=line.type,
        options=tuple(map(_shown, line.options)),
        size_bytes=figures.f_frsize * (figures.f_blocks - figures.f_bfree + figures.f_bavail),
        free_bytes=figures.f_frsize * figures.f_bavail,
        inodes=figures.f_files, inodes_free=figures.f_favail,
    )  # fmt: skip
