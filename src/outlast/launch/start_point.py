"""Start point of a run: search for the newest complete checkpoint on disk, in memory and durable
storage."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.replicas.memory_copies import MemoryCopies
from outlast.checkpoint.stores import catalog
from outlast.checkpoint.stores.catalog import Checkpoint, UnreadableCheckpointError
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.checkpoint.upkeep.checkpoint_copy import copy_checkpoint
from outlast.controller.audit.audit_records import CopyBar, is_barred
from outlast.errors import ConfigError, CorruptionError, OutlastError, RefusedError, StorageError
from outlast.launch.run_directory import RunDir
from outlast.launch.terms.run_identity import CHECKPOINTS
from outlast.transport import messages


class SearchResult(NamedTuple):
    """Result of a search; `damaged`: the reasons to skip newer copies."""

    checkpoint: messages.Checkpointed | None
    damaged: tuple[str, ...]
    error: OutlastError | None = None  # the checkpoints could not be listed


class CheckpointSearch(NamedTuple):
    """Search parameters. `root`: the job's checkpoint directory. `keepers`, `token`: addresses of
    all seats' keepers. `durable`: the drain targets of `root`, in order of preference.
    """

    root: Path
    job: str
    keepers: Sequence[str]
    token: str
    durable: Sequence[Store] = ()


def newest_checkpoint(
    root: Path, job: str, on_damage: Callable[[str], None], bars: Sequence[CopyBar] = ()
) -> messages.Checkpointed | None:
    """Return the job's newest verified checkpoint, or None; skipped ones go to `on_damage`.

    Raises StorageError if the directory cannot be listed, UnreadableCheckpointError if the newest
    checkpoint cannot be read."""
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
    """Return the newest verified version of which the keepers hold all ranks' parts, or None.
    Unreadable memory counts as lost: the next older version is tried."""
    copies, lost = MemoryCopies.reach(keepers, token, "the launcher", on_damage), set[SavePoint]()
    barred = _barred(bars, on_damage)
    try:
        while True:
            try:
                found = catalog.newest_checkpoint(
                    copies, on_damage, verify=True, barred=lambda p: p in lost or barred(p)
                )
            except UnreadableCheckpointError as error:
                on_damage(str(error))
                lost.add(error.place)
            else:
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
    """Copy the newest whole checkpoint of the stores, if newer than `beyond`, to `root`.

    Return it, or None. Every byte is verified; a damaged local copy is replaced. Stores with the
    same checkpoint are tried in order. A failing store is reported to `on_damage`; its StorageError
    is raised if nothing could be copied."""
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
            on_damage(f"checkpoint {place.directory} is skipped: {error}")
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
    """Return the newest verified copy that is not barred.

    If the newest checkpoint on disk cannot be read, only an equally new copy in memory replaces it.
    """
    damaged: list[str] = []
    copies = disk = far = error = None
    oldest = (-1, -1, -1)
    try:
        copies = newest_copy(what.keepers, what.token, damaged.append, bars)
        try:
            disk = newest_checkpoint(what.root, what.job, damaged.append, bars)
        except UnreadableCheckpointError as unreadable:
            error, oldest = unreadable, unreadable.place.position
        # Durable storage may be slow or unreachable: read it only if the local copy is damaged.
        if what.durable and not error and (damaged or not (copies or disk)):
            beyond = max(copies, disk, key=_position)
            far = bring(what.durable, what.root, beyond, damaged.append, bars=bars)
    except OutlastError as unreadable:
        error = unreadable
    found = far or max(copies, disk, key=_position)
    if error and found and _position(found) >= oldest:
        damaged.append(str(error))
        error = None
    return SearchResult(None if error else found, tuple(damaged), error)


def search(
    what: CheckpointSearch,
    loop: asyncio.AbstractEventLoop,
    on_result: Callable[[SearchResult], None],
    bars: Sequence[CopyBar] = (),
) -> None:
    """Run `find_copies` on a thread, so that the loop keeps renewing leases; call `on_result` in
    the loop, unless it has closed."""

    def find() -> None:
        result = find_copies(what, bars)
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(on_result, result)

    # A daemon thread: an unresponsive disk must not prevent the launcher's exit.
    threading.Thread(target=find, name="outlast-checkpoints", daemon=True).start()


def _barred(bars: Sequence[CopyBar], tell: Callable[[str], None]) -> Callable[[SavePoint], bool]:
    """Return a predicate for barred places; each barred place is reported to `tell`."""

    def barred(place: SavePoint) -> bool:
        found = is_barred(bars, place.n, place.directory)
        if found:
            tell(
                f"checkpoint {place.directory} is skipped: it was saved after the replicas were"
                " last found equal, and before they were found to differ"
            )
        return found

    return barred


def _position(point: messages.Checkpointed | None) -> tuple[int, int, int]:
    """Return the sort key of a checkpoint; None sorts first."""
    place = SavePoint.parse(Path(point.path).name) if point else None
    return place.position if place else (-1, -1, -1)


def _point(found: Checkpoint | None, root: str, tier: str) -> messages.Checkpointed | None:
    if found is None:
        return None
    place = found.place
    path = str(Path(root) / place.directory)
    return messages.Checkpointed(n=place.n, step=place.step, path=path, tier=tier)


_TERM = re.compile(r"t([0-9]{1,9})g[0-9]+")


class _There(NamedTuple):
    """Answers of durable storage. `newest`: per store, the newest checkpoint with a readable
    commit record, if any; `silent`: errors of unresponsive stores."""

    answering: list[Store]
    newest: list[Checkpoint]
    silent: list[StorageError]


def begin(
    run_dir: RunDir,
    durable: Sequence[Store],
    tell: Callable[[str], None],
    bars: Sequence[CopyBar] = (),
) -> tuple[messages.Checkpointed | None, list[str]]:
    """Return the checkpoint to start from, or None, and the reasons to skip others.

    If no local checkpoint is whole, or one is damaged, a checkpoint is copied from `durable`;
    `tell` is notified first. A fresh directory then adopts the job: it is the same run on another
    machine. `bars`: barred copies. Raises ConfigError if a store belongs to
    another job; CorruptionError or StorageError if a store has checkpoints or does not answer, and
    none can be copied; UnreadableCheckpointError if the newest local checkpoint cannot be read.
    """
    notes: list[str] = []
    root = run_dir.checkpoints
    catalog.remove_uncommitted(Folder(root))  # from a killed launcher; no writer is alive
    found = newest_checkpoint(root, run_dir.job.run, notes.append, bars)
    damaged = bool(notes)
    there = _ask(durable, notes)
    # The directory counts as fresh if no earlier launcher got further than this.
    begun = found is not None or any(run_dir.room("journal").iterdir())
    _refuse_others(there.newest, run_dir, begun=begun)
    brought = None
    if there.newest and (damaged or found is None):
        try:
            brought = bring(there.answering, root, found, notes.append, tell, bars)
        except StorageError as error:
            if found is None:
                raise
            notes.append(str(error))
    if found is None and brought is None and (there.newest or there.silent):
        raise _nothing_whole(there, notes)
    notes += [f"durable storage: {error}" for error in there.silent]
    if brought and there.newest[0].job != run_dir.job.run:
        notes.append(f"{_adopt(run_dir, there)}, at step {brought.step}")
    return brought or found, notes


def adopt_job(run_dir: RunDir, durable: Sequence[Store]) -> list[str]:
    """Let a fresh directory continue the job of durable storage, before it takes a term of it.

    Return notes. `begin` copies the checkpoint. Raises as `begin` does, if nothing is found and a
    store does not answer.
    """
    notes: list[str] = []
    there = _ask(durable, notes)
    rooms = [run_dir.room(CHECKPOINTS), run_dir.room("journal")]
    if any(any(room.iterdir()) for room in rooms):
        return []
    if there.silent and not there.newest:
        raise _nothing_whole(there, notes)
    return [_adopt(run_dir, there)] if there.newest else []


def _adopt(run_dir: RunDir, there: _There) -> str:
    job = there.newest[0].job
    attempts = [place for store in there.answering for place in catalog.checkpoint_places(store)]
    run_dir.adopt(job, max(map(_term_after, attempts)))
    return f"this directory was empty, and durable storage was not: job {job} goes on here"


def _ask(durable: Sequence[Store], notes: list[str]) -> _There:
    """Query all stores in parallel, so that slow stores do not delay others."""
    if not durable:
        return _There([], [], [])
    there = _There([], [], [])
    with ThreadPoolExecutor(len(durable)) as pool:
        for store, answers in [(store, pool.submit(_newest, store)) for store in durable]:
            try:
                newest, damages = answers.result()
            except RefusedError:
                raise
            except StorageError as error:
                there.silent.append(error)
                continue
            notes += damages
            there.answering.append(store)
            there.newest.extend([newest] if newest else [])
    return there


def _newest(durable: Store) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint with a readable commit record, and notes on skipped ones."""
    damages: list[str] = []
    for place in catalog.checkpoint_places(durable):
        try:
            return catalog.open_checkpoint(durable, place), damages
        except CorruptionError as error:
            damages.append(f"checkpoint {place.directory} is skipped: {error}")
    return None, damages


