"""Place of a worker in its script, in a form that a successor can replay.

A place is: the phases done before the loop, the batch that the loop holds, and the phases done
since that batch was drawn, with what each returned. A joiner runs its script from the top; phases
that lie behind it are answered from this record, and at the end of the record it joins.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import msgspec

from outlast.checkpoint.format import codec
from outlast.errors import CodecError

RESULT_BYTES_MAX = 64 << 10
LOST = b""  # a result that could not be kept


def keep_result(value: Any) -> bytes:
    """A phase's result for a later walker, or LOST when it is too large or cannot be written."""
    try:
        kept = codec.encode(value)
    except CodecError:
        return LOST
    return kept if len(kept) <= RESULT_BYTES_MAX else LOST


class Intervals(msgspec.Struct, frozen=True, array_like=True):
    """Committed steps between copies in memory, and between checkpoints on disk; 0: none."""

    memory: int = 0
    disk: int = 0

    def due(self, step: int) -> Literal["", "memory", "disk"]:
        """Return the tiers to save after `step`."""
        if self.disk and step % self.disk == 0:
            return "disk"
        return "memory" if self.memory and step % self.memory == 0 else ""


class ProgressSlot(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of one page slot: a seat's rank-specific state at one place."""

    n: int
    step: int
    saved_step: int  # the step of the newest checkpoint that this seat took part in
    prelude: tuple[bytes, ...]
    batch: bytes  # the current batch's `BatchPlace`, b"" before the loop
    done: tuple[bytes, ...]
    own: bytes  # Protected.own_state()
    between: tuple[bytes, ...] = ()  # behind each of `done`: Protected.own_choices(), b"": not kept
    reports: dict[str, float] = {}
    at_draw: bool = False  # `own` is the state before `batch` is drawn, not before its phase
    aside: bool = False  # phase n was nothing that the script called: no walk comes by it
    every: Intervals = Intervals()

    def pack(self) -> bytes:
        """Return the slot as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> ProgressSlot:
        """Return the slot of these bytes. Raises CorruptionError."""
        return msgspec.msgpack.decode(data, type=cls)


@dataclasses.dataclass
class ScriptProgress:
    """The main thread's own record of where it is."""

    saved_step: int = 0
    every: Intervals = dataclasses.field(default_factory=Intervals)
    prelude: list[bytes] = dataclasses.field(default_factory=list)
    batch: bytes = b""
    done: list[bytes] = dataclasses.field(default_factory=list)
    between: list[bytes] = dataclasses.field(default_factory=list)

    def draw(self, batch: bytes) -> None:
        """The loop is about to draw a batch; `batch` says how to draw it again."""
        self.batch = batch
        self.done.clear()
        self.between.clear()

    def add(self, result: bytes, own: bytes) -> None:
        """A phase has returned; `own` is what the script's code behind it may read."""
        if self.batch:
            self.done.append(result)
            self.between.append(own)
        else:
            self.prelude.append(result)

    def slot(self, n: int, step: int, own: bytes, **more: Any) -> ProgressSlot:
        """Return the slot before phase n+1."""
        return ProgressSlot(
            n=n,
            step=step,
            saved_step=self.saved_step,
            every=self.every,
            prelude=tuple(self.prelude),
            batch=self.batch,
            done=tuple(self.done),
            between=tuple(self.between),
            own=own,
            **more,
        )


class ReplayWalk:
    """A joiner's way from the top of its script to the place before phase n+1.

    `after`: the slot was written before the last phase's vote, so this worker must run the
    script's code behind that phase itself, with `own` put back before it.
    """

    def __init__(self, slot: ProgressSlot, *, after: bool, last_result: bytes) -> None:
        self.slot = slot
        self.after = after
        self.last_result = last_result
        self._prelude = list(slot.prelude)
        self._done = list(slot.done)
        self._between = [*slot.between, *[b""] * (len(slot.done) - len(slot.between))]
        if after:
            (self._done if slot.batch else self._prelude).append(last_result)
            self._between.append(b"")  # the slot's own state
        self.in_loop = False

    @property
    def remaining(self) -> int:
        """Phases behind us that the script has not come to yet."""
        return len(self._done) if self.in_loop else len(self._prelude)

    def next(self) -> tuple[bytes, bytes, bool] | None:
        """(result, what is the rank's own behind it, is it the last one) of the next phase behind
        us, or None: join here."""
        if self._prelude and not self.in_loop:
            result = self._prelude.pop(0)
            return result, b"", not self._prelude and not self.slot.batch
        if self.in_loop and self._done:
            result, own = self._done.pop(0), self._between.pop(0)
            return result, own, not self._done
        return None


def walk_from(slots: dict[str, bytes], n: int) -> ReplayWalk | None:
    """The walk to the place before phase n+1, from what the seat's last worker left."""
    if f"before:{n}" in slots:
        return ReplayWalk(ProgressSlot.unpack(slots[f"before:{n}"]), after=False, last_result=LOST)
    if f"after:{n}" in slots:
        slot = ProgressSlot.unpack(slots[f"after:{n}"])
        last = slots.get(f"result:{n}", LOST)
        return ReplayWalk(slot, after=not slot.aside, last_result=last)
    return None
