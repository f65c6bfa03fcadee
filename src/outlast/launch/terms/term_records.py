"""Terms of a run in a store: who owns each, and whether its owner is alive.

term-000002   TermRecord, created once: by the one process that owns the term
beat-000002   TermBeat, rewritten by that owner; its last one has the end of the run
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from outlast.errors import StorageError
from outlast.launch.terms.term_store import TermStore

TERMS_MAX = 100_000  # that a search looks through


class TermRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Owner of a term. `claim`: random, so that no two processes write the same record."""

    term: int
    run: str
    host: str
    claim: str


class TermBeat(msgspec.Struct, frozen=True, kw_only=True):
    """Sign of life of a term's owner. `address`: of its listener; `meeting`: where it lets nodes
    into the run. `outcome`, `exit_code`, `cause`: the end of the run."""

    count: int
    address: tuple[str, int]
    meeting: tuple[str, int] | None = None
    outcome: str = ""
    exit_code: int = 0
    cause: str = ""


Value = TypeVar("Value", TermRecord, TermBeat)


class TermLedger:
    """Terms of one run in its store. Methods may block until the store's deadline."""

    def __init__(self, store: TermStore, run: str) -> None:
        self._store, self._run = store, run

    @property
    def where(self) -> str:
        """Return the place of the terms, for messages."""
        return self._store.where

    def read(self, term: int) -> TermRecord | None:
        """Return a term's record. Raises StorageError if it is damaged or of another run."""
        record = self._read(f"term-{term:06d}", TermRecord)
        if record is not None and (record.run, record.term) != (self._run, term):
            raise StorageError(
                f"{self.where}: term {term} is of run {record.run}, not {self._run}; nobody takes"
                " it over; give each run a store or prefix of its own"
            )
        return record

    def newest(self, floor: int) -> TermRecord | None:
        """Return the record of the newest term above `floor`, or None."""
        found = None
        for term in range(floor + 1, floor + TERMS_MAX):
            record = self.read(term)
            if record is None:
                break
            found = record
        return found

    def claim(self, record: TermRecord) -> bool:
        """Create a term; return whether this record owns it."""
        return self._store.create(f"term-{record.term:06d}", msgspec.json.encode(record))

    def beat(self, term: int, beat: TermBeat) -> None:
        """Write a sign of life of this process's own term."""
        self._store.put(f"beat-{term:06d}", msgspec.json.encode(beat))

    def read_beat(self, term: int) -> TermBeat | None:
        """Return the newest sign of life of a term's owner, or None before its first one."""
        return self._read(f"beat-{term:06d}", TermBeat)

    def _read(self, name: str, kind: type[Value]) -> Value | None:
        data = self._store.get(name)
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise StorageError(
                f"{self.where}/{name} is damaged ({error}); no node becomes its owner; remove it"
                " when no process of the run is alive"
            ) from error
