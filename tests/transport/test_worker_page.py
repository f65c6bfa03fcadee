"""Tests of the worker page: complete records after a kill, and refused slots."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import ProtectError
from outlast.transport.worker_page import KEYS, KINDS, SLOTS, Kind, Page, PhasePace

SMALL = 64 << 10


@pytest.fixture
def page():
    made = Page.create(SMALL)
    yield made
    made.close()


def test_the_heartbeat_is_read_as_written(page: Page) -> None:
    page.beat(7, 5, "voting", 31, 1000, 900, 2.5)
    assert page.read() == (7, 5, "voting", 31, 1000, 900, 2.5, 0)
    page.beat(8, 5, "idle", 31, 1000, 900, 2.5, -(1 << 62))
    assert page.read() == (8, 5, "idle", 31, 1000, 900, 2.5, -(1 << 62))


def test_a_lease_ends_by_the_clock_that_runs_while_a_host_is_suspended(page: Page) -> None:
    assert page.has_lease()  # of a run on one node: without an end
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    page.put_lease(now_ns + (1 << 40))
    page.beat(7, 5, "voting", 31, 1000, 900, 2.5)
    page.put_pace(0, 7, PhasePace(1, 1))
    assert page.has_lease()
    page.put_lease(now_ns)
    assert not page.has_lease()


def test_as_many_paces_as_there_is_room_for_are_read_as_written(page: Page) -> None:
    assert page.paces() == {}
    said = {key: PhasePace(key, key << 40) for key in range(1, KEYS + 1)}
    page.beat(7, 5, "voting", 31, 1000, 900, 2.5, 9)
    page.put("before", 1, b"x")
    for index, (key, pace) in enumerate(said.items()):
        page.put_pace(index, key, pace)
    assert page.paces() == said
    assert page.read().key == 9 and page.slots() == {"before:1": b"x"}


def test_a_slot_that_is_too_large_names_its_size(page: Page) -> None:
    with pytest.raises(ProtectError, match=str(SMALL + 1)):
        page.put("before", 1, b"x" * (SMALL + 1))


@given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=20))
def test_the_newest_slots_are_kept(payloads: list[bytes]) -> None:
    page = Page.create(4096)
    try:
        for n, payload in enumerate(payloads):
            page.put("after", n, payload)
        kept = dict(list(enumerate(payloads))[-SLOTS:])
        assert page.slots() == {f"after:{n}": p for n, p in kept.items()}
    finally:
        page.close()


KEYS_LIVE = SLOTS - 1  # and one that is being written


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2), st.binary(min_size=1))))
def test_the_newest_copies_of_the_newest_keys_are_there(
    puts: list[tuple[Kind, int, bytes]],
) -> None:
    page = Page.create(4096)
    try:
        said: dict[str, bytes] = {}
        for kind, n, payload in puts:
            page.put(kind, n, payload)
            said.pop(f"{kind}:{n}", None)
            said[f"{kind}:{n}"] = payload
            assert page.slots().items() >= dict(list(said.items())[-KEYS_LIVE:]).items()
            assert page.slots().items() <= said.items(), "an older copy was taken for the newest"
    finally:
        page.close()


def test_votes_that_fail_again_and_again_push_nothing_out(page: Page) -> None:
    """Each attempt at phase 4 writes its result of the same key; its beginning stays."""
    page.put("before", 3, b"where every attempt begins")
    for attempt in range(3 * SLOTS):
        page.put("after", 4, b"attempt %d" % attempt)
        assert page.slots() == {
            "before:3": b"where every attempt begins",
            "after:4": b"attempt %d" % attempt,
        }


def test_a_torn_write_leaves_the_copy_before_it(page: Page) -> None:
    for again in range(8):
        page.put("after", 4, b"whole %d" % again)
        before = os.pread(page.fd, os.fstat(page.fd).st_size, 0)
        page.put("after", 4, b"torn")
        after = os.pread(page.fd, len(before), 0)
        differ = [at for at in range(len(before)) if before[at] != after[at]]
        os.pwrite(page.fd, b"x", differ[-1])  # the last byte of the payload is not what it was
        assert page.slots() == {"after:4": b"whole %d" % again}


def test_a_rank_that_went_ahead_alone_leaves_what_a_redo_needs(page: Page) -> None:
    """It alone saw the answer of vote 1, went on, and died while voting on phase 2 (ADR 0003)."""
    for kind, n in [("before", 0), ("after", 1), ("result", 1), ("before", 1), ("after", 2)]:
        page.put(kind, n, f"{kind}{n}".encode())  # type: ignore[arg-type]
    assert {"before:0", "after:1", "before:1"} <= page.slots().keys()


@pytest.mark.parametrize("at", [0, 9, 40, 100])
def test_damage_hides_a_slot_and_no_other(page: Page, at: int) -> None:
    page.put("before", 1, b"a" * 80)
    page.put("after", 2, b"b" * 80)
    start = 4096 + at
    os.pwrite(page.fd, bytes([os.pread(page.fd, 1, start)[0] ^ 1]), start)
    assert page.slots() == {"after:2": b"b" * 80}


@pytest.mark.process
def test_sigkill_in_the_middle_of_writes_leaves_whole_slots(page: Page) -> None:
    code = (
        "import sys; from outlast.transport.worker_page import Page\n"
        "page = Page(int(sys.argv[1]))\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    page.put('before', n, bytes([n % 251]) * 50_000)\n"
        "    page.beat(n, n, 'running', 0, 0, 0, 0.0)\n"
    )
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", code, str(page.fd)], pass_fds=[page.fd])
        first = page.read().n if page.slots() else 0
        while page.read().n < first + 50 and child.poll() is None:
            pass
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        slots = page.slots()
        assert len(slots) >= SLOTS - 1
        for key, payload in slots.items():
            assert payload == bytes([int(key.split(":")[1]) % 251]) * 50_000
