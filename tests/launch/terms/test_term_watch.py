"""The watch of an agent over terms, and the term of a start."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import RunDirError, StorageError
from outlast.launch.nodes.controller_tenure import take_term
from outlast.launch.nodes.node_joining import LiveRun
from outlast.launch.terms.term_records import (
    SuccessorRecord,
    TermBeat,
    TermLedger,
    TermRecord,
)
from outlast.launch.terms.term_store import CheckpointStoreTerms
from outlast.launch.terms.term_watch import UNLEASED_STILL, TermNews, TermWatch

LEASE_S = 0.4
HERE = ("127.0.0.1", 1)
END_S = 20.0


class Lease:
    """A lease whose controller has fallen silent."""

    def __init__(self) -> None:
        self.lease_s = LEASE_S
        self.unheard_s = LEASE_S
        self.may_claim = self.may_succeed = True
        self.newer = 0

    def saw_newer_term(self) -> None:
        self.newer += 1


class SlowStore(CheckpointStoreTerms):
    """A directory in which `create` waits for `gate`, behind its effect."""

    def __init__(self, path: Path) -> None:
        super().__init__(Folder(path), "terms")
        self.root = path
        self.gate = threading.Event()
        self.created = threading.Event()
        self.is_away = False

    def get(self, name: str) -> bytes | None:
        if self.is_away:
            raise StorageError("the store is away")
        return super().get(name)

    def create(self, name: str, value: bytes) -> bool:
        found = super().create(name, value)
        self.created.set()
        self.gate.wait(END_S)
        return found


def record(term: int, host: str) -> TermRecord:
    return TermRecord(term=term, run="r", host=host, claim=f"{host} {term}")


def with_watch(
    ledger: TermLedger, lease: Lease, body: Callable[[TermWatch], Awaitable[None]]
) -> list[str]:
    """Run `body` with the watch of host b over the term 1 of host a; return its notes."""
    notes: list[str] = []

    async def run() -> None:
        watch = TermWatch(ledger, record(1, "b"), lease, 0.0, notes.append)
        try:
            async with asyncio.timeout(END_S):
                await body(watch)
        finally:
            watch.close()

    asyncio.run(run())
    return notes


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    return SlowStore(tmp_path)


@pytest.fixture
def ledger(store: SlowStore) -> TermLedger:
    store.gate.set()
    ledger = TermLedger(store, "r")
    assert ledger.claim(record(1, "a"))
    ledger.beat(1, TermBeat(count=1, address=HERE))
    return ledger


async def until_news(watch: TermWatch) -> TermNews:
    while (news := await watch.wait(0.05)) is None:
        pass
    return news


def test_a_search_that_has_created_a_term_is_not_cut_off(
    store: SlowStore, ledger: TermLedger
) -> None:
    store.created.clear()
    store.gate.clear()

    async def body(watch: TermWatch) -> None:
        while not store.created.is_set():
            assert await watch.wait(0.01) is None
        assert await watch.wait(0.01) is None  # the store answers late
        store.gate.set()
        assert await until_news(watch) == TermNews(2, "b", None, "a")

    assert not with_watch(ledger, Lease(), body)
    owner = ledger.read(2)
    assert owner is not None and owner.host == "b" and ledger.read(3) is None


def test_a_term_that_was_created_too_late_is_not_used(store: SlowStore, ledger: TermLedger) -> None:
    store.created.clear()
    store.gate.clear()
    lease = Lease()

    async def body(watch: TermWatch) -> None:
        while not store.created.is_set():
            await watch.wait(0.01)
        lease.may_claim = lease.may_succeed = False  # its lease has ended meanwhile
        store.gate.set()
        assert await watch.wait(2 * LEASE_S) is None

    (note,) = with_watch(ledger, lease, body)
    assert "term 2 was created too late by this node" in note


def test_no_term_is_created_while_the_beat_moves_or_the_controller_answers(
    ledger: TermLedger,
) -> None:
    lease = Lease()

    async def body(watch: TermWatch) -> None:
        for count in range(2, 22):
            ledger.beat(1, TermBeat(count=count, address=HERE))
            assert await watch.wait(LEASE_S / 20) is None
        lease.unheard_s = 0.0
        assert await watch.wait(2 * LEASE_S) is None

    with_watch(ledger, lease, body)
    assert ledger.read(2) is None


def test_a_newer_term_is_followed_once_it_has_an_address(ledger: TermLedger) -> None:
    lease = Lease()
    lease.may_claim = False
    assert ledger.claim(record(2, "c"))

    async def body(watch: TermWatch) -> None:
        assert await watch.wait(LEASE_S) is None
        beat = TermBeat(count=1, address=("10.0.0.3", 7))
        ledger.beat(2, beat)
        assert await until_news(watch) == TermNews(2, "c", beat)

    with_watch(ledger, lease, body)
    assert lease.newer > 0


def test_the_end_of_the_run_is_news(ledger: TermLedger) -> None:
    end = TermBeat(count=2, address=HERE, outcome="done")
    ledger.beat(1, end)

    async def body(watch: TermWatch) -> None:
        assert await until_news(watch) == TermNews(1, "", end)

    with_watch(ledger, Lease(), body)


def unleased(ledger: TermLedger, *successors: str) -> Lease:
    """Return a lease that has ended, of one of these hosts or another one."""
    ledger.record_successors(SuccessorRecord(term=1, number=1, hosts=successors))
    lease = Lease()
    lease.may_claim = False
    return lease


@pytest.mark.parametrize("successors", [("a", "b"), ()])
def test_a_successor_creates_a_term_without_a_lease(
    ledger: TermLedger, successors: tuple[str, ...]
) -> None:
    began_s = time.monotonic()

    async def body(watch: TermWatch) -> None:
        assert await until_news(watch) == TermNews(2, "b", None, "a", successors)

    assert not with_watch(ledger, unleased(ledger, *successors), body)
    assert time.monotonic() - began_s > UNLEASED_STILL * LEASE_S


def test_a_host_that_was_struck_off_creates_no_term_without_a_lease(ledger: TermLedger) -> None:
    lease = unleased(ledger, "a", "b")
    ledger.record_successors(SuccessorRecord(term=1, number=2, hosts=("a",)))

    async def body(watch: TermWatch) -> None:
        assert await watch.wait(4 * LEASE_S) is None

    assert not with_watch(ledger, lease, body)
    assert ledger.read(2) is None


@pytest.mark.parametrize("owner", [1, 2], ids=["struck off", "another term has begun"])
def test_a_term_that_meets_a_newer_record_is_not_used(
    store: SlowStore, ledger: TermLedger, owner: int
) -> None:
    lease = unleased(ledger, "a", "b")
    if owner == 2:
        assert ledger.claim(record(2, "c"))
    other = TermLedger(CheckpointStoreTerms(Folder(store.root), "terms"), "r")
    store.created.clear()
    store.gate.clear()

    async def body(watch: TermWatch) -> None:
        while not store.created.is_set():
            assert await watch.wait(0.01) is None
        # Leases may be renewed behind this record without a read.
        number = 2 if owner == 1 else 1
        other.record_successors(SuccessorRecord(term=owner, number=number, hosts=("a",)))
        store.gate.set()
        assert await watch.wait(3 * LEASE_S) is None

    (note,) = with_watch(ledger, lease, body)
    assert f"term {owner + 1} was created too late" in note


def test_a_store_that_was_away_is_watched_anew_without_a_lease(
    store: SlowStore, ledger: TermLedger
) -> None:
    """Its owner has not beaten yet when it answers again."""
    lease = unleased(ledger, "b")

    async def body(watch: TermWatch) -> None:
        assert await watch.wait(LEASE_S / 2) is None
        store.is_away = True
        assert await watch.wait(2 * LEASE_S) is None
        store.is_away = False
        back_s = time.monotonic()
        assert (await until_news(watch)).term == 2
        assert time.monotonic() - back_s > LEASE_S / 2

    (note,) = with_watch(ledger, lease, body)
    assert "cannot be reached while the controller is silent" in note


def directory(term: int) -> Any:
    """Return a run directory that remembers what it adopts."""
    found = SimpleNamespace(path="DIR", job=SimpleNamespace(run="r", term=term), adopted=[])
    found.adopt = lambda run, number: found.adopted.append((run, number))
    return found


def take(ledger: TermLedger, run_dir: Any) -> None:
    plan: Any = SimpleNamespace(run_dir=run_dir.path, limits=SimpleNamespace(lease_s=LEASE_S))
    asyncio.run(take_term(ledger, run_dir, "b", LiveRun(plan), LEASE_S))


def test_a_start_takes_the_term_after_one_that_has_ended(ledger: TermLedger) -> None:
    ledger.beat(1, TermBeat(count=2, address=HERE, outcome="done"))
    run_dir = directory(2)
    take(ledger, run_dir)
    assert run_dir.adopted == [("r", 2)]


def test_a_start_takes_the_term_after_one_whose_beat_stands_still(ledger: TermLedger) -> None:
    assert ledger.claim(record(2, "c"))
    run_dir = directory(2)
    take(ledger, run_dir)
    assert run_dir.adopted == [("r", 3)]


def test_a_start_beside_a_live_controller_is_refused(ledger: TermLedger) -> None:
    ended = threading.Event()

    def live() -> None:
        count = 2
        while not ended.wait(LEASE_S / 20):
            ledger.beat(1, TermBeat(count=count, address=HERE))
            count += 1

    beating = threading.Thread(target=live)
    beating.start()
    try:
        with pytest.raises(RunDirError, match="in use by term 1 on a"):
            take(ledger, directory(2))
    finally:
        ended.set()
        beating.join()
    assert ledger.read(2) is None
