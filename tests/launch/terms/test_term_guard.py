"""Rounds of a term's owner: whom they let act, a newer term, a store that is away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import StorageError
from outlast.launch.terms.term_guard import TermGuard
from outlast.launch.terms.term_records import SuccessorRecord, TermLedger, TermRecord
from outlast.launch.terms.term_store import CheckpointStoreTerms

ADDRESS = ("127.0.0.1", 29400)
MANY = 1000
LEASE_S = 600.0  # beats are further apart than a test may take


class GatedStore(CheckpointStoreTerms):
    """Terms in a directory. Each read takes one of `permits`, and fails while `is_away`."""

    def __init__(self, root: Path) -> None:
        super().__init__(Folder(root), "terms")
        self.permits = threading.Semaphore(0)
        self.reading = threading.Event()
        self.is_away = False

    def get(self, name: str) -> bytes | None:
        self.reading.set()
        assert self.permits.acquire(timeout=20)
        if self.is_away:
            raise StorageError("the store is away")
        return super().get(name)


class Owner:
    """Owner of term 1, with what its guard has reported."""

    def __init__(self, root: Path, lease_s: float = LEASE_S) -> None:
        self.silent = False
        self.store = GatedStore(root)
        self.ledger = TermLedger(self.store, "a-run")
        assert self.ledger.claim(_record(1))
        self.newer: list[TermRecord] = []
        self.notes: list[str] = []
        self.guard = TermGuard(
            self.ledger,
            1,
            ADDRESS,
            lease_s,
            self.newer.append,
            self.notes.append,
        )
        self.record: SuccessorRecord | None = None  # to be written
        self.recorded: list[SuccessorRecord] = []

    def next_successors(self) -> SuccessorRecord | None:
        return self.record

    def on_recorded(self, record: SuccessorRecord) -> None:
        self.recorded.append(record)
        self.record = None

    def is_alone(self) -> bool:
        return self.silent


def _record(term: int) -> TermRecord:
    return TermRecord(term=term, run="a-run", host="h", claim=f"claim {term}")


def _with_guard(owner: Owner, body: Callable[[asyncio.Task[None]], Awaitable[None]]) -> None:
    async def act() -> None:
        rounds = asyncio.create_task(owner.guard.run(owner))
        try:
            await asyncio.wait_for(body(rounds), 20)
        finally:
            owner.store.permits.release(MANY)
            rounds.cancel()

    asyncio.run(act())


def test_only_a_round_that_begins_later_lets_an_action_happen(tmp_path: Path) -> None:
    owner = Owner(tmp_path)

    async def body(_rounds: asyncio.Task[None]) -> None:
        done: list[str] = []
        second = asyncio.Event()
        owner.guard.confirm(lambda: done.append("first"))
        assert await asyncio.to_thread(owner.store.reading.wait, 20)
        owner.guard.confirm(second.set)
        owner.store.reading.clear()
        owner.store.permits.release()
        assert await asyncio.to_thread(owner.store.reading.wait, 20), "a second round"
        assert done == ["first"] and not second.is_set(), "it came during the first round"
        owner.store.permits.release()
        await second.wait()

    _with_guard(owner, body)
    beat = owner.ledger.read_beat(1)
    assert beat is not None and beat.address == ADDRESS and beat.count == 1, "none was due again"


def test_an_owner_that_reads_a_newer_term_does_nothing_more(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    done: list[str] = []

    async def body(rounds: asyncio.Task[None]) -> None:
        owner.guard.confirm(lambda: done.append("late"))
        assert await asyncio.to_thread(owner.store.reading.wait, 20)
        assert TermLedger(GatedStore(tmp_path), "a-run").claim(_record(2))
        owner.store.permits.release(MANY)
        await rounds

    _with_guard(owner, body)
    assert [one.term for one in owner.newer] == [2] and not done


def test_an_outage_of_the_store_is_waited_out_and_noted_once(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.store.is_away = True
    owner.store.permits.release(MANY)

    async def body(_rounds: asyncio.Task[None]) -> None:
        confirmed = asyncio.Event()
        owner.guard.confirm(confirmed.set)
        for _ in range(2):
            owner.store.reading.clear()
            assert await asyncio.to_thread(owner.store.reading.wait, 20)
        assert not confirmed.is_set()
        owner.store.is_away = False
        await confirmed.wait()

    _with_guard(owner, body)
    away, back = owner.notes
    assert "out of reach (the store is away)" in away and "answers again" in back
    assert not owner.newer


def test_the_end_of_the_run_stays_in_the_store(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.store.permits.release(MANY)
    asyncio.run(owner.guard.end("done", 0, ""))
    beat = owner.ledger.read_beat(1)
    assert beat is not None and (beat.outcome, beat.exit_code) == ("done", 0)


def test_the_beat_of_an_owner_that_is_alone_stands_still_until_it_is_not(tmp_path: Path) -> None:
    owner = Owner(tmp_path, lease_s=0.01)
    owner.store.permits.release(MANY)

    def count() -> int:
        beat = TermLedger(CheckpointStoreTerms(Folder(tmp_path), "terms"), "a-run").read_beat(1)
        return beat.count if beat else 0

    async def rounds(number: int) -> None:
        for _ in range(number):
            one = asyncio.Event()
            owner.guard.confirm(one.set)
            await one.wait()

    async def body(_rounds: asyncio.Task[None]) -> None:
        await rounds(2)
        owner.silent = True
        await rounds(2)
        before = count()
        await rounds(20)
        assert count() == before > 0
        owner.silent = False
        while count() == before:
            await rounds(1)

    _with_guard(owner, body)
    assert ["stands still" in note for note in owner.notes] == [True, False]


def test_successors_count_as_recorded_after_a_read_that_finds_no_newer_term(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    record = owner.record = SuccessorRecord(term=1, number=1, hosts=("h",))

    async def body(_rounds: asyncio.Task[None]) -> None:
        assert await asyncio.to_thread(owner.store.reading.wait, 20)
        assert not owner.recorded, "the read has not returned"
        found = TermLedger(CheckpointStoreTerms(Folder(tmp_path), "terms"), "a-run")
        assert found.successors(1, 1) == record
        done = asyncio.Event()
        owner.guard.confirm(done.set)
        owner.store.permits.release(MANY)
        await done.wait()
        assert owner.recorded == [record]

    _with_guard(owner, body)


def test_successors_that_a_newer_term_has_overtaken_do_not_count(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.record = SuccessorRecord(term=1, number=1, hosts=())

    async def body(rounds: asyncio.Task[None]) -> None:
        assert await asyncio.to_thread(owner.store.reading.wait, 20)
        assert TermLedger(GatedStore(tmp_path), "a-run").claim(_record(2))
        owner.store.permits.release(MANY)
        await rounds

    _with_guard(owner, body)
    assert owner.newer and not owner.recorded


def test_two_records_of_one_number_are_refused(tmp_path: Path) -> None:
    ledger = TermLedger(CheckpointStoreTerms(Folder(tmp_path), "terms"), "a-run")
    ledger.record_successors(SuccessorRecord(term=1, number=1, hosts=("h",)))
    ledger.record_successors(SuccessorRecord(term=1, number=1, hosts=("h",)))
    with pytest.raises(StorageError, match="another process writes for its owner"):
        ledger.record_successors(SuccessorRecord(term=1, number=1, hosts=("other",)))
