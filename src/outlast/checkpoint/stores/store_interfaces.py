"""Interfaces of stores and read-only sources of checkpoints; stores of other packages; no torch.

Another package names one entry point of the group `outlast.stores` for each URL scheme::

    [project.entry-points."outlast.stores"]
    sqlite = "outlast_sqlite:open_store"

The object is a function that takes the whole address (`sqlite:///data/runs.db`) and returns a
`Store`. It may raise any OutlastError. `outlast.testing.StoreContract` tests a store.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from outlast.errors import ConfigError, CorruptionError, OutlastError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GET_BYTES_MAX = 256 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class StoreSource(Protocol):
    """The readable part of a store: a root with one directory of files a checkpoint.

    Every method may be called from several threads at once. A file that is missing, too short or
    not regular is a CorruptionError; one that cannot be reached or written is a StorageError, and a
    StalledError where there is no answer at all: `into` may then be written to at any time. Names
    are checked with `check_name` first, so that none leads out of the root.
    """

    @property
    def where(self) -> str:
        """Return the root, for messages: a path or a URL."""
        ...

    def directories(self) -> list[str]:
        """Return the names directly under the root that hold files; [] without a root."""
        ...

    def files(self, directory: str) -> dict[str, int]:
        """Return the sizes in bytes of a directory's files by name; -1 for irregular files.

        A directory that is missing has no files.
        """
        ...

    def get(self, directory: str, name: str) -> bytes:
        """Return the contents of a small file, of up to GET_BYTES_MAX."""
        ...

    def read(self, directory: str, name: str, at: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `at` on, all of it or an error."""


class MemoryFile(Protocol):
    """A file in memory: read at any place, in small parts as cheaply as in large ones."""

    def read(self, at: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `at` on, all of it or a CorruptionError."""


@runtime_checkable
class MemorySource(StoreSource, Protocol):
    """A source whose files lie in memory, each possibly in several places."""

    def holders(self, directory: str, name: str) -> Sequence[MemoryFile]:
        """Return every holder of the file. Raises CorruptionError if there is none."""
        ...


@runtime_checkable
class ListedSource(StoreSource, Protocol):
    """A source reached over a network that can list all its files at once."""

    def holding(self, name: str) -> set[str]:
        """Return the directories that contain a file of this name.

        The number of requests grows with all files under the root (about 1,000 a request), whoever
        owns them, and not with the directories.
        """
        ...


class Store(StoreSource, Protocol):
    """A source that can also be written."""

    def put(
        self, directory: str, name: str, parts: Iterable[bytes | memoryview], size_bytes: int
    ) -> None:
        """Write a file of `size_bytes`: durable and complete when this returns, else absent.

        A file of this name is replaced atomically. Each part is consumed before the next one is
        taken, so that all of them may share one buffer.
        """
        ...

    def create(self, directory: str, name: str, data: bytes) -> bool:
        """Write a small file that does not exist yet, durable and complete; False if it exists.

        Of any number of concurrent callers, one gets True.
        """
        ...

    def point(self, directory: str) -> None:
        """Make `latest` name this directory: for people, never trusted."""

    def remove(self, directory: str) -> None:
        """Delete a checkpoint: commit.json first, so that no partial one is taken for a checkpoint.

        A checkpoint that does not exist is no error.
        """


@runtime_checkable
class HoldingSource(Protocol):
    """A source in which a checkpoint can be protected against `remove` while it is read."""

    def hold(self, directory: str) -> AbstractContextManager[None]:
        """Make `remove` refuse this checkpoint within.

        Where that is impossible, a reader finds its files missing.
        """
        ...


class Inode(NamedTuple):
    """A file, independent of its names. `number`: device and inode; `names`: link count."""

    number: tuple[int, int]
    size_bytes: int
    names: int


@runtime_checkable
class LinkingStore(Store, Protocol):
    """A store in which a file can have names in several directories."""

    def link(self, directory: str, name: str, other: str) -> bool:
        """Link the file that `other` has under this name into a directory.

        False where there is none, or a link cannot be made.
        """
        ...

    def inodes(self, directory: str) -> dict[str, Inode]:
        """Return the inode of each name in a directory; {} if it cannot be read."""
        ...


@runtime_checkable
class DuplicatingStore(Store, Protocol):
    """A store that copies its own files on its side, without a transfer."""

    def duplicate(self, directory: str, name: str, other: str) -> bool:
        """Copy the file that `other` has under this name into a directory.

        False where there is none, or it has to be sent.
        """
        ...


def hold_checkpoint(source: StoreSource, directory: str) -> AbstractContextManager[None]:
    """Return a context that protects a checkpoint from deletion while it is read.

    Without effect for a source that cannot do so; a reader then finds files missing.
    """
    return source.hold(directory) if isinstance(source, HoldingSource) else nullcontext()


def check_name(name: str) -> str:
    """Return `name` if it may be a file's or a directory's: no separator, no leading dot.

    Raises CorruptionError for any other one, which might lead out of the root.
    """
    if not _NAME.fullmatch(name):
        raise CorruptionError(f"{name!r} is no name of a checkpoint's file; nothing was touched")
    return name


GROUP = "outlast.stores"
_METHODS = ("create", "directories", "files", "get", "point", "put", "read", "remove", "where")


def installed_schemes() -> list[str]:
    """Return the URL schemes of installed stores, sorted and without duplicates."""
    return sorted({entry.name for entry in _entries()})


def open_installed_store(address: str, built_in: Collection[str]) -> Store:
    """Open the store of another package.

    Args:
        address: a URL whose scheme is not one of `built_in`.
        built_in: the schemes of Outlast's own stores, for the message.

    Raises:
        ConfigError: no package or several packages have this scheme, the entry point cannot be
            loaded, or it does not return a store.
        OutlastError: whatever the package's own function raises.
    """
    scheme = address.partition("://")[0]
    entries = [entry for entry in _entries() if entry.name == scheme]
    if not entries:
        schemes = ", ".join([*built_in, *installed_schemes()])
        raise ConfigError(f"{address}: cannot store there; known are paths and {schemes}")
    if len(entries) > 1:
        owners = ", ".join(sorted(_owner(entry) for entry in entries))
        raise ConfigError(
            f"{address}: several packages provide {scheme}:// ({owners}); nothing was opened;"
            " uninstall all but one"
        )
    store = _open(entries[0], address)
    missing = [name for name in _METHODS if not hasattr(store, name)]
    if missing:
        raise ConfigError(
            f"{address}: {entries[0].value} of {_owner(entries[0])} returned a"
            f" {type(store).__name__}, which lacks {', '.join(missing)}; nothing was opened;"
            " correct the package (outlast.testing.StoreContract tests a store)"
        )
    return store


def _entries() -> Collection[EntryPoint]:
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    return entry_points(group=GROUP)


def _open(entry: EntryPoint, address: str) -> Store:
    try:
        return entry.load()(address)
    except OutlastError:
        raise
    except Exception as error:  # any error of a foreign package becomes one with its name
        raise ConfigError(
            f"{address}: {entry.value} of {_owner(entry)} failed ({type(error).__name__}: {error});"
            " nothing was opened; correct the address or the package"
        ) from error


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an unnamed package"
