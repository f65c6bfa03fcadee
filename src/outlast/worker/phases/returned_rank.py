"""Own state of a rank that comes back after it was absent.

Its place in the script, with the variables of the loop and its own objects, is that of a rank that
was present. Its random generators are its own, as they were when it left: ranks that draw the same
numbers would train the same masks. If they are not known, they are seeded from the other rank's and
a number that is the same in a unit of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from outlast import random_state
from outlast.checkpoint.format import codec
from outlast.controller.recovery.shrinking import parted_slots
from outlast.worker.phases.script_progress import ProgressSlot


def merged_slots(slots: Mapping[str, bytes], n: int, rank: int) -> dict[str, bytes]:
    """Return the slots with which a rank takes its place before phase n+1. Those of ranks that were
    not absent are returned as they are."""
    own_slots, others = parted_slots(slots, n)
    if not own_slots:
        return others
    merged: dict[str, bytes] = {}
    for key, value in others.items():
        if key.startswith("result:"):
            merged[key] = value
        else:
            merged[key] = slot_of_absent(ProgressSlot.unpack(value), own_slots, rank).pack()
    return merged


def slot_of_absent(slot: ProgressSlot, own_slots: Mapping[str, bytes], rank: int) -> ProgressSlot:
    """Return the slot with which an absent rank comes back to the place of `slot`, which is of a
    rank that is present. `own_slots`: those of when it left."""
    return _with_generators(slot, _random_of(own_slots), int(own_slots.get("") or rank))


def _random_of(slots: Mapping[str, bytes]) -> dict[str, Any] | None:
    """Return the generators of the newest of a rank's slots; None if it has left none."""
    kinds = ("before:", "after:")
    found = [ProgressSlot.unpack(data) for key, data in slots.items() if key.startswith(kinds)]
    if not found:
        return None
    newest = max(found, key=lambda slot: slot.n)
    return codec.decode(codec.decode(newest.own)["choices"])["random"]


def _with_generators(slot: ProgressSlot, own: dict[str, Any] | None, seed: int) -> ProgressSlot:
    state = codec.decode(slot.own)
    choices = codec.decode(state["choices"])
    own = own or _seeded(choices["random"], seed)
    state["choices"] = _replaced(state["choices"], own)
    return msgspec.structs.replace(
        slot,
        own=codec.encode(state),
        batch=_replaced_in(slot.batch, own),
        epoch=_replaced_in(slot.epoch, own),
        between=tuple(_replaced(each, own) for each in slot.between),
        head_between=tuple(_replaced(each, own) for each in slot.head_between),
    )


def _replaced_in(place: bytes, own: dict[str, Any]) -> bytes:
    if not place:
        return place
    decoded = codec.decode(place)
    decoded["random"] = {**decoded["random"], **own}
    decoded["own"] = _replaced(decoded["own"], own)
    return codec.encode(decoded)


def _replaced(choices: bytes, own: dict[str, Any]) -> bytes:
    if not choices:
        return choices
    decoded = codec.decode(choices)
    decoded["random"] = {**decoded["random"], **own}
    return codec.encode(decoded)


def _seeded(others: dict[str, Any], number: int) -> dict[str, Any]:
    """Return generators that are seeded from another rank's and a number."""
    seed = xxhash.xxh3_64_intdigest(codec.encode({"rank": number, "random": others})) >> 32
    with random_state.preserved():
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        return random_state.snapshot()
