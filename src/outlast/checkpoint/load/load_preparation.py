"""Preparation of a load: candidates, newest first, and agreement of ranks on a relay."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

import msgspec

from outlast.checkpoint.format.manifests import Manifest, SavePoint, manifest_name, unseal
from outlast.checkpoint.load.chunk_relay import ChunkRelay
from outlast.checkpoint.stores.catalog import checkpoint_places, open_checkpoint, uncommitted
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import StoreSource
from outlast.errors import CorruptionError, StalledError, StorageError, UsageError

if TYPE_CHECKING:
    from outlast.checkpoint.rank_group import RankGroup
    from outlast.checkpoint.stores.catalog import Checkpoint

OLDER = (
    "it is not known to be damaged, and may be read again later; say on_unreadable='older' to begin"
    " from an older one"
)


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint with valid records, in `sources[at]`; or the reason why there is none.

    `spoilt`: the first source has it as well, and damaged. `notes`: checkpoints passed over.
    `begun`: newer saves without a commit record, in words; `lost`: whether one of them has all its
    parts.
    """

    directory: str = ""
    at: int = 0
    spoilt: bool = False
    notes: tuple[str, ...] = ()
    begun: str = ""
    lost: bool = False
    unusable: str = ""
    unreachable: str = ""


def candidates(
    sources: Sequence[StoreSource], job: str, step: int | None, *, older: bool = False
) -> Iterator[Candidate]:
    """Yield the checkpoints of `job` ("": any) and `step` (None: any), newest first.

    Each is in the first of `sources` that has it; the last candidate has no directory. The first
    source must answer; where another does not, that is a note, unless nothing is found elsewhere:
    then it may have the checkpoint. An undamaged checkpoint that no source can read ends it as
    well, unless `older` ones are acceptable.
    """
    try:
        there, silent = _listed(sources)
        newest = next(iter(there), None)
        begun, lost = _begun(sources[0], newest) if step is None else ("", False)
    except StorageError as error:
        yield Candidate(unreachable=str(error))
        return
    known = [(place, positions) for place, positions in there.items() if step in (None, place.step)]
    if step is not None and not known and not silent:
        steps = ", ".join(map(str, sorted({place.step for place in there}))) or "none"
        yield Candidate(unusable=f"{sources[0].where} has no checkpoint of step {step}; it has"
                        f" {steps}")  # fmt: skip
        return
    notes, whole = list(silent), False
    for place, positions in known:
        unread = ""
        for at in positions:
            try:
                checkpoint = open_checkpoint(sources[at], place)
                checkpoint.check()
            except StalledError as error:
                if at == 0:
                    yield Candidate(notes=tuple(notes), unreachable=str(error))
                    return
                notes.append(str(error))
                continue
            except (CorruptionError, StorageError) as error:
                notes.append(f"checkpoint {place.directory} is passed over: {error}")
                unread = unread or ("" if isinstance(error, CorruptionError) else str(error))
                continue
            if job and checkpoint.job != job:
                yield Candidate(
                    unusable=f"{checkpoint.where} is of job {checkpoint.job!r}, and this is"
                    f" {job!r}; nothing was touched; use a directory of its own"
                )
                return
            whole = True
            yield Candidate(place.directory, at, at > positions[0] == 0, tuple(notes), begun, lost)
            notes.clear()
        if unread and not older:
            yield Candidate(notes=tuple(notes), unreachable=f"{unread}; {OLDER}")
            return
    if silent and not whole:
        yield Candidate(unreachable="; ".join(notes))
    else:
        yield Candidate(notes=tuple(notes), begun=begun, lost=lost)


def _begun(source: StoreSource, newest: SavePoint | None) -> tuple[str, bool]:
    """Return the saves newer than `newest` without a commit record, in words.

    With it, whether only the record is missing. Raises StorageError.
    """
    bound = newest.position if newest else (-1, -1, -1)
    found = [place for place in uncommitted(source) if place.position > bound]
    if not found:
        return "", False
    lost = [place for place in found if _has_all_parts(source, place)]
    first = (lost or found)[0].directory
    more = f" (and {len(found) - 1} more)" if found[1:] else ""
    why = (
        "has all its parts and no commit record: it lost it, or was not committed in time"
        if lost
        else "has no commit record: it is being written, or was never completed"
    )
    return f"{first}{more} in {source.where} {why}", bool(lost)


