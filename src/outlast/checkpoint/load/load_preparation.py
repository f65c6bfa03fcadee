"""Preparation of a load: candidates, newest first; agreement on a relay; translation of names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from outlast.checkpoint.format.manifests import Manifest, SavePoint, manifest_name, unseal
from outlast.checkpoint.load.chunk_relay import ChunkRelay
from outlast.checkpoint.load.optimizer_fitting import by_parameter
from outlast.checkpoint.load.state_fitting import SavedState
from outlast.checkpoint.script_state import ScriptState
from outlast.checkpoint.state_content import (
    Skeleton,
    full_names,
    is_within,
    matched_name,
    parameter_names,
    parameter_owners,
)
from outlast.checkpoint.stores.catalog import checkpoint_places, open_checkpoint, uncommitted
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import StoreSource
from outlast.errors import CorruptionError, StalledError, StorageError, UsageError

if TYPE_CHECKING:
    from outlast.checkpoint.rank_group import RankGroup
    from outlast.checkpoint.stores.catalog import Checkpoint

OLDER = (
    "it may be undamaged, and readable later; pass on_unreadable='older' to begin from an older one"
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
        there, silent = _list_sources(sources)
        newest = next(iter(there), None)
        begun, lost = _uncommitted_saves(sources[0], newest) if step is None else ("", False)
    except StorageError as error:
        yield Candidate(unreachable=str(error))
        return
    saves = [(place, positions) for place, positions in there.items() if step in (None, place.step)]
    if step is not None and not saves and not silent:
        steps = ", ".join(map(str, sorted({place.step for place in there}))) or "none"
        yield Candidate(
            unusable=f"{sources[0].where} has no checkpoint of step {step}; it has {steps}"
        )
        return
    notes, whole = list(silent), False
    for place, positions in saves:
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
                notes.append(f"checkpoint {place.directory} is skipped: {error}")
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


def _uncommitted_saves(source: StoreSource, newest: SavePoint | None) -> tuple[str, bool]:
    """Return the saves newer than `newest` without a commit record, in words.

    With it, whether only the record is missing. Raises StorageError.
    """
    bound = newest.position if newest else (-1, -1, -1)
    newer = [place for place in uncommitted(source) if place.position > bound]
    if not newer:
        return "", False
    lost = [place for place in newer if _has_all_parts(source, place)]
    first = (lost or newer)[0].directory
    more = f" (and {len(newer) - 1} more)" if newer[1:] else ""
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


def _list_sources(sources: Sequence[StoreSource]) -> tuple[dict[SavePoint, list[int]], list[str]]:
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
_OCTAL = re.compile(r"\\([0-7]{3})")  # escapes of blanks and backslashes
_NETWORKED = {
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "panfs",
    "pvfs2",
    "smb3",
    "wekafs",
}


class LoadRequest(msgspec.Struct, frozen=True, array_like=True):
    """Arguments of one rank's load."""

    step: int | None
    strict: bool
    cast: bool
    skip: tuple[str, ...]
    rename: dict[str, str]


def check_alike(requests: Sequence[LoadRequest]) -> None:
    """Raise UsageError unless ranks requested the same load; skipped names may differ."""
    for what in ("step", "strict", "cast", "rename"):
        per_rank = [getattr(each, what) for each in requests]
        if any(each != per_rank[0] for each in per_rank):
            values = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(per_rank))
            raise UsageError(
                f"{what} differs between ranks ({values}); nothing was loaded; give all the same"
            )


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
    """Return whether the source is on another host, by its type and the mount table."""
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
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), mount.split(" ")[4])
        if len(point) >= len(longest) and (path + "/").startswith(point.rstrip("/") + "/"):
            longest, kind = point, rest.split(" ")[0]
    return kind in _NETWORKED or (kind.startswith("fuse.") and kind != "fuse.overlayfs")


class RenamedCheckpoint(NamedTuple):
    """A checkpoint under the state's names. `origin`: the original names of tensors, by these."""

    saved: SavedState
    origin: Mapping[str, str]


