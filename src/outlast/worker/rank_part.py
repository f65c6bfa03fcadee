"""One rank's part of a checkpoint: its place in the run, packed and unpacked."""

from __future__ import annotations

from typing import Any

import msgspec

from outlast.checkpoint.format import codec
from outlast.errors import CorruptionError
from outlast.worker.phases.script_progress import LOST, ProgressSlot
from outlast.worker.script import carried_variables
from outlast.worker.state.ddp_buckets import BucketState

SEAT_MAGIC = b"OLP3"  # docs/format.md, "A seat's part", version 3
_FLAGS_ONLY = b"OLP2"  # version 2: without the buckets of DDP


class RankPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """State of one seat: its place in the run, the state of each DDP's reducer, and the values of
    `session.shared` that it has seen."""

    slot: bytes
    ddp: list[BucketState]
    shared: dict[str, bytes] = {}

    def pack(self) -> bytes:
        """Return the part as bytes."""
        return SEAT_MAGIC + msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes, where: str) -> RankPart:
        """Raises CorruptionError where it is none of version 2 or 3; `where` names it."""
        magic, body = data[: len(SEAT_MAGIC)], data[len(SEAT_MAGIC) :]
        if magic not in (SEAT_MAGIC, _FLAGS_ONLY):
            raise CorruptionError(
                f"{where} is not a seat's part of version 2 or 3 (starts with {data[:4]!r});"
                " nothing was taken over; resume with the Outlast that wrote it"
            )
        try:
            if magic == _FLAGS_ONLY:
                slot, flags, *shared = msgspec.msgpack.decode(body, type=tuple[Any, ...])
                body = msgspec.msgpack.encode([slot, [[flag] for flag in flags], *shared])
            part = msgspec.msgpack.decode(body, type=cls)
            ProgressSlot.unpack(part.slot)
        except (msgspec.DecodeError, TypeError, ValueError) as error:
            raise CorruptionError(
                f"{where} is no place in a run: {error}; nothing was taken over; remove it and"
                " resume from the checkpoint before it"
            ) from error
        return part


def part_summary(data: bytes, where: str) -> dict[str, Any]:
    """Return the parts of a rank's checkpoint that decide how training continues, as plain values;
    times of saves are not among them. Raises CorruptionError as `unpack` does."""
    part = RankPart.unpack(data, where)
    slot = ProgressSlot.unpack(part.slot)
    own = codec.decode(slot.own)
    choices = codec.decode(own["choices"])
    batch = codec.decode(slot.batch) if slot.batch else {}
    batch.pop("own", None)  # of what the script computes once more
    if slot.at_draw:  # the same generators once more
        batch.pop("random")
    return {
        "random": choices["random"],
        "objects": choices["objects"],
        "script": carried_variables.named(choices.get("script", {})),
        "buffers": own["buffers"],
        "local": {
            name: codec.decode(value)
            for name, value in own.get("local", {}).get("parts", {}).items()
        },
        "batch": batch,
        "results": [codec.decode(each) for each in (*slot.prelude, *slot.done) if each != LOST],
        "ddp": msgspec.to_builtins(part.ddp),
    }