def _has_all_parts(source: StoreSource, place: SavePoint) -> bool:
    try:
        files = source.files(place.directory)
        data = source.get(place.directory, manifest_name(0)) if manifest_name(0) in files else b""
        world = unseal(data, Manifest, place.directory).world if data else 0
    except (CorruptionError, StorageError):
        return False
    return world > 0 and all(manifest_name(rank) in files for rank in range(world))


def _listed(sources: Sequence[StoreSource]) -> tuple[dict[SavePoint, list[int]], list[str]]:
    """Return the sources of each checkpoint, newest first, and errors of silent sources.

    Raises StorageError for the first source.
    """
    positions: dict[SavePoint, list[int]] = {}
    silent: list[str] = []
    for at, source in enumerate(sources):
        try:
            places = checkpoint_places(source)
        except StorageError as error:
            if at == 0:
                raise
            silent.append(str(error))
            continue
        for place in places:
            positions.setdefault(place, []).append(at)
    newest_first = sorted(positions, key=lambda place: place.position, reverse=True)
    return {place: positions[place] for place in newest_first}, silent


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")  # blanks and backslashes are written so
_NETWORKED = {
    "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "panfs", "pvfs2", "smb3",
    "wekafs",
}  # fmt: skip


class _RankStatement(msgspec.Struct, frozen=True, array_like=True):
    """One rank's view of a load.

    `commit`: digest of the commit record that it reads; empty where it cannot. `remote`: whether
    the source is beyond a network.
    """

    share: bool | None
    host: str
    commit: str
    remote: bool


def agreed_relay(
    ranks: RankGroup, checkpoint: Checkpoint | None, share: bool | None
) -> ChunkRelay | None:
    """Return the relay that all ranks read a checkpoint through; None where each reads alone.

    All ranks call it; `checkpoint` is None on one that cannot read its records. `share`: whether to
    read together; None: if ranks run on several hosts, or the checkpoint is beyond a network.
    Raises UsageError on all ranks where `share` differs.
    """
    if not ranks.can_relay:
        return None
    mine = _RankStatement(
        share,
        _host(),
        checkpoint.commit.digest if checkpoint else "",
        checkpoint is not None and _is_remote(checkpoint.store),
    )
    answers = ranks.exchange(msgspec.msgpack.encode(mine))
    stands = [msgspec.msgpack.decode(answer, type=_RankStatement) for answer in answers]
    if any(each.share != stands[0].share for each in stands):
        values = ", ".join(f"rank {rank}: {each.share}" for rank, each in enumerate(stands))
        raise UsageError(
            f"share differs between ranks ({values}); nothing was loaded; give all the same"
        )
    hosts = [each.host for each in stands]
    if share is None:
        share = len(set(hosts)) > 1 or any(each.remote for each in stands)
    if not share or checkpoint is None or len({each.commit for each in stands}) > 1:
        return None
    chain = sorted(range(ranks.world), key=lambda rank: (hosts.index(hosts[rank]), rank))
    return ChunkRelay(ranks, chain, checkpoint)


def _host() -> str:
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return gethostname()


def _is_remote(source: StoreSource) -> bool:
    """Return whether the source is beyond a network, as far as is known locally."""
    if not isinstance(source, Folder):
        return True
    with suppress(OSError):
        return is_networked(str(source.root.absolute()), _MOUNTS.read_text(errors="replace"))
    return False


def is_networked(path: str, mountinfo: str) -> bool:
    """Return whether an absolute path lies in a network or user-space file system.

    `mountinfo`: as in proc_pid_mountinfo(5); of several mounts at one place the last one counts.
    """
    longest, kind = "", ""
    for line in mountinfo.splitlines():
        mount, _, rest = line.partition(" - ")
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), mount.split(" ")[4])
        if len(point) >= len(longest) and (path + "/").startswith(point.rstrip("/") + "/"):
            longest, kind = point, rest.split(" ")[0]
    return kind in _NETWORKED or (kind.startswith("fuse.") and kind != "fuse.overlayfs")