def rename_checkpoint(
    saved: SavedState, rename: Mapping[str, str], state: ScriptState
) -> RenamedCheckpoint:
    """Rename tensors and entries, and the optimizer state of renamed parameters.

    Raises UsageError for names that the checkpoint lacks, two that become one, and an optimizer
    whose parameters are ambiguous.
    """
    names = [*saved.shared["kinds"], *saved.tensors, *saved.rest]
    if not rename:
        return RenamedCheckpoint(saved, {name: name for name in saved.tensors})
    unknown = [old for old in rename if not any(is_within(name, old) for name in names)]
    if unknown:
        raise UsageError(
            f"rename: the checkpoint has no {', '.join(unknown)}; nothing was touched;"
            " `outlast ckpt show` lists its names"
        )
    new = {name: _new_name(name, rename) for name in names}
    for name in saved.shared.get("optimizers", {}):
        new |= _optimizer_names(saved, name, rename, state)
    for names in (saved.shared["kinds"], saved.tensors, saved.rest):
        _check_unique(names, new)

    def skeleton(each: Skeleton) -> Skeleton:
        return {**each, "holes": {new[name]: hole for name, hole in each["holes"].items()}}

    def optimizer(name: str, each: Mapping[str, Any]) -> dict[str, Any]:
        calls = {
            called: new.get(f"{name} calls {called}", called)
            for group in each["parameters"]
            for called in group
        }
        parameters = [[calls[called] for called in group] for group in each["parameters"]]
        groups, state = skeleton(each["groups"]), skeleton(each["state"])
        return {"groups": groups, "parameters": parameters, "state": state}

    shared = saved.shared
    return RenamedCheckpoint(
        SavedState(
            {new[name]: tensor for name, tensor in saved.tensors.items()},
            {
                "kinds": {new[name]: kind for name, kind in shared["kinds"].items()},
                "classes": {new[name]: kind for name, kind in shared["classes"].items()},
                "optimizers": {
                    new[name]: optimizer(name, each)
                    for name, each in shared.get("optimizers", {}).items()
                },
                "objects": {
                    new[n]: skeleton(each) for n, each in shared.get("objects", {}).items()
                },
                "values": {new[n]: skeleton(each) for n, each in shared.get("values", {}).items()},
            },
            {new[name]: skeleton(each) for name, each in saved.rest.items()},
        ),
        {new[name]: name for name in saved.tensors},
    )


def _new_name(name: str, rename: Mapping[str, str]) -> str:
    """Return the new name, by the longest old name that contains it."""
    prefix = max((old for old in rename if is_within(name, old)), key=len, default=None)
    return name if prefix is None else rename[prefix] + name[len(prefix) :]


def _optimizer_names(
    saved: SavedState, optimizer: str, rename: Mapping[str, str], state: ScriptState
) -> dict[str, str]:
    """Return new names of the state of renamed parameters, and of the parameters themselves."""
    calls = matched_name(saved.shared, optimizer, saved.tensors)
    owners = parameter_owners(saved.shared, optimizer, saved.tensors)
    if not owners:
        modules = [n for n, kind in saved.shared["kinds"].items() if kind == "module"]
        candidates = {f"{module}.{called}" for module in modules for called in calls}
        if any(_new_name(name, rename) != name for name in candidates & saved.tensors.keys()):
            raise UsageError(
                f"rename: several modules have parameters of the names that optimizer {optimizer!r}"
                " has; nothing was touched; load it without renaming, or skip it"
            )
    there = _new_name(optimizer, rename)
    here: dict[str, str] = {}
    if there in state.optimizers:
        names = zip(full_names(there, state), parameter_names(there, state), strict=True)
        for fulls, short in names:
            here |= dict(zip(fulls, short, strict=True))
    state_names = by_parameter(f"{optimizer}.state.", [*saved.tensors, *saved.rest], {*calls})
    new_names: dict[str, str] = {}
    for each in calls:
        full = _new_name(owners.get(each, each), rename)
        new = here.get(full, each)
        new_names[f"{optimizer} calls {each}"] = new
        old_prefix, prefix = f"{optimizer}.state.{each}", f"{there}.state.{new}"
        new_names[old_prefix] = prefix
        for name in state_names.get(each, {}).values():
            new_names[name] = prefix + name.removeprefix(old_prefix)
    return new_names


def _check_unique(names: Mapping[str, Any], new: Mapping[str, str]) -> None:
    sources: dict[str, str] = {}
    for name in names:
        if sources.setdefault(new[name], name) != name:
            raise UsageError(
                f"rename: {sources[new[name]]} and {name} would both be {new[name]}; nothing was"
                " touched"
            )
