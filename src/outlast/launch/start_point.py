"""Start of a launcher: the newest complete checkpoint, or the last one that the command names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.stores import catalog
from outlast.checkpoint.stores.catalog import Checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.controller.audit.audit_records import CopyBar
from outlast.errors import (
    ConfigError,
    CorruptionError,
    OutlastError,
    RefusedError,
    StorageError,
)
from outlast.launch.newest_copy import bring, newest_checkpoint
from outlast.launch.run_directory import RunDir
from outlast.transport import messages

_TERM = re.compile(r"t([0-9]{1,9})g[0-9]+")


class _There(NamedTuple):
    """Answers of durable storage. `newest`: from each store that has any, the newest checkpoint
    with a readable commit record; `silent`: reasons of stores that did not answer."""

    answering: list[Store]
    newest: list[Checkpoint]
    silent: list[StorageError]


def begin(
    run_dir: RunDir,
    durable: Sequence[Store],
    tell: Callable[[str], None],
    bars: Sequence[CopyBar] = (),
) -> tuple[messages.Checkpointed | None, list[str]]:
    """The checkpoint to begin from, if there is any, and why others were passed over.

    `durable` is copied from where nothing here is whole, or something here is damaged; `tell` hears
    of it before, since that takes time. A fresh directory takes the job over then: it is the same
    run, on another machine. `bars`: copies that are out of use. Raises ConfigError where a store is
    another job's, and CorruptionError or StorageError where one has checkpoints, or does not
    answer, and none can be brought here.
    """
    notes: list[str] = []
    root = run_dir.room("checkpoints")
    catalog.remove_uncommitted(Folder(root))  # of a killed launcher: nobody writes now
    found = newest_checkpoint(root, run_dir.job.run, notes.append, bars)
    damaged = bool(notes)
    there = _ask(durable, notes)
    # A launcher that came no further than this has left a directory that is as good as fresh.
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
        job = there.newest[0].job
        attempts = [
            place for store in there.answering for place in catalog.checkpoint_places(store)
        ]
        run_dir.adopt(job, max(map(_term_after, attempts)))
        notes.append(
            f"this directory was empty, and durable storage was not: job {job} goes on here, at"
            f" step {brought.step}"
        )
    return brought or found, notes


def _ask(durable: Sequence[Store], notes: list[str]) -> _There:
    """All of them at the same time: none waits for another that is slow."""
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
    """The newest one whose commit record can be read, and what was passed over."""
    damages: list[str] = []
    for place in catalog.checkpoint_places(durable):
        try:
            return catalog.open_checkpoint(durable, place), damages
        except CorruptionError as error:
            damages.append(f"checkpoint {place.directory} is passed over: {error}")
    return None, damages


def _refuse_others(newest: Sequence[Checkpoint], run_dir: RunDir, *, begun: bool) -> None:
    """Raises ConfigError where one is of another job than this directory, once that has `begun` its
    own, or than the first of them."""
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
    """Attempts of this directory must not be called as those of the launcher that wrote `place`."""
    match = _TERM.fullmatch(place.attempt)
    return int(match[1]) + 1 if match else 1