def _refuse_others(newest: Sequence[Checkpoint], run_dir: RunDir, *, begun: bool) -> None:
    """Raise ConfigError if a checkpoint's job differs from this directory's job, or, unless it has
    `begun`, from the first checkpoint's."""
    for one in newest:
        job = run_dir.job.run if begun else newest[0].job
        whose = str(run_dir.path) if begun else newest[0].store.where
        if one.job != job:
            raise ConfigError(
                f"--durable {one.store.where} holds checkpoints of job {one.job}, and {whose} is of"
                f" job {job}; nothing was started; name another place for this one"
            )


def _nothing_whole(there: _There, notes: Sequence[str]) -> OutlastError:
    if there.silent:
        return StorageError(
            f"--durable {there.silent[0]}; nothing whole was found elsewhere, and it may hold this"
            " run; nothing was started; try again once it answers"
        )
    where = ", ".join(one.store.where for one in there.newest)
    return CorruptionError(
        f"--durable {where} holds checkpoints, and none is whole: {'; '.join(notes)}; nothing was"
        " started; name another place to begin anew"
    )


def _term_after(place: SavePoint) -> int:
    """Return the term after that of `place`, so that attempt names are not reused."""
    match = _TERM.fullmatch(place.attempt)
    return int(match[1]) + 1 if match else 1
