"""The ranks' agreement whether they read a checkpoint together, or each alone."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

import msgspec

from outlast.checkpoint.folder import Folder
from outlast.checkpoint.relay import Relay
from outlast.errors import UsageError

if TYPE_CHECKING:
    from outlast.checkpoint.catalog import Checkpoint
    from outlast.checkpoint.ranks import Ranks
    from outlast.checkpoint.storage import Source

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")  # blanks and backslashes are written so
_NETWORKED = {
    "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "panfs", "pvfs2", "smb3",
    "wekafs",
}  # fmt: skip


class _Stand(msgspec.Struct, frozen=True, array_like=True):
    """One rank's view of a load. `commit`: digest of the commit record that it reads; empty where
    it cannot. `remote`: whether it lies beyond a network."""

    share: bool | None
    host: str
    commit: str
    remote: bool


def agreed_relay(ranks: Ranks, checkpoint: Checkpoint | None, share: bool | None) -> Relay | None:
    """Return the relay that all ranks read a checkpoint through; None where each reads alone.

    All ranks call it; `checkpoint` is None on one that cannot read its records. `share`: whether to
    read together; None: where ranks lie on several hosts, or the checkpoint beyond a network.
    Raises UsageError on all ranks where they were not asked for the same.
    """
    if not ranks.can_relay:
        return None
    mine = _Stand(
        share,
        _host(),
        checkpoint.commit.digest if checkpoint else "",
        checkpoint is not None and _is_remote(checkpoint.store),
    )
    answers = ranks.exchange(msgspec.msgpack.encode(mine))
    stands = [msgspec.msgpack.decode(answer, type=_Stand) for answer in answers]
    if any(each.share != stands[0].share for each in stands):
        said = ", ".join(f"rank {rank}: {each.share}" for rank, each in enumerate(stands))
        raise UsageError(
            f"share differs between ranks ({said}); nothing was loaded; give all the same"
        )
    hosts = [each.host for each in stands]
    if share is None:
        share = len(set(hosts)) > 1 or any(each.remote for each in stands)
    if not share or checkpoint is None or len({each.commit for each in stands}) > 1:
        return None
    chain = sorted(range(ranks.world), key=lambda rank: (hosts.index(hosts[rank]), rank))
    return Relay(ranks, chain, checkpoint)


def _host() -> str:
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return gethostname()


def _is_remote(source: Source) -> bool:
    """Return whether what is read comes over a network, as far as is known without asking it."""
    if not isinstance(source, Folder):
        return True
    with suppress(OSError):
        return is_networked(str(source.root.absolute()), _MOUNTS.read_text(errors="replace"))
    return False


def is_networked(path: str, mountinfo: str) -> bool:
    """Return whether an absolute path lies in a file system of a network, or in user space.

    `mountinfo`: as in proc_pid_mountinfo(5); of several mounts at one place the last one counts.
    """
    longest, kind = "", ""
    for line in mountinfo.splitlines():
        mount, _, rest = line.partition(" - ")
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), mount.split(" ")[4])
        if len(point) >= len(longest) and (path + "/").startswith(point.rstrip("/") + "/"):
            longest, kind = point, rest.split(" ")[0]
    return kind in _NETWORKED or (kind.startswith("fuse.") and kind != "fuse.overlayfs")
