"""Terms of a run in a store: who owns each, and whether its owner is alive.

term-000002            TermRecord, created once: by the one process that owns the term
beat-000002            TermBeat, rewritten by that owner; its last one has the end of the run
successors-000002-001  SuccessorRecord, created once by that owner; the newest one holds
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


class SuccessorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts whose agents may create the next term without a lease; none: any host may."""

    term: int
    number: int  # from 1
    hosts: tuple[str, ...]


Value = TypeVar("Value", TermRecord, TermBeat, SuccessorRecord)


_encode = msgspec.json.encode


def _successors(term: int, number: int) -> str:
    return f"successors-{term:06d}-{number:03d}"


class TermLedger:
    """Terms of one run in its store. Methods may block until the store's deadline."""

    def __init__(self, store: TermStore, run: str) -> None:
        self._store, self._run = store, run
        self._numbers: dict[int, int] = {}  # of the newest known records of successors, by term

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
        return self._store.create(f"term-{record.term:06d}", _encode(record))

    def beat(self, term: int, beat: TermBeat) -> None:
        """Write a sign of life of this process's own term."""
        self._store.put(f"beat-{term:06d}", _encode(beat))

    def read_beat(self, term: int) -> TermBeat | None:
        """Return the newest sign of life of a term's owner, or None before its first one."""
        return self._read(f"beat-{term:06d}", TermBeat)

    def record_successors(self, record: SuccessorRecord) -> None:
        """Write a record of this process's own term."""
        if not self._store.create(_successors(record.term, record.number), _encode(record)):
            raise StorageError(
                f"{self.where}: term {record.term} has another record {record.number} of its"
                " successors: another process writes for its owner"
            )

    def successors(self, newest: int, floor: int) -> SuccessorRecord | None:
        """Return the newest record of the newest term that has one, from `floor` to `newest`."""
        for term in range(newest, floor - 1, -1):
            found, number = None, self._numbers.get(term, 1)
            while record := self._read(_successors(term, number), SuccessorRecord):
                found, self._numbers[term] = record, number
                number += 1
            if found is not None:
                return found
        return None

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
