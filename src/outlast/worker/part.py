"""A seat's part of a checkpoint (`own`): its place in the run, packed, unpacked, and told."""

from __future__ import annotations

from typing import Any

import msgspec

from outlast.checkpoint import tree
from outlast.errors import CorruptionError
from outlast.worker.place import LOST, Slot

SEAT_MAGIC = b"OLP2"  # docs/format.md, "A seat's part": a place, version 2


class SeatPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is one seat's own: its place in the run, of each DDP whether its next forward
    broadcasts buffers, and the values of `session.shared` that it has seen."""

    slot: bytes
    ddp: list[bool]
    shared: dict[str, bytes] = {}

    def pack(self) -> bytes:
        return SEAT_MAGIC + msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes, where: str) -> SeatPart:
        """Raises CorruptionError where it is not one of this version; `where` names it."""
        if data[: len(SEAT_MAGIC)] != SEAT_MAGIC:
            raise CorruptionError(
                f"{where} is not a seat's part of version 2 (starts with {data[:4]!r}); nothing was"
                " taken over; resume with the Outlast that wrote it"
            )
        try:
            part = msgspec.msgpack.decode(data[len(SEAT_MAGIC) :], type=cls)
            Slot.unpack(part.slot)
        except msgspec.DecodeError as error:
            raise CorruptionError(
                f"{where} is no place in a run: {error}; nothing was taken over; remove it and"
                " resume from the checkpoint before it"
            ) from error
        return part


def told(data: bytes, where: str) -> dict[str, Any]:
    """What of a seat's part decides how training goes on, as plain values: when it saves, and what
    it has saved, is not among it. Raises CorruptionError as `unpack` does."""
    part = SeatPart.unpack(data, where)
    slot = Slot.unpack(part.slot)
    own = tree.decode(slot.own)
    choices = tree.decode(own["choices"])
    batch = tree.decode(slot.batch) if slot.batch else {}
    if slot.at_draw:  # the same generators once more
        batch.pop("random")
    return {
        "random": choices["random"],
        "objects": choices["objects"],
        "buffers": own["buffers"],
        "batch": batch,
        "results": [tree.decode(each) for each in (*slot.prelude, *slot.done) if each != LOST],
        "ddp": part.ddp,
    }
