"""Deletion of old checkpoints once a newer one has been read back."""

from __future__ import annotations

from collections.abc import Callable

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.stores.catalog import Checkpoint, checkpoint_places, open_checkpoint
from outlast.checkpoint.stores.catalog import verify as verify_checkpoint
from outlast.checkpoint.stores.store_interfaces import LinkingStore, Store, StoreSource
from outlast.checkpoint.upkeep.retention_policy import (
    Keep,
    KnownCheckpoint,
    RetentionVerdict,
    apply_policy,
)
from outlast.errors import CorruptionError, InUseError, StalledError, StorageError


def is_whole(checkpoint: Checkpoint) -> bool:
    """Read every byte of a checkpoint; return whether all are right."""
    return not verify_checkpoint(checkpoint)


def prune_store(
    store: Store,
    keep: Keep,
    now_ns: int,
    *,
    verified: Callable[[Checkpoint], bool] = is_whole,
    spare: Callable[[SavePoint], bool] = lambda _: False,
    barred: Callable[[SavePoint], bool] = lambda _: False,
    dry_run: bool = False,
) -> list[RetentionVerdict]:
    """Delete checkpoints that `keep` does not keep, oldest first; return all verdicts.

    Verdicts are sorted newest first. Nothing is deleted before `verified` has found a newer
    checkpoint undamaged: it is called from the newest on, and only where something would be
    deleted. `spare`: places in use, which stay, as do those that a reader holds. `barred`
    checkpoints are never started from: they count for nothing, and are deleted once another one was
    verified. Checkpoints whose commit record cannot be read stay, and count for nothing, too.
    `dry_run`: delete nothing. Raises StorageError where the store fails; each deletion up to then
    is complete.
    """
    opened, damaged = _opened(store)
    checkpoints = [one for one in opened if not barred(one.commit.place)]
    unfit = [one.commit.place for one in opened if barred(one.commit.place)]
    known = [_known(checkpoint, verified=i == 0) for i, checkpoint in enumerate(checkpoints)]
    whole = None
    if unfit or not all(verdict.keep for verdict in apply_policy(known, keep, now_ns)):
        whole = next((i for i, one in enumerate(checkpoints) if verified(one)), None)
        known = [_known(one, verified=i == whole) for i, one in enumerate(checkpoints)]
    verdicts = [
        verdict._replace(keep=True, why="in use") if not verdict.keep and spare(verdict.place)
        else verdict
        for verdict in apply_policy(known, keep, now_ns)
        + [RetentionVerdict(place, whole is None, "barred by an audit") for place in unfit]
    ]  # fmt: skip
    if not dry_run:
        for i, verdict in reversed(list(enumerate(verdicts))):
            verdicts[i] = _removed(store, verdict)
    return verdicts + damaged


def _removed(store: Store, verdict: RetentionVerdict) -> RetentionVerdict:
    try:
        if not verdict.keep:
            store.remove(verdict.place.directory)
    except InUseError:
        return verdict._replace(keep=True, why="in use")
    return verdict


def known_checkpoints(store: Store) -> list[KnownCheckpoint]:
    """Return the checkpoints of a store, newest first, by their commit records, unverified.

    Raises StorageError when the store cannot be listed.
    """
    return [_known(checkpoint, verified=False) for checkpoint in _opened(store)[0]]


def _opened(store: Store) -> tuple[list[Checkpoint], list[RetentionVerdict]]:
    checkpoints, damaged = list[Checkpoint](), list[RetentionVerdict]()
    for place in checkpoint_places(store):
        try:
            checkpoints.append(open_checkpoint(store, place))
        except StalledError:
            raise
        except (CorruptionError, StorageError) as error:
            damaged.append(RetentionVerdict(place, True, f"left alone: {error}"))
    return checkpoints, damaged


def _known(checkpoint: Checkpoint, *, verified: bool) -> KnownCheckpoint:
    commit = checkpoint.commit
    linked = linked_files(checkpoint.store, commit.place)
    return KnownCheckpoint(
        commit.place, commit.time_ns, commit.size_bytes, verified, commit.base, linked
    )


def linked_files(store: StoreSource, place: SavePoint) -> tuple[tuple[tuple[int, int], int], ...]:
    """Return the files of a checkpoint that have other names: inode number and size."""
    if not isinstance(store, LinkingStore):
        return ()
    inodes = store.inodes(place.directory).values()
    return tuple((each.number, each.size_bytes) for each in inodes if each.names > 1)
