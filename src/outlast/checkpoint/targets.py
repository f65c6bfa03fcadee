"""Durable targets, opened and looked at before anything depends on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from outlast.checkpoint.durable import Durable, Target
from outlast.checkpoint.folder import Folder
from outlast.checkpoint.objects import open_store
from outlast.checkpoint.storage import Store
from outlast.errors import ConfigError, RefusedError, StorageError

REQUEST_S = 30.0  # draining tries again by itself


def open_targets(
    asked: Sequence[Durable], root: Path, request_s: float = REQUEST_S
) -> tuple[list[Target], list[StorageError]]:
    """The targets of checkpoints in `root`, and why some of them do not answer now.

    Raises ConfigError for one that cannot be one, RefusedError where it answers, and that is no.
    """
    targets: list[Target] = []
    silent: list[StorageError] = []
    for one in asked:
        store = _folder_or_bucket(one.address, root, request_s)
        silent += _silence(store)
        if any(_is_same(store, other.store) for other in targets):
            raise ConfigError(f"{store.where} is said twice")
        targets.append(Target(one, store))
    return targets, silent


def open_target(address: str, request_s: float = REQUEST_S) -> Store:
    """One of them, that is not asked anything yet, and not for long. Raises ConfigError."""
    return open_store(address, request_s=request_s, retries=4, retry_s=request_s, ask=False)


def _silence(store: Store) -> list[StorageError]:
    try:
        store.directories()
    except RefusedError:
        raise
    except StorageError as error:
        return [error]
    return []


def _is_same(one: Store, other: Store) -> bool:
    if isinstance(one, Folder) and isinstance(other, Folder):
        return one.root.resolve() == other.root.resolve()
    return one.where == other.where


def _folder_or_bucket(address: str, root: Path, request_s: float) -> Store:
    store = open_target(address, request_s)
    if not isinstance(store, Folder):
        return store
    there = store.root.absolute()
    if there.resolve() == root.resolve():
        raise ConfigError(
            f"{there} is where this run saves anyway; name storage that outlives this host"
        )
    try:
        there.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{there} cannot be made ({error.strerror}); name a directory that can be written"
        ) from error
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{there} cannot be written; see to its rights")
    return Folder(there)
