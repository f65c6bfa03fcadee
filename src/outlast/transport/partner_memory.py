"""Memory behind a worker's page for the own state of its partners, ranks on other hosts.

A record is one message of a partner: some slots, as one msgpack map "kind:n" -> payload. Its digest
covers all of it, so that a message that was cut leaves no record. There is one record for each
stage and, of the stages in a phase, each of three phases: ranks are at most two phases apart when
a partner's state is read (ADR 18).

| at, in bytes                     | layout   | content                                       |
|----------------------------------|----------|-----------------------------------------------|
| end of the page +                | `qqQQQQ` | seat of the partner, generation, count, need, |
| ((2 i + b) RECORDS + r)          |          | length, xxh3_64(seat, generation, count,      |
| RECORD_BYTES                     |          | payload), then the payload                    |

i: place of the partner; b: bank; r: place of the stage and phase. `need`: bytes of the whole
message, which is left out if it is longer than the others expect. A generation that connects writes
the bank that the newest open generation has not written. All numbers are little endian.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec
import xxhash

from outlast.transport.worker_page import SLOT_BYTES, Page

Stage = Literal[
    "carried",  # while a generation connects: what is kept for the place before phase n+1
    "before",  # at the start of phase n+1
    "voted",  # before the vote of phase n
    "ended",  # at the end of phase n
]
STAGES: tuple[Stage, ...] = get_args(Stage)
HEAD = struct.Struct("<qqQQQQ")
RECORD_BYTES = 2 * SLOT_BYTES + (1 << 20)  # two slots, a result and their names
_PHASES = 3
RECORDS = 1 + 3 * _PHASES
Slots = Mapping[str, bytes]


class PartnerRecord(NamedTuple):
    """Slots that a partner has sent in one message; `number` increases within a generation."""

    seat: int
    generation: int
    number: int
    slots: dict[str, bytes]


def pack(seat: int, generation: int, count: int, slots: Slots) -> bytes:
    """Return a message."""
    payload = msgspec.msgpack.encode(slots)
    need = HEAD.size + len(payload)
    digest = _digest(seat, generation, count, payload)
    return HEAD.pack(seat, generation, count, need, len(payload), digest) + payload


def without_payload(message: bytes) -> bytes:
    """Return a message's head with its need, and no payload."""
    seat, generation, count, need, _, _ = HEAD.unpack_from(message)
    return HEAD.pack(seat, generation, count, need, 0, 0)


def _digest(seat: int, generation: int, count: int, payload: bytes | memoryview) -> int:
    head = struct.pack("<qqQ", seat, generation, count)
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh32_intdigest(head))


class PartnerMemory:
    """The records of one worker's partners. Writer: the worker; readers: see `read_records`."""

    def __init__(self, page: Page) -> None:
        self._fd, self._start = page.fd, page.end
        self._map: mmap.mmap | None = None
        self._bank = 0
        self._open_bank = 1  # written by the newest open generation

    def begin(self, partners: int, capacity: int) -> None:
        """Make room for the partners of a generation that connects, and erase its records.

        Raises OSError where memory is insufficient.
        """
        self._bank = 1 - self._open_bank
        end = self._at(partners, 0, 0)
        size = max(end, os.fstat(self._fd).st_size)
        if self._map is None or len(self._map) < size:
            os.ftruncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)  # tensors keep an earlier one
        self.reserve(partners, capacity)
        for partner in range((size - self._start) // (2 * RECORDS * RECORD_BYTES)):
            for record in range(RECORDS):
                at = self._at(partner, self._bank, record)
                self._map[at : at + HEAD.size] = bytes(HEAD.size)

    def reserve(self, partners: int, capacity: int) -> None:
        """Allocate `capacity` bytes of each record of this generation. Raises OSError."""
        for partner in range(partners):
            for record in range(RECORDS):
                os.posix_fallocate(self._fd, self._at(partner, self._bank, record), capacity)

    def opened(self) -> None:
        """Keep this generation's records until the next one is open."""
        self._open_bank = self._bank

    def landing(self, partner: int, stage: Stage, n: int, capacity: int) -> memoryview:
        """Return the memory for a message of a partner."""
        assert self._map is not None
        place = STAGES.index(stage)
        record = 0 if place == 0 else 1 + (place - 1) * _PHASES + n % _PHASES
        at = self._at(partner, self._bank, record)
        return memoryview(self._map)[at : at + capacity]

    def _at(self, partner: int, bank: int, record: int) -> int:
        return self._start + ((2 * partner + bank) * RECORDS + record) * RECORD_BYTES


def needed(message: memoryview, seat: int, generation: int) -> int:
    """Return the bytes that a received message needs; -1 if it is not one of this partner."""
    if len(message) < HEAD.size:
        return -1
    found, of, count, need, length, digest = HEAD.unpack_from(message)
    if (found, of) != (seat, generation) or need < HEAD.size:
        return -1
    if need > len(message):
        return need if length == 0 else -1
    body = message[HEAD.size : HEAD.size + length]
    whole = need == HEAD.size + length and digest == _digest(found, of, count, body)
    return need if whole else -1


def read_records(fd: int, start: int, seats: Collection[int]) -> Iterator[PartnerRecord]:
    """Yield the whole records of these seats behind a page that ends at `start`."""
    for at in range(start, os.fstat(fd).st_size, RECORD_BYTES):
        head = os.pread(fd, HEAD.size, at)
        if len(head) < HEAD.size:
            return
        seat, generation, count, need, length, digest = HEAD.unpack(head)
        if seat not in seats or length == 0 or not HEAD.size + length == need <= RECORD_BYTES:
            continue
        payload = os.pread(fd, length, at + HEAD.size)
        if _digest(seat, generation, count, payload) != digest:
            continue
        try:
            slots = msgspec.msgpack.decode(payload, type=dict[str, bytes])
        except msgspec.DecodeError:
            continue
        yield PartnerRecord(seat, generation, count, slots)


def newest_slots(
    records: Sequence[PartnerRecord], keys: Collection[str], since: int
) -> dict[int, dict[str, tuple[int, bytes]]]:
    """Return by seat the newest of these slots, each with its generation, from `since` on."""
    found: dict[int, dict[str, tuple[int, bytes]]] = {}
    for record in sorted(records, key=lambda one: (one.generation, one.number)):
        if record.generation >= since:
            kept = {
                key: (record.generation, record.slots[key]) for key in keys & record.slots.keys()
            }
            found.setdefault(record.seat, {}).update(kept)
    return {seat: slots for seat, slots in found.items() if slots}
