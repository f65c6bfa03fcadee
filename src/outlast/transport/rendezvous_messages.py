"""Messages by which the ranks of a group meet.

A rank that publishes a value for the others sends `Put`, which they receive as `RendezvousValue`.
To connect gloo, each rank has an address for all others and a number for each of them: it sends
`Meet`. Once all ranks of the group have, each receives all addresses and its own numbers in `Met`,
one message for the ranks of a host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import Lock

import msgspec

from outlast.transport.message_base import Body
from outlast.transport.rank_spans import RankSpan, unpack_ranks

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


def gathered(meets: Iterable[Meet], places: Mapping[int, int]) -> Met:
    """Return what ranks receive once all ranks of their group have sent Meet. `places`: rank -> its
    place in the group."""
    all_of = tuple(meets)
    # Row by sender, column by receiver: a rank's numbers are a column.
    table = memoryview(b"".join([meet.parts for meet in all_of])).cast("Q")
    return Met(
        generation=all_of[0].generation,
        name=all_of[0].name,
        values=tuple([meet.value for meet in all_of]),
        addresses=tuple([meet.address for meet in all_of]),
        parts={rank: table[place :: len(all_of)].tobytes() for rank, place in places.items()},
    )


class MeetingRelay:
    """Relay between a few ranks that have no controller; safe in threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._meets: dict[tuple[int, str], dict[int, Meet]] = {}

    def relay(self, sender: int, body: Put | Meet) -> list[tuple[int, RendezvousValue | Met]]:
        """Return who receives what now; nobody where `sender` has to wait for the others."""
        ranks = list(unpack_ranks(body.ranks))
        if isinstance(body, Put):
            return [(rank, received(body)) for rank in ranks if rank != sender]
        with self._lock:
            meets = self._meets.setdefault((body.generation, body.name), {})
            meets[sender] = body
            if len(meets) < len(ranks):
                return []
            del self._meets[body.generation, body.name]
        places = {rank: place for place, rank in enumerate(ranks)}
        met = gathered([meets[rank] for rank in ranks], places)
        return [(rank, met) for rank in ranks]
