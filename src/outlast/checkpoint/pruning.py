"""Old checkpoints of a store, deleted once a newer one has been read back."""

from __future__ import annotations

from collections.abc import Callable

from outlast.checkpoint.catalog import Checkpoint, open_checkpoint, places
from outlast.checkpoint.catalog import verify as verify_checkpoint
from outlast.checkpoint.record import Place
from outlast.checkpoint.retention import Keep, Known, Verdict, choose
from outlast.checkpoint.storage import Linking, Source, Store
from outlast.errors import CorruptionError, InUseError, StalledError, StorageError


def is_whole(checkpoint: Checkpoint) -> bool:
    """Whether every byte of it was just read and is right."""
    return not verify_checkpoint(checkpoint)


def prune(
    store: Store,
    keep: Keep,
    now_ns: int,
    *,
    verified: Callable[[Checkpoint], bool] = is_whole,
    spare: Callable[[Place], bool] = lambda _: False,
    barred: Callable[[Place], bool] = lambda _: False,
    dry_run: bool = False,
) -> list[Verdict]:
    """Delete what `keep` does not keep, oldest first; the verdicts on all, newest first.

    Nothing goes before `verified` has found a newer one whole: it is asked from the newest on, and
    only where something would go. `spare`: places in use, which stay, as those do that somebody
    holds. What is `barred` is never started from: it counts for nothing, and goes once another one
    has been found whole. What has a commit record that cannot be read stays, and counts for
    nothing, too. With `dry_run` all is the same, and
    nothing is deleted. Raises StorageError where the store fails; what was deleted by then is gone
    whole.
    """
    opened, damaged = _opened(store)
    checkpoints = [one for one in opened if not barred(one.commit.place)]
    unfit = [one.commit.place for one in opened if barred(one.commit.place)]
    known = [_known(checkpoint, verified=i == 0) for i, checkpoint in enumerate(checkpoints)]
    whole = None
    if unfit or not all(verdict.keep for verdict in choose(known, keep, now_ns)):
        whole = next((i for i, one in enumerate(checkpoints) if verified(one)), None)
        known = [_known(one, verified=i == whole) for i, one in enumerate(checkpoints)]
    verdicts = [
        verdict._replace(keep=True, why="in use") if not verdict.keep and spare(verdict.place)
        else verdict
        for verdict in choose(known, keep, now_ns)
        + [Verdict(place, whole is None, "barred by an audit") for place in unfit]
    ]  # fmt: skip
    if not dry_run:
        for i, verdict in reversed(list(enumerate(verdicts))):
            verdicts[i] = _removed(store, verdict)
    return verdicts + damaged


def _removed(store: Store, verdict: Verdict) -> Verdict:
    try:
        if not verdict.keep:
            store.remove(verdict.place.directory)
    except InUseError:
        return verdict._replace(keep=True, why="in use")
    return verdict


def known_in(store: Store) -> list[Known]:
    """What a store holds, newest first, by its commit records; none counts as verified.

    Raises StorageError when it cannot be listed.
    """
    return [_known(checkpoint, verified=False) for checkpoint in _opened(store)[0]]


def _opened(store: Store) -> tuple[list[Checkpoint], list[Verdict]]:
    checkpoints, damaged = list[Checkpoint](), list[Verdict]()
    for place in places(store):
        try:
            checkpoints.append(open_checkpoint(store, place))
        except StalledError:
            raise
        except (CorruptionError, StorageError) as error:
            damaged.append(Verdict(place, True, f"left alone: {error}"))
    return checkpoints, damaged


def _known(checkpoint: Checkpoint, *, verified: bool) -> Known:
    commit = checkpoint.commit
    linked = linked_in(checkpoint.store, commit.place)
    return Known(commit.place, commit.time_ns, commit.size_bytes, verified, commit.base, linked)


def linked_in(store: Source, place: Place) -> tuple[tuple[tuple[int, int], int], ...]:
    """The files of a checkpoint that have other names, by number, with their sizes."""
    if not isinstance(store, Linking):
        return ()
    inodes = store.inodes(place.directory).values()
    return tuple((each.number, each.size_bytes) for each in inodes if each.names > 1)
