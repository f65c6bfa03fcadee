"""Messages by which the ranks of a group meet.

A rank that publishes a value for the others sends `Put`, which they receive as `RendezvousValue`.
To connect gloo, each rank has an address for all others and a number for each of them: it sends
`Meet` to its agent. The agent passes on those of its host's ranks together, in `HostMeets`. Once
all ranks of the group have come, each receives all addresses and its own numbers in `Met`, one
message for the ranks of a host. The agent alone answers a group whose ranks are all on its host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import NamedTuple

import msgspec

from outlast.transport.message_base import Body
from outlast.transport.rank_spans import RankSpan, has_rank, unpack_ranks

PART_BYTES = 8


class Put(Body, frozen=True):
    """Request to publish a rendezvous value to `ranks`, from the rank whose gloo listener is
    `address`."""

    generation: int
    key: str
    value: bytes
    ranks: tuple[RankSpan, ...] = ()
    address: str = ""


class RendezvousValue(Body, frozen=True, tag="Got"):
    """Rendezvous value of the rank with the listener `address`."""

    generation: int
    key: str
    value: bytes
    address: str = ""


class Meet(Body, frozen=True):
    """Report of a rank that connects the group `name`. `parts`: PART_BYTES for each of `ranks`, in
    order, which it alone receives."""

    generation: int
    name: str
    ranks: tuple[RankSpan, ...]
    value: bytes
    parts: bytes
    address: str


class MeetEntry(NamedTuple):
    """Contribution of one rank to its group, as in Meet."""

    value: bytes
    parts: bytes
    address: str


class HostMeets(Body, frozen=True, tag="Meets"):
    """Report of ranks of one host that connect the group `name`: seat -> what it has."""

    generation: int
    name: str
    ranks: tuple[RankSpan, ...]
    entries: dict[int, MeetEntry]


class Met(Body, frozen=True):
    """Values of all ranks of a group, in order, with the listeners of these ranks. `parts`: seat ->
    what each rank has for it, in order, for the addressees."""

    generation: int
    name: str
    values: tuple[bytes, ...]
    addresses: tuple[str, ...]
    parts: dict[int, bytes] = msgspec.field(default_factory=dict)


def received(put: Put) -> RendezvousValue:
    """Return a published value as ranks receive it."""
    return RendezvousValue(
        generation=put.generation, key=put.key, value=put.value, address=put.address
    )


def gathered(
    generation: int, name: str, entries: Sequence[MeetEntry], places: Mapping[int, int]
) -> Met:
    """Return what ranks receive once all ranks of their group have come. `entries`: of all ranks,
    in order. `places`: rank -> its place in the group."""
    # Row by sender, column by receiver: a rank's numbers are a column.
    table = memoryview(b"".join([each.parts for each in entries])).cast("Q")
    return Met(
        generation=generation,
        name=name,
        values=tuple([each.value for each in entries]),
        addresses=tuple([each.address for each in entries]),
        parts={rank: table[place :: len(entries)].tobytes() for rank, place in places.items()},
    )


def are_whole(entries: Iterable[MeetEntry], size: int) -> bool:
    """Return whether each entry of a group has a number for each of its `size` ranks."""
    return all(len(each.parts) == PART_BYTES * size for each in entries)


def _entry(meet: Meet) -> MeetEntry:
    return MeetEntry(meet.value, meet.parts, meet.address)


class HostMeetings:
    """Meetings of the ranks of one host, in their agent.

    A group costs the controller one message of the host, and none where all ranks of the group are
    here. Ranks wait only for those of their host that were known when the first of them came.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._here: set[int] = set()  # seats
        self._has_begun = False  # a rank of this generation has come
        self._waiting: dict[tuple[str, tuple[RankSpan, ...]], dict[int, MeetEntry]] = {}

    def connect(self, generation: int, seat: int) -> None:
        """Take note of a rank of this host that connects a generation; forget the former one."""
        if generation > self._generation:
            self._generation, self._has_begun = generation, False
            self._here.clear()
            self._waiting.clear()
        if generation == self._generation and not self._has_begun:
            self._here.add(seat)

    def add(self, seat: int, meet: Meet) -> HostMeets | Met | None:
        """Return the message for the controller, or for the ranks of the group, which are all here;
        None while others of this host are to come."""
        if meet.generation != self._generation or seat not in self._here:
            return HostMeets(meet.generation, meet.name, meet.ranks, {seat: _entry(meet)})
        self._has_begun = True
        entries = self._waiting.setdefault((meet.name, meet.ranks), {})
        entries[seat] = _entry(meet)
        if any(rank not in entries for rank in self._here if has_rank(meet.ranks, rank)):
            return None
        del self._waiting[meet.name, meet.ranks]
        size = sum([span.size for span in meet.ranks])
        if len(entries) < size or not are_whole(entries.values(), size):
            return HostMeets(meet.generation, meet.name, meet.ranks, entries)
        ranks = list(unpack_ranks(meet.ranks))
        places = {rank: place for place, rank in enumerate(ranks)}
        return gathered(meet.generation, meet.name, [entries[rank] for rank in ranks], places)


class MeetingRelay:
    """Relay between a few ranks that have no controller; safe in threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._meets: dict[tuple[int, str], dict[int, MeetEntry]] = {}

    def relay(self, sender: int, body: Put | Meet) -> list[tuple[int, RendezvousValue | Met]]:
        """Return who receives what now; nobody where `sender` has to wait for the others."""
        ranks = list(unpack_ranks(body.ranks))
        if isinstance(body, Put):
            return [(rank, received(body)) for rank in ranks if rank != sender]
        with self._lock:
            meets = self._meets.setdefault((body.generation, body.name), {})
            meets[sender] = _entry(body)
            if len(meets) < len(ranks):
                return []
            del self._meets[body.generation, body.name]
        places = {rank: place for place, rank in enumerate(ranks)}
        met = gathered(body.generation, body.name, [meets[rank] for rank in ranks], places)
        return [(rank, met) for rank in ranks]
