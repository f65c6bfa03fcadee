"""Own state of a rank that comes back: another rank's place, its own random generators."""

from __future__ import annotations

import random
from typing import Any

import torch

from outlast import random_state
from outlast.checkpoint.format import codec
from outlast.controller.recovery.shrinking import returning_slots
from outlast.worker.phases.returned_rank import merged_slots
from outlast.worker.phases.script_progress import ProgressSlot


def slot(n: int, seed: int, script: str) -> bytes:
    """Return a slot before phase n+1 whose generators have this seed."""
    with random_state.preserved():
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        states = random_state.snapshot()
    choices = codec.encode({"random": states, "script": script})
    own = codec.encode({"choices": choices, "buffers": {}})
    batch = codec.encode({"step": n, "random": states, "own": choices})
    made = ProgressSlot(
        n=n, step=n, saved_step=0, prelude=(), batch=batch, done=(), own=own, between=(choices, b"")
    )
    return made.pack()


def drawn(states: dict[str, Any]) -> tuple[float, float]:
    """Return the next numbers of these generators."""
    with random_state.preserved():
        random_state.restore(states)
        return random.random(), float(torch.rand(()))


def parts(data: bytes) -> dict[str, dict[str, Any]]:
    """Return what the four places of a slot hold."""
    unpacked = ProgressSlot.unpack(data)
    batch = codec.decode(unpacked.batch)
    return {
        "own": codec.decode(codec.decode(unpacked.own)["choices"]),
        "batch": batch,
        "draw": codec.decode(batch["own"]),
        "between": codec.decode(unpacked.between[0]),
    }


def test_a_returning_rank_has_its_own_generators_everywhere() -> None:
    left, other = {"before:3": slot(3, 7, "old")}, {"before:9": slot(9, 8, "new")}
    merged = merged_slots(returning_slots(left, {**other, "result:9": b"x"}, 9, 2), 9, 2)
    assert merged.keys() == {"before:9", "result:9"} and merged["result:9"] == b"x"
    mine = drawn(parts(left["before:3"])["own"]["random"])
    found = parts(merged["before:9"])
    assert [drawn(each["random"]) for each in found.values()] == [mine] * 4
    assert found["own"]["script"] == "new" and found["batch"]["step"] == 9


def test_without_own_state_ranks_get_different_generators() -> None:
    template = {"after:9": slot(9, 8, "new")}

    def numbers(rank: int, unit: int) -> tuple[float, float]:
        merged = merged_slots(returning_slots({}, template, 9, unit), 9, rank)
        return drawn(parts(merged["after:9"])["own"]["random"])

    other = drawn(parts(template["after:9"])["own"]["random"])
    assert len({numbers(1, 1), numbers(2, 2), numbers(0, 0), other}) == 4
    assert numbers(2, 2) == numbers(3, 2), "ranks of a unit that drew equal numbers do not"


def test_other_ranks_slots_stay() -> None:
    slots = {"before:4": slot(4, 1, "")}
    assert merged_slots(slots, 4, 0) == slots
