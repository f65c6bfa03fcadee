"""The memory behind a page in which partners' state lies."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from outlast.transport import partner_memory
from outlast.transport.partner_memory import HEAD, PartnerMemory, newest_slots, read_records
from outlast.transport.worker_page import Page

CAPACITY = 4096


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.create(1 << 12)
    yield page
    page.close()


def land(memory: PartnerMemory, message: bytes, n: int, stage: str = "voted") -> None:
    memory.landing(0, stage, n, CAPACITY)[: len(message)] = message  # type: ignore[arg-type]


def found(page: Page, n: int, since: int = 0) -> dict[int, dict[str, tuple[int, bytes]]]:
    keys = {f"{kind}:{n}" for kind in ("before", "after", "result")}
    return newest_slots(list(read_records(page.fd, page.end, (7,))), keys, since)


def test_a_message_is_read_by_whoever_has_the_descriptor(page: Page) -> None:
    memory = PartnerMemory(page)
    memory.begin(1, CAPACITY)
    land(memory, partner_memory.pack(7, 3, 1, {"after:5": b"own", "after:4": b"old"}), 5)
    assert found(page, 5) == {7: {"after:5": (3, b"own")}}
    assert not list(read_records(page.fd, page.end, (8,)))


def test_the_page_itself_is_not_touched(page: Page) -> None:
    page.put("before", 1, b"mine")
    memory = PartnerMemory(page)
    memory.begin(2, CAPACITY)
    land(memory, partner_memory.pack(7, 1, 1, {"after:1": b"own"}), 1)
    assert page.slots() == {"before:1": b"mine"}
    assert Page(os.dup(page.fd)).fd != page.fd  # another reader of a grown file


@pytest.mark.parametrize("at", [0, 8, 16, 24, 32, 40, HEAD.size, HEAD.size + 3])
def test_a_damaged_message_is_none(page: Page, at: int) -> None:
    memory = PartnerMemory(page)
    memory.begin(1, CAPACITY)
    message = bytearray(partner_memory.pack(7, 3, 1, {"after:5": b"own"}))
    message[at] ^= 1
    land(memory, bytes(message), 5)
    assert not found(page, 5)
    padded = memoryview(bytes(message).ljust(CAPACITY, b"\0"))
    assert partner_memory.needed(padded, 7, 3) == -1


def test_a_longer_message_says_what_it_needs() -> None:
    message = partner_memory.pack(7, 3, 1, {"after:5": bytes(CAPACITY)})
    head = memoryview(partner_memory.without_payload(message).ljust(CAPACITY, b"\0"))
    assert partner_memory.needed(head, 7, 3) == len(message) > CAPACITY


def test_the_newest_message_of_the_right_generation_counts(page: Page) -> None:
    memory = PartnerMemory(page)
    memory.begin(1, CAPACITY)
    land(memory, partner_memory.pack(7, 3, 1, {"before:5": b"first"}), 5, "before")
    land(memory, partner_memory.pack(7, 3, 2, {"before:5": b"second"}), 5, "carried")
    assert found(page, 5) == {7: {"before:5": (3, b"second")}}
    assert not found(page, 5, since=4)


def test_an_open_generation_is_kept_until_the_next_one_is_open(page: Page) -> None:
    memory = PartnerMemory(page)
    memory.begin(1, CAPACITY)
    land(memory, partner_memory.pack(7, 1, 1, {"after:5": b"one"}), 5)
    memory.opened()
    for generation in (2, 3):  # the second does not open
        memory.begin(1, CAPACITY)
        land(memory, partner_memory.pack(7, generation, 2, {"after:6": b"two"}), 6)
        assert found(page, 5) == {7: {"after:5": (1, b"one")}}
    memory.opened()
    memory.begin(1, CAPACITY)
    assert not found(page, 5)
    assert found(page, 6) == {7: {"after:6": (3, b"two")}}
