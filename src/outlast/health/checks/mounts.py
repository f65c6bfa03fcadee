"""File systems: mounted, answering, writable, not full. One probe for each, as one may hang."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outlast.health.contract import About, Check, Probe, Said, Sample
from outlast.health.settings import Mount as Expected
from outlast.health.settings import Settings

SERVERS = (
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "cifs", "smb3", "9p", "glusterfs",
    "pvfs2", "afs", "fuse.",
)  # fmt: skip
LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay")
IN_MEMORY = ("/dev/shm", "/tmp")  # noqa: S108 - what jobs share there must fit


class Mounted(Sample, frozen=True):
    """One place. `type` is empty where nothing is mounted there; `trouble`: what the kernel
    answered instead of figures."""

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


def of_servers(type_: str) -> bool:
    return type_.startswith(SERVERS)


def judge(sample: Mounted, about: About) -> Iterator[Said]:
    expected = about.settings.mounts.expected.get(sample.path)
    wanted = expected or Expected(writable=False)
    at = sample.path
    if not sample.type:
        yield Said("now", "nothing is mounted there", at)
        return
    if sample.trouble:
        yield Said("unknown" if sample.denied else "now", sample.trouble, at)
        return
    found: list[Said] = []
    if wanted.type and sample.type != wanted.type:
        found.append(Said("drain", f"is {sample.type}, and should be {wanted.type}", at))
    if wanted.writable and "ro" in sample.options:
        found.append(Said("now", f"{sample.source} is read-only", at))
    found += _full(sample, wanted)
    yield from found
    if not found:
        size, free = sample.size_bytes / 1e9, sample.free_bytes / 1e9
        yield Said("healthy", f"{sample.type}, {free:.0f} of {size:.0f} GB free", at)


def _full(sample: Mounted, wanted: Expected) -> Iterator[Said]:
    """A server's that is full is so on every node: to drain one mends nothing."""
    severity = "warn" if of_servers(sample.type) else "drain"
    symptom = "filesystem" if of_servers(sample.type) else "disk"
    for what, size, free, most in (
        ("full", sample.size_bytes, sample.free_bytes, wanted.full_percent),
        ("out of inodes", sample.inodes, sample.inodes_free, wanted.inodes_percent),
    ):
        used = 100 * (1 - free / size) if size > 0 else 0.0
        if used >= most:
            text = f"{used:.1f} % {what}, at most {most:g} % is expected"
            yield Said(severity, text, sample.path, symptom=symptom)


def _probes(settings: Settings) -> Iterable[Probe[Mounted]]:
    from outlast.health.probes.mounts import probes

    return probes(settings)


CHECK = Check("mount", "filesystem", Mounted, _probes, judge)
