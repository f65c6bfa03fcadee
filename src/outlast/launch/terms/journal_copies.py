"""Copies of journals in the store of terms, for a run whose hosts have their own run directories.

A term's journal is a stream of records, as its segment has them. It is stored in pieces:
journal-000002-000000, journal-000002-000001, ... of term 2. A piece never changes, and only the
owner of the term writes. The store, and not a host's own segment, has the entries that count: what
an owner could not copy, it has not acted on.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from threading import Lock

from outlast.atomic_files import replace_file
from outlast.errors import RunDirError, StorageError
from outlast.launch.terms.term_store import CheckpointStoreTerms, TermStore
from outlast.telemetry.segment_files import SUFFIX, pack_record, segment_header

PIECE_BYTES = 48 << 10  # below VALUE_BYTES_MAX


class JournalCopy:
    """Copy of the journal of one term, by its owner. `flush` may run in another thread."""

    def __init__(self, store: TermStore, term: int) -> None:
        self._store, self._term = store, term
        self._lock = Lock()
        self._waiting = bytearray()
        self._sending = b""  # the same bytes in each attempt: an earlier one may have arrived
        self._count = 0

    def add(self, payloads: Iterable[bytes]) -> None:
        """Add entries, which the next flush copies."""
        with self._lock:
            self._waiting += b"".join(map(pack_record, payloads))

    def flush(self) -> None:
        """Copy all entries that were added before. Raises StorageError; a later call goes on."""
        while True:
            with self._lock:
                if not self._sending:
                    self._sending = bytes(self._waiting[:PIECE_BYTES])
                    del self._waiting[:PIECE_BYTES]
            if not self._sending:
                return
            name = _name(self._term, self._count)
            if not self._store.create(name, self._sending):
                raise StorageError(
                    f"{self._store.where}/{name} is of another process that acts in term"
                    f" {self._term}; nothing more is decided here"
                )
            self._count += 1
            self._sending = b""


def fetch_journals(store: TermStore, before: int, directory: Path) -> None:
    """Make the segments in `directory` equal to the copies of all terms below `before`.

    Raises StorageError, RunDirError if the directory cannot be written.
    """
    values = store.get_all() if isinstance(store, CheckpointStoreTerms) else None
    journals: dict[str, bytes] = {}
    for term in range(1, before):
        pieces: list[bytes] = []
        while True:
            name = _name(term, len(pieces))
            piece = store.get(name) if values is None else values.get(name)
            if piece is None:
                break
            pieces.append(piece)
        if pieces:
            journals[f"term{term:06d}.000000{SUFFIX}"] = segment_header() + b"".join(pieces)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(f"*{SUFFIX}"):
            if path.name not in journals:
                path.unlink()
        for name, data in journals.items():
            replace_file(directory / name, data)
    except OSError as error:
        raise RunDirError(
            f"{directory} cannot be written ({error.strerror}); nothing was decided"
        ) from error


def _name(term: int, piece: int) -> str:
    return f"journal-{term:06d}-{piece:06d}"
