"""Messages by which the ranks of a group meet: a value of each rank, and a part for each peer."""

from __future__ import annotations

import msgspec

from outlast.transport.message_base import Body
from outlast.transport.rank_spans import RankSpan

PART_BYTES = 8


class Put(Body, frozen=True):
    """Request to publish a rendezvous value to `ranks` (see rank_spans.py), from the rank whose
    gloo listener is `address`. `parts`: 8 bytes for each of these ranks, in order, which it alone
    receives, or nothing. Generation 0: to all ranks, for the life of the job."""

    generation: int
    key: str
    value: bytes
    ranks: tuple[RankSpan, ...] = ()
    parts: bytes = b""
    address: str = ""


class RendezvousValue(Body, frozen=True, tag="Got"):
    """Rendezvous value of the rank with the listener `address`. `parts`: seat -> the 8 bytes that
    this rank alone needs, for the addressees."""

    generation: int
    key: str
    value: bytes
    address: str = ""
    parts: dict[int, bytes] = msgspec.field(default_factory=dict)


def forwarded(put: Put, places: dict[int, int]) -> RendezvousValue:
    """Return a value as ranks receive it. `places`: rank -> its place in the ranks of `put`."""
    size = PART_BYTES
    parts = {rank: put.parts[size * at : size * at + size] for rank, at in places.items()}
    return RendezvousValue(
        generation=put.generation,
        key=put.key,
        value=put.value,
        address=put.address,
        parts=parts if put.parts else {},
    )
