"""The page: what a killed worker leaves must be whole, and enough for every decision."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import ProtectError
from outlast.page import SLOTS, Page

SMALL = 64 << 10


@pytest.fixture
def page():
    made = Page.create(SMALL)
    yield made
    made.close()


def test_the_heartbeat_is_read_as_written(page: Page) -> None:
    page.beat(7, 5, "voting", 31, 1000, 900, 2.5)
    assert page.read() == (7, 5, "voting", 31, 1000, 900, 2.5)


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
        "import sys; from outlast.page import Page; page = Page(int(sys.argv[1]))\n"
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
