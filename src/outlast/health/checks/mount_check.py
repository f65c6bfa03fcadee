"""Check of file systems: mounted, responding, writable, not full."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from outlast.health.check_contract import Check, JudgeContext, Observation, Probe, Sample
from outlast.health.check_settings import CheckSettings
from outlast.health.check_settings import MountPointSettings as Expected

SERVERS = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "wekafs",
    "cifs",
    "smb3",
    "9p",
    "glusterfs",
    "pvfs2",
    "afs",
    "fuse.",
)
LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay")
IN_MEMORY = ("/dev/shm", "/tmp")  # noqa: S108 - what jobs share there must fit


class MountSample(Sample, frozen=True):
    """State of one mount point.

    `type` is empty if nothing is mounted there; `trouble`: the kernel's error if the file system
    did not respond.
    """

    path: str
    source: str = ""
    type: str = ""
    options: tuple[str, ...] = ()
    size_bytes: int = 0
    free_bytes: int = 0
    inodes: int = 0
    inodes_free: int = 0
    trouble: str = ""
    denied: bool = False


def is_network_type(type_: str) -> bool:
    """Return whether a file system type is served over a network."""
    return type_.startswith(SERVERS)


def judge(sample: MountSample, about: JudgeContext) -> Iterator[Observation]:
    """Judge whether a file system is mounted, responds, is writable and not full."""
    expected = about.settings.mounts.expected.get(sample.path)
    wanted = expected or Expected(writable=False)
    at = sample.path
    if not sample.type:
        yield Observation("now", "nothing is mounted there", at)
        return
    if sample.trouble:
        yield Observation("unknown" if sample.denied else "now", sample.trouble, at)
        return
    found: list[Observation] = []
    if wanted.type and sample.type != wanted.type:
        found.append(Observation("drain", f"is {sample.type}; {wanted.type} is expected", at))
    if wanted.writable and "ro" in sample.options:
        found.append(Observation("now", f"{sample.source} is read-only", at))
    found += _usage(sample, wanted)
    yield from found
    if not found:
        size = sample.size_bytes / 1e9
        free = sample.free_bytes / 1e9
        yield Observation("healthy", f"{sample.type}, {free:.0f} of {size:.0f} GB free", at)


def _usage(sample: MountSample, wanted: Expected) -> Iterator[Observation]:
    """Judge used space and inodes.

    A full network file system is full on every node, so it only warns: a drain repairs nothing.
    """
    severity = "warn" if is_network_type(sample.type) else "drain"
    symptom = "filesystem" if is_network_type(sample.type) else "disk"
    for what, size, free, most in (
        ("full", sample.size_bytes, sample.free_bytes, wanted.full_percent),
        ("out of inodes", sample.inodes, sample.inodes_free, wanted.inodes_percent),
    ):
        used = 100 * (1 - free / size) if size > 0 else 0.0
        if used >= most:
            text = f"{used:.1f} % {what}, at most {most:g} % is expected"
            yield Observation(severity, text, sample.path, symptom=symptom)


def _probes(settings: CheckSettings) -> Iterable[Probe[MountSample]]:

    return probes(settings)


CHECK = Check("mount", "filesystem", MountSample, _probes, judge)


TABLE = Path("/proc/self/mounts")
PROBES_MAX = 256


class MountLine(NamedTuple):
    """Line of /proc/self/mounts."""

    source: str
    path: str
    type: str
    options: tuple[str, ...]


def parse_mounts(text: str) -> list[MountLine]:
    r"""Parse /proc/self/mounts, which writes blanks as \040."""
    found: list[MountLine] = []
    for line in text.splitlines():
        words = [re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), w) for w in line.split(" ")]
        if len(words) >= 4:
            found.append(MountLine(words[0], words[1], words[2], tuple(words[3].split(","))))
    return found


def probes(settings: CheckSettings) -> Iterable[Probe[MountSample]]:
    """Yield a probe per expected mount point, and per network and disk file system.

    Each source is probed once, at its shortest path: containers bind parts of one to many places.
    """
    # Reading the table does not contact a file server.
    lines = parse_mounts(TABLE.read_text("utf-8", "surrogateescape"))
    by_source: dict[str, MountLine] = {}
    for line in sorted(lines, key=lambda line: len(line.path)):
        if is_network_type(line.type) or line.type in LOCAL:
            by_source.setdefault(line.source, line)
        elif line.type == "tmpfs" and line.path in IN_MEMORY:
            by_source[line.path] = line
    wanted = settings.mounts
    paths = dict.fromkeys([*wanted.expected, *(line.path for line in by_source.values())])
    selected = [path for path in paths if path not in wanted.ignore][:PROBES_MAX]
    for path in selected:
        yield Probe(
            _printable(path), partial(take, path, _top_mount(lines, path)), wanted.deadline_s
        )


def _printable(name: str) -> str:
    """Return a mount's name as valid UTF-8; undecodable bytes are escaped."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _top_mount(lines: list[MountLine], path: str) -> MountLine | None:
    """Return the last mount at a path: it covers the earlier ones."""
    place = path.rstrip("/") or "/"
    return next((line for line in reversed(lines) if line.path == place), None)


def take(path: str, line: MountLine | None) -> MountSample:
    """Query a file system's figures, which may be cached, and then its root directory."""
    if line is None:
        return MountSample(path=_printable(path))
    try:
        figures = os.statvfs(path)
        Path(path).stat()
        if line.type == "autofs":  # a query mounts it
            line = (
                _top_mount(parse_mounts(TABLE.read_text("utf-8", "surrogateescape")), path) or line
            )
    except OSError as error:
        return MountSample(
            path=_printable(path),
            source=_printable(line.source),
            type=line.type,
            options=tuple(map(_printable, line.options)),
            trouble=f"{error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})",
            denied=error.errno in {errno.EACCES, errno.EPERM},
        )
    return MountSample(
        path=_printable(path),
        source=_printable(line.source),
        type=line.type,
        options=tuple(map(_printable, line.options)),
        size_bytes=figures.f_frsize * (figures.f_blocks - figures.f_bfree + figures.f_bavail),
        free_bytes=figures.f_frsize * figures.f_bavail,
        inodes=figures.f_files,
        inodes_free=figures.f_favail,
    )
