"""Interfaces of stores and read-only sources of checkpoints; no torch.

`outlast.testing.store_contract.StoreContract` is this interface as tests, for stores of your own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol, runtime_checkable

from outlast.errors import CorruptionError

GET_BYTES_MAX = 256 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class StoreSource(Protocol):
    """A root with directories of files, one directory a checkpoint; here, what can be read.

    Every method may be called from several threads at once. What is missing, too short or no
    regular file is a CorruptionError; what cannot be reached or written is a StorageError, and a
    StalledError where there is no answer at all: `into` may then be written to at any time. Names
    are checked with `check_name` before anything is touched, so that none leads out of the root.
    """

    @property
    def where(self) -> str:
        """The root, for messages: a path or a URL."""
        ...

    def directories(self) -> list[str]:
        """The names directly under the root that hold files, in no order; [] without a root."""
        ...

    def files(self, directory: str) -> dict[str, int]:
        """The sizes in bytes of what lies there, by name; -1 for what is no regular file.

        A directory that is missing has no files.
        """
        ...

    def get(self, directory: str, name: str) -> bytes:
        """A whole small file, of up to GET_BYTES_MAX."""
        ...

    def read(self, directory: str, name: str, at: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `at` on, all of it or an error."""
        ...


class MemoryFile(Protocol):
    """A file in memory: read at any place, in small parts as cheaply as in large ones."""

    def read(self, at: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `at` on, all of it or a CorruptionError."""
        ...


@runtime_checkable
class MemorySource(StoreSource, Protocol):
    """A source whose files lie in memory, each perhaps in several places."""

    def holders(self, directory: str, name: str) -> Sequence[MemoryFile]:
        """Everybody who should hold the file. CorruptionError where nobody does."""
        ...


@runtime_checkable
class ListedSource(StoreSource, Protocol):
    """A source that is asked over a network, and can list all that it has at a time."""

    def holding(self, name: str) -> set[str]:
        """The directories in which a file of this name lies. It takes requests by the thousand of
        files under the root, whosever they are, and not by the directory."""
        ...


class Store(StoreSource, Protocol):
    """A source that can be written, too."""

    def put(
        self, directory: str, name: str, parts: Iterable[bytes | memoryview], size_bytes: int
    ) -> None:
        """Write a file of `size_bytes`, durable and whole when this returns; else it isn't there.

        A file of this name is replaced in one go. A part is used up before the next one is taken,
        so that all of them may be one buffer.
        """
        ...

    def create(self, directory: str, name: str, data: bytes) -> bool:
        """Write a small file that is not there yet, durable and whole; False if there is one.

        Of any number of callers at the same time, one gets True.
        """
        ...

    def point(self, directory: str) -> None:
        """Let `latest` name this directory: for people, never trusted."""
        ...

    def remove(self, directory: str) -> None:
        """Delete a checkpoint: commit.json first, so that no half of it is ever taken for one.

        One that is gone already is no error.
        """
        ...


@runtime_checkable
class HoldingSource(Protocol):
    """A source in which a checkpoint can be held against `remove`, whoever calls that."""

    def hold(self, directory: str) -> AbstractContextManager[None]: ...


class Inode(NamedTuple):
    """A file, whatever its names. `number`: device and inode; `names`: how many it has."""

    number: tuple[int, int]
    size_bytes: int
    names: int


@runtime_checkable
class LinkingStore(Store, Protocol):
    """A store in which a file can have names in several directories."""

    def link(self, directory: str, name: str, other: str) -> bool:
        """Give a directory the file that `other` has under this name; False where there is none, or
        a link cannot be made."""
        ...

    def inodes(self, directory: str) -> dict[str, Inode]:
        """Return what each name there is a name of."""
        ...


@runtime_checkable
class DuplicatingStore(Store, Protocol):
    """A store that copies its own files without sending them."""

    def duplicate(self, directory: str, name: str, other: str) -> bool:
        """Give a directory a file of its own, with the bytes of the one that `other` has under this
        name; False where there is none, or it has to be sent."""
        ...


def hold_checkpoint(source: StoreSource, directory: str) -> AbstractContextManager[None]:
    """For as long as a checkpoint is read: nobody deletes it meanwhile, if the source can see to
    that. Else whoever reads finds it gone."""
    return source.hold(directory) if isinstance(source, HoldingSource) else nullcontext()


def check_name(name: str) -> str:
    """`name`, if it may be a file's or a directory's here: no separator, no dot in front.

    Raises CorruptionError for one that might lead anywhere else.
    """
    if not _NAME.fullmatch(name):
        raise CorruptionError(f"{name!r} is no name of a checkpoint's file; nothing was touched")
    return name
