"""How much memory is left for this process: the host's, and what its control groups allow.

In a container the limit of a control group is what counts; the kernel shows the host's figures
there all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from outlast.errors import StorageError

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# By version of the interface: where the hierarchy is mounted, its limit, its use, and the line of
# memory.stat that names what the kernel would give back before it kills anybody.
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class Room(NamedTuple):
    """One limit of memory. `used_bytes` leaves out what the kernel would give back."""

    free_bytes: int
    whose: str
    limit_bytes: int
    used_bytes: int


def check_room(wanted_bytes: int, what: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
    """Raises StorageError with the arithmetic when `wanted_bytes` more would break a limit."""
    room = tightest(proc, cgroups)
    if wanted_bytes > room.free_bytes:
        raise StorageError(
            f"no room for {what}: {spelled(wanted_bytes)} are wanted; the memory {room.whose} is"
            f" {spelled(room.limit_bytes)}, of which {spelled(room.used_bytes)} are in use and"
            f" {spelled(room.free_bytes)} are left; nothing was taken; raise the limit, use fewer"
            " arenas, or divide the state among more ranks"
        )


def tightest(proc: Path = PROC, cgroups: Path = CGROUPS) -> Room:
    """The limit that leaves least; a limit that cannot be read is none."""
    found = [*_groups(proc, cgroups)]
    host = dict(line.split()[:2] for line in _lines(proc / "meminfo"))
    if "MemAvailable:" in host:
        free, total = (int(host.get(key, "0")) << 10 for key in ("MemAvailable:", "MemTotal:"))
        found.append(Room(free, "of this host", total, max(0, total - free)))
    nobody = Room(1 << 63, "that nobody limits", 1 << 63, 0)
    return min(found, default=nobody, key=lambda room: room.free_bytes)


def spelled(size_bytes: int) -> str:
    """A size in words: three digits and a decimal unit."""
    size, unit = float(size_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def _groups(proc: Path, cgroups: Path) -> list[Room]:
    """Every control group that this process is in and that limits memory."""
    found = []
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        version, mount = (1, cgroups / "memory") if controllers else (2, cgroups)
        # In a namespace of its own a group's name does not lead anywhere from the mount, and the
        # mount itself is the group; outside, every group above sets a limit of its own.
        group = mount / name.strip("/")
        for path in (group, *group.parents):
            if room := _room(path, version):
                found.append(room)
            if path == mount:
                break
    return found


def _room(group: Path, version: int) -> Room | None:
    limit_name, use_name, given_back = _FILES[version]
    limit, use = _lines(group / limit_name), _lines(group / use_name)
    if not limit or not use or limit[0] == "max":
        return None
    stat = dict(line.split(" ", 1) for line in _lines(group / "memory.stat"))
    limit_bytes = int(limit[0])
    used_bytes = int(use[0]) - int(stat.get(given_back, 0))
    free_bytes = max(0, limit_bytes - used_bytes)
    return Room(free_bytes, f"of the control group {group}", limit_bytes, used_bytes)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
