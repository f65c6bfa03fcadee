"""Newest complete copy of a run: in memory, on disk, or in durable storage."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.replicas.memory_copies import MemoryCopies
from outlast.checkpoint.stores import catalog
from outlast.checkpoint.stores.catalog import Checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.checkpoint.upkeep.checkpoint_copy import copy_checkpoint
from outlast.controller.audit.audit_records import CopyBar, is_barred
from outlast.errors import CorruptionError, OutlastError, StorageError
from outlast.transport import messages


class SearchResult(NamedTuple):
    """Result of a search; `damaged` gives the reason why each newer copy was passed over."""

    checkpoint: messages.Checkpointed | None
    damaged: tuple[str, ...]
    error: OutlastError | None = None  # the checkpoints could not be listed


class CheckpointSearch(NamedTuple):
    """`root`: the directory of the job's checkpoints. `keepers`: addresses of all seats' keepers,
    and the token that they know. `durable`: where `root` is drained to, in the order to be asked.
    """

    root: Path
    job: str
    keepers: Sequence[str]
    token: str
    durable: Sequence[Store] = ()


def newest_checkpoint(
    root: Path, job: str, on_damage: Callable[[str], None], bars: Sequence[CopyBar] = ()
) -> messages.Checkpointed | None:
    """The newest whole checkpoint of the job, or None; reads every byte of it. Each one that is
    passed over is told to `on_damage`. Raises StorageError when they cannot be listed."""
    found = catalog.newest_checkpoint(
        Folder(root), on_damage, verify=True, job=job, barred=_barred(bars, on_damage)
    )
    return _point(found, str(root.absolute()), "disk")


def newest_copy(
    keepers: Sequence[str],
    token: str,
    on_damage: Callable[[str], None],
    bars: Sequence[CopyBar] = (),
) -> messages.Checkpointed | None:
    """The newest version of which these keepers hold every rank's part, or None; every byte of it
    is verified."""
    copies = MemoryCopies.reach(keepers, token, "the launcher", on_damage)
    try:
        found = catalog.newest_checkpoint(
            copies, on_damage, verify=True, barred=_barred(bars, on_damage)
        )
        return _point(found, "", "memory")
    finally:
        copies.close()


def bring(
    durable: Sequence[Store],
    root: Path,
    beyond: messages.Checkpointed | None,
    on_damage: Callable[[str], None],
    tell: Callable[[str], None] = lambda _: None,
    bars: Sequence[CopyBar] = (),
) -> messages.Checkpointed | None:
    """The newest checkpoint of all these stores, newer than `beyond`, copied to `root`; None where
    there is none that is whole. Every byte is verified; what is damaged here is mended.

    Of stores that have the same one, the first is asked first. One that fails is told to
    `on_damage`; where nothing could be brought for that reason, its StorageError is raised.
    """
    barred = _barred(bars, on_damage)
    found: list[tuple[SavePoint, Store]] = []
    failures: list[StorageError] = []
    for store in durable:
        try:
            newer = [p for p in catalog.checkpoint_places(store) if p.position > _position(beyond)]
            found += [(place, store) for place in newer if not barred(place)]
        except StorageError as error:
            failures.append(error)
    brought = None
    for place, store in sorted(found, key=lambda one: one[0].position, reverse=True):
        tell(f"the checkpoint of step {place.step} is copied here from {store.where}")
        try:
            copy_checkpoint(store, place, Folder(root))
        except CorruptionError as error:
            on_damage(f"checkpoint {place.directory} is passed over: {error}")
        except StorageError as error:
            failures.append(error)
        else:
            path = str(root.absolute() / place.directory)
            brought = messages.Checkpointed(n=place.n, step=place.step, path=path)
            break
    if failures and brought is None:
        raise failures[0]
    for error in failures:
        on_damage(str(error))
    return brought


def find_copies(what: CheckpointSearch, bars: Sequence[CopyBar] = ()) -> SearchResult:
    """The newest of all that is not barred, every byte of it verified."""
    damaged: list[str] = []
    copies = disk = far = error = None
    try:
        copies = newest_copy(what.keepers, what.token, damaged.append, bars)
        disk = newest_checkpoint(what.root, what.job, damaged.append, bars)
        # A bucket may be slow, or gone: it is asked only where something is wrong here.
        if what.durable and (damaged or not (copies or disk)):
            beyond = max(copies, disk, key=_position)
            far = bring(what.durable, what.root, beyond, damaged.append, bars=bars)
    except OutlastError as unreadable:
        error = unreadable
    if error and (copies or disk):
        damaged.append(str(error))
        error = None
    return SearchResult(far or max(copies, disk, key=_position), tuple(damaged), error)


def search(
    what: CheckpointSearch,
    loop: asyncio.AbstractEventLoop,
    on_result: Callable[[SearchResult], None],
    bars: Sequence[CopyBar] = (),
) -> None:
    """`look` beside the loop, which must go on renewing leases; the answer comes by `on_result` in
    the loop, unless that has closed by then."""

    def find() -> None:
        result = find_copies(what, bars)
        with contextlib.suppress(RuntimeError):  # the launcher has ended meanwhile
            loop.call_soon_threadsafe(on_result, result)

    # A daemon: a disk that does not answer must not keep the launcher from ending.
    threading.Thread(target=find, name="outlast-checkpoints", daemon=True).start()


def _barred(bars: Sequence[CopyBar], tell: Callable[[str], None]) -> Callable[[SavePoint], bool]:
    """Return whether a place must not be started from; each one is told."""

    def barred(place: SavePoint) -> bool:
        found = is_barred(bars, place.n, place.directory)
        if found:
            tell(
                f"checkpoint {place.directory} is passed over: it was saved after the replicas were"
                " last found equal, and before they were found to differ"
            )
        return found

    return barred


def _position(point: messages.Checkpointed | None) -> tuple[int, int, int]:
    """Its order among checkpoints; before all others where there is none."""
    place = SavePoint.parse(Path(point.path).name) if point else None
    return place.position if place else (-1, -1, -1)


def _point(found: Checkpoint | None, root: str, tier: str) -> messages.Checkpointed | None:
    if found is None:
        return None
    place = found.place
    path = str(Path(root) / place.directory)
    return messages.Checkpointed(n=place.n, step=place.step, path=path, tier=tier)
