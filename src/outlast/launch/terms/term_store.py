"""Stores of terms: three operations on small named values, and the stores that Outlast opens.

A store of another package under the entry point group `outlast.stores` serves as well.
`outlast.testing.TermStoreContract` tests an implementation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.object_store import open_store
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.errors import ConfigError
from outlast.launch.terms.etcd_store import ETCD, EtcdStore, parse_etcd_address

VALUE_BYTES_MAX = 64 << 10
_ROOM = "terms"


class TermStore(Protocol):
    """Named values that all nodes of a run see alike.

    Names have up to 64 of a-z, 0-9 and -, values up to VALUE_BYTES_MAX bytes.

    Every method may be called from several threads, and returns or raises StorageError within the
    store's deadline. After an error of `create` or `put` the value may be there, now or later. A
    `get` that begins after a `create` or `put` has returned sees its value, on any host.
    """

    @property
    def where(self) -> str:
        """Return the place, for messages: a path or a URL."""
        ...

    def create(self, name: str, value: bytes) -> bool:
        """Write a value that does not exist yet, durable; return whether the name has this value.

        Of any number of concurrent callers with different values, one gets True, once and for all.
        """
        ...

    def put(self, name: str, value: bytes) -> None:
        """Write a value, or replace it: a reader gets the old one or the new one."""

    def get(self, name: str) -> bytes | None:
        """Return a value; None if there is none."""
        ...


class CheckpointStoreTerms:
    """TermStore in a directory of a checkpoint store: a shared file system or a bucket."""

    def __init__(self, store: Store, directory: str) -> None:
        self._store, self._directory = store, directory

    @property
    def where(self) -> str:
        """See TermStore.where."""
        return f"{self._store.where.rstrip('/')}/{self._directory}"

    def create(self, name: str, value: bytes) -> bool:
        """See TermStore.create."""
        is_new = self._store.create(self._directory, name, value)
        return is_new or self.get(name) == value  # the answer to this very call may have been lost

    def put(self, name: str, value: bytes) -> None:
        """See TermStore.put."""
        self._store.put(self._directory, name, [value], len(value))

    def get(self, name: str) -> bytes | None:
        """See TermStore.get. The listing comes first: a client of NFS may have cached a name's
        absence, and looks at the directory again when it is opened."""
        if name not in self._store.files(self._directory):
            return None
        return self._store.get(self._directory, name)

    def get_all(self) -> dict[str, bytes]:
        """Return all values, with one listing. Raises StorageError."""
        names = self._store.files(self._directory)
        return {name: self._store.get(self._directory, name) for name in sorted(names)}


def check_address(address: str) -> None:
    """Raise ConfigError for an address of `--term-store` that cannot be one; asks nothing."""
    if address.startswith(ETCD):
        parse_etcd_address(address)
    elif address and "://" not in address:
        raise ConfigError(
            f"--term-store {address}: give files (the run directory), etcd://HOST:PORT/PREFIX,"
            " s3://BUCKET/PREFIX, or another URL of a store"
        )


def open_term_store(
    address: str, run_dir: Path, run: str, answer_s: float, home: Path | None = None
) -> TermStore:
    """Return the store of a run's terms: for an empty address of its directory, or of `home` if
    hosts have directories of their own; else at a URL, under the name of the run. `answer_s`:
    deadline of a call. Raises ConfigError, StorageError."""
    if not address and home:
        return CheckpointStoreTerms(Folder(home, answer_s), f"{_ROOM}-{run}")
    if not address:
        return CheckpointStoreTerms(Folder(run_dir, answer_s), _ROOM)
    if address.startswith(ETCD):
        return EtcdStore(*parse_etcd_address(address), run, answer_s)
    store = open_store(address, request_s=answer_s, retries=0, retry_s=answer_s, ask=False)
    return CheckpointStoreTerms(store, f"{_ROOM}-{run}")
