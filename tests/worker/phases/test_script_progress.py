"""A rank's own part of a checkpoint: restored, reported, or refused."""

from __future__ import annotations

import msgspec
import pytest
import torch

from outlast.checkpoint.format import codec
from outlast.errors import CorruptionError
from outlast.worker.phases.script_progress import (
    LOST,
    SEAT_MAGIC,
    Intervals,
    ProgressSlot,
    RankPart,
    ReplayWalk,
    ScriptProgress,
    part_summary,
)
from outlast.worker.state.ddp_buckets import BucketState


def slot(**changed: object) -> ProgressSlot:
    own = codec.encode({"buffers": {}, "choices": codec.encode({"random": 3, "objects": {"o": 4}})})
    place = ScriptProgress(saved_step=2, every=Intervals(1, 5), prelude=[codec.encode(8), LOST])
    place.draw(codec.encode({"step": 3, "random": torch.arange(4)}))
    made = place.slot(7, 3, own, reports={"loss": 0.5})
    return msgspec.structs.replace(made, **changed)


def test_a_position_round_trips() -> None:
    states = [BucketState(sync=True, buckets=[[1], [0, 2]]), BucketState(sync=False)]
    part = RankPart(slot().pack(), states, {"name": codec.encode("run-1")})
    found = RankPart.unpack(part.pack(), "here")
    assert found == part
    assert ProgressSlot.unpack(found.slot) == slot()
    older = b"OLP2" + msgspec.msgpack.encode([slot().pack(), [True, False]])
    states = [BucketState(sync=True), BucketState(sync=False)]
    assert RankPart.unpack(older, "here") == RankPart(slot().pack(), states, {})
    assert RankPart.unpack(b"OLP3" + part.pack()[4:], "here") == part


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80", r"rank 3 is not a seat's part of version 2 to 4 \(starts with b'\\x80'"),
        (b"OLP1\x80", "the Outlast that wrote it"),
        (SEAT_MAGIC + b"\xc1", "rank 3 is not a position in a run"),
        (SEAT_MAGIC + msgspec.msgpack.encode([b"\x80", []]), "missing required field"),
        (b"OLP2" + msgspec.msgpack.encode([b"\x80"]), "rank 3 is not a position in a run"),
        (b"OLP2" + msgspec.msgpack.encode({}), "rank 3 is not a position in a run"),
    ],
)
def test_an_invalid_position_is_damage(data: bytes, message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        RankPart.unpack(data, "rank 3")


def test_the_part_summary_contains_the_training_state() -> None:
    """Not when it saves, nor what it has saved: two runs may do that differently."""
    part = part_summary(
        RankPart(slot(at_draw=True).pack(), [BucketState(sync=True)]).pack(), "here"
    )
    assert part == {
        "random": 3, "objects": {"o": 4}, "buffers": {}, "batch": {"step": 3}, "results": [8],
        "ddp": [[True, False, None]], "script": {}, "local": {},
    }  # fmt: skip
    other = slot(at_draw=True, every=Intervals(9, 9), saved_step=1, n=99, reports={})
    assert part_summary(RankPart(other.pack(), [BucketState(sync=True)]).pack(), "here") == part
    assert "random" in part_summary(RankPart(slot().pack(), []).pack(), "here")["batch"]


def test_a_walk_enters_the_epoch_and_then_its_batches() -> None:
    place = ScriptProgress()
    place.add(b"before", b"")
    place.begin_epoch(b"epoch 1")
    place.add(b"head", b"own")
    at_head = place.slot(2, 0, b"")
    place.end_head()
    place.add(b"length", b"")  # agreed on behind the head
    place.draw(b"batch")
    place.add(b"step", b"")
    at_batch = place.slot(4, 1, b"")
    walk = ReplayWalk(at_head, after=True, last_result=b"last")
    assert walk.next() == (b"before", b"", False)
    assert walk.next() is None
    walk.enter()
    assert (walk.next(), walk.next()) == ((b"head", b"own", False), (b"last", b"", True))
    walk = ReplayWalk(at_batch, after=False, last_result=LOST)
    walk.enter()
    assert (walk.next(), walk.remaining) == ((b"head", b"own", False), 0)
    walk.enter()
    assert (walk.next(), walk.next()) == ((b"step", b"", True), None)
    place.begin_epoch(b"epoch 2")
    assert (place.batch, place.done, place.head) == (b"", [], [])
