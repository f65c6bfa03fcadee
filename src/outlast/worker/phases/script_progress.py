"""Place of a worker in its script, in a form that a successor or a checkpoint can replay.

A place consists of the phases completed before the loop, the current batch, and the phases
completed since that batch was drawn, with their results. A joiner runs its script from the top:
completed phases are answered from this record, and it joins at the end of the record.

In a loop over `session.epochs` a place also has the beginning of the epoch, and the phases from
there to its first draw (`head`). Until that, the newest phases are those since the epoch began.

| progress slot (docs/protocol.md) | written |
|---|---|
| `before:n` | at the start of phase n+1 |
| `after:n+1` | before its vote, or at its end if the rank's own state may still change |
| `result:n+1` | before its vote if that is at its end, else at its end |
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from outlast.checkpoint.format import codec
from outlast.errors import CodecError, CorruptionError
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.partner_copies import PartnerCopies
from outlast.worker.phases.phase_attempt import PhaseAttempt
from outlast.worker.script import carried_variables
from outlast.worker.state.ddp_buckets import BucketState
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_status import WorkerStatus

RESULT_BYTES_MAX = 64 << 10
LOST = b""  # a result that could not be kept


def keep_result(value: Any) -> bytes:
    """Return a phase's result for a later walk, or LOST if it is too large or not encodable."""
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
    """Payload of one page slot: a seat's rank-specific state at one place."""

    n: int
    step: int
    saved_step: int  # the step of the newest checkpoint that this seat took part in
    prelude: tuple[bytes, ...]
    batch: bytes  # description of the current batch, b"" before the first of the loop or epoch
    done: tuple[bytes, ...]  # since `batch` was drawn, or since `epoch` began
    own: bytes  # ProtectedState.own_state()
    between: tuple[bytes, ...] = ()  # own_choices() after each of `done`, b"": not kept
    reports: dict[str, float] = {}
    at_draw: bool = False  # `own` is the state before `batch` is drawn, not before its phase
    aside: bool = False  # phase n is not a call of the script: no walk replays it
    every: Intervals = Intervals()
    copied: str = ""  # the copy in memory that has this state of the rank's shards
    epoch: bytes = b""  # description of the current epoch of `session.epochs`
    head: tuple[bytes, ...] = ()  # results between the beginning of `epoch` and its first draw
    head_between: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """Return the slot as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> ProgressSlot:
        """Return the slot of these bytes. Raises CorruptionError."""
        return msgspec.msgpack.decode(data, type=cls)


@dataclasses.dataclass
class ScriptProgress:
    """Record of the main thread's place in its script."""

    saved_step: int = 0
    every: Intervals = dataclasses.field(default_factory=Intervals)
    prelude: list[bytes] = dataclasses.field(default_factory=list)
    batch: bytes = b""
    done: list[bytes] = dataclasses.field(default_factory=list)
    between: list[bytes] = dataclasses.field(default_factory=list)
    epoch: bytes = b""
    head: list[bytes] = dataclasses.field(default_factory=list)
    head_between: list[bytes] = dataclasses.field(default_factory=list)

    def copy(self) -> ScriptProgress:
        """Return an independent copy."""
        lists = {name: list(value) for name, value in vars(self).items() if isinstance(value, list)}
        return dataclasses.replace(self, **lists)

    def assign(self, other: ScriptProgress) -> None:
        """Take over the place of `other`."""
        vars(self).update(vars(other.copy()))

    def begin_epoch(self, epoch: bytes) -> None:
        """Record the beginning of an epoch; `epoch` describes it."""
        self.draw(b"")
        self.epoch = epoch
        self.end_head()

    def end_head(self) -> None:
        """Record that the phases since the beginning of the epoch precede its draws."""
        self.head[:], self.head_between[:] = self.done, self.between

    def draw(self, batch: bytes) -> None:
        """Record the place before a draw; `batch` describes how to draw it again."""
        self.batch = batch
        self.done.clear()
        self.between.clear()

    @property
    def in_loop(self) -> bool:
        """Return whether the newest phases are those of the loop."""
        return bool(self.batch or self.epoch)

    def add(self, result: bytes, own: bytes) -> None:
        """Record a phase's result; `own`: state that the script's code after it may read."""
        if self.in_loop:
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
            epoch=self.epoch,
            head=tuple(self.head),
            head_between=tuple(self.head_between),
            own=own,
            **more,
        )


class ReplayWalk:
    """Replay of a joiner's script from its top to the place before phase n+1.

    `after`: the slot was written before the last phase's vote, so this worker must run the
    script's code after that phase itself, with `own` restored before it.
    """

    def __init__(self, slot: ProgressSlot, *, after: bool, last_result: bytes) -> None:
        self.slot = slot
        self.after = after
        self.last_result = last_result
        self._parts = [_results(slot.prelude, ())]
        if slot.epoch and slot.batch:
            self._parts.append(_results(slot.head, slot.head_between))
        if slot.epoch or slot.batch:
            self._parts.append(_results(slot.done, slot.between))
        if after:
            self._parts[-1].append((last_result, b""))  # its state is the slot's own

    @property
    def remaining(self) -> int:
        """Return the number of completed phases that the script has not reached yet, in this part
        of it."""
        return len(self._parts[0])

    def enter(self) -> None:
        """Go on to the script's next part: an epoch, or the loop over batches."""
        del self._parts[0]

    def next(self) -> tuple[bytes, bytes, bool] | None:
        """Return (result, the rank's own state after it, whether it is the last) of the next
        completed phase, or None: join here."""
        if not self._parts[0]:
            return None
        result, own = self._parts[0].pop(0)
        return result, own, not self._parts[0] and len(self._parts) == 1


def _results(done: Sequence[bytes], between: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    return list(itertools.zip_longest(done, between[: len(done)], fillvalue=b""))


def walk_from(slots: dict[str, bytes], n: int) -> ReplayWalk | None:
    """Return the walk to the place before phase n+1 from the slots of the seat's last worker."""
    if f"before:{n}" in slots:
        return ReplayWalk(ProgressSlot.unpack(slots[f"before:{n}"]), after=False, last_result=LOST)
    if f"after:{n}" in slots:
        slot = ProgressSlot.unpack(slots[f"after:{n}"])
        last = slots.get(f"result:{n}", LOST)
        return ReplayWalk(slot, after=not slot.aside, last_result=last)
    return None


POSITION_BYTES_NOTED = 1 << 20


class ProgressSlots:
    """Progress slots of one worker, and their copies in the memory of its partners."""

    def __init__(
        self,
        place: ScriptProgress,
        status: WorkerStatus,
        groups: GroupRegistry,
        protected: Callable[[], ProtectedState],
        note_once: Callable[[str, str], None],
    ) -> None:
        self._page = status.page
        self._place = place
        self._status = status
        self._protected = protected
        self._note_once = note_once
        self.partners = PartnerCopies(groups, status.page)
        self.inherited: dict[str, bytes] = {}  # slots of the rank's last worker, or of a checkpoint
        self._before_n = -1
        self._before = b""  # the newest slot `before`
        self._reported: dict[str, float] = {}  # in the slot of the newest vote
        self.copied: Callable[[], str] = lambda: ""
        self.base = ""  # the copy that the newest slot `before` names

    def connect_partners(self, generation: int, seats: tuple[int, ...]) -> None:
        """Exchange the slots of this place with the partners of a generation. Raises GroupError."""
        n = self._status.n
        slots = {**self.inherited, **self._page.slots()} if seats else {}
        keys = (f"before:{n}", f"after:{n}", f"result:{n}")
        carried = {key: slots[key] for key in keys if key in slots}
        self.partners.connect(generation, seats, n, carried)

    def write_before(self, own: bytes) -> None:
        """Write the state at the start of the next phase, once; send it with each attempt."""
        n = self._status.n
        if self._before_n != n:
            self._put_before(n, own)
        self.partners.start("before", n, {f"before:{n}": self._before})

    def _put_before(self, n: int, own: bytes) -> None:
        self.base = self.copied()
        slot = self._place.slot(n, self._status.step, own, copied=self.base).pack()
        if len(slot) > POSITION_BYTES_NOTED:
            self._note_once(
                f"this rank's own state and data position take more than 1 MiB ({len(slot)} bytes"
                f" now, {len(own)} of them state) and are written twice per phase, and in runs of"
                " several nodes sent to another host as often",
                "position",
            )
        self._page.put("before", n, slot)
        self._before_n, self._before = n, slot

    def forget_before(self) -> None:
        """Make the next attempt write the slot again, since the state has changed."""
        self._before_n = -1

    def write_after(self, attempt: PhaseAttempt, *, aside: bool) -> None:
        """Write the slot before the vote of phase n+1, unless it waits for the phase's end, and
        exchange it with the partners. Raises GroupError."""
        protected, n = self._protected(), self._status.n + 1
        if attempt.is_gated:
            protected.local.note_open_state(attempt.key)
        own = protected.own_state(attempt.choices, whole=not attempt.is_gated)
        after: dict[str, bytes] = {}
        if attempt.waits:
            attempt.buffers = codec.encode(protected.buffers.own())
            self._page.drop("after", n)  # a refused attempt may have left one
        else:
            after[f"after:{n}"] = self._put_after(attempt, own, aside=aside)
        if attempt.result:
            after[f"result:{n}"] = attempt.result
            self._page.put("result", n, attempt.result)
        elif attempt.is_gated:
            self._page.drop("result", n)  # of a refused attempt that had no vote before its end
        if self.partners:
            self._status.enter("sharing")
            self.partners.exchange("voted", n, after)

    def write_end(self, attempt: PhaseAttempt, result: bytes | None, *, aside: bool) -> None:
        """Write the result of phase n+1 (None: not encodable) and the slot that waited for the
        phase's end, or has rates that changed behind the vote for the first time."""
        protected, n, has_news = self._protected(), self._status.n + 1, False
        ended: dict[str, bytes] = {}
        if result is not None:
            ended[f"result:{n}"] = result
            if not attempt.result:
                self._page.put("result", n, result)
        if attempt.is_gated:
            changed = attempt.waits and attempt.buffers != codec.encode(protected.buffers.own())
            has_news = protected.local.completed(attempt.key, has_changed_buffers=changed)
        if attempt.waits or has_news:
            own = protected.own_state(attempt.choices)
            ended[f"after:{n}"] = self._put_after(attempt, own, aside=aside)
        elif late := [
            name
            for name, value in sorted(attempt.reports.items())
            if repr(value) != repr(self._reported.get(name))  # NaN differs from itself
        ]:
            self._note_once(
                f"{attempt.key} reports {', '.join(late)} after its optimizer's step: if a rank is"
                " lost in between, its report of that step is missing; call session.report before"
                " optimizer.step()",
                f"late reports of {attempt.key}",
            )
        self.partners.start("ended", n, ended)

    def _put_after(self, attempt: PhaseAttempt, own: bytes, *, aside: bool) -> bytes:
        n, step = self._status.n + 1, self._status.step + (attempt.kind == "step")
        self._reported = dict(attempt.reports)
        copied = "" if attempt.kind == "step" else self.copied()
        slot = self._place.slot(n, step, own, reports=attempt.reports, aside=aside, copied=copied)
        data = slot.pack()
        self._page.put("after", n, data)
        return data


SEAT_MAGIC = b"OLP4"  # docs/format.md, "A seat's part", version 4
_WITHOUT_EPOCHS = b"OLP3"
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
        """Return the part of these bytes. Raises CorruptionError if it is not of version 2 to 4."""
        magic, body = data[: len(SEAT_MAGIC)], data[len(SEAT_MAGIC) :]
        if magic not in (SEAT_MAGIC, _WITHOUT_EPOCHS, _FLAGS_ONLY):
            raise CorruptionError(
                f"{where} is not a seat's part of version 2 to 4 (starts with {data[:4]!r});"
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
                f"{where} is not a position in a run: {error}; nothing was loaded; remove it and"
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
    results = (*slot.prelude, *slot.head, *slot.done)
    batch = codec.decode(slot.batch or slot.epoch) if slot.batch or slot.epoch else {}
    batch.pop("own", None)  # state of code that the script repeats
    if slot.at_draw:  # a second copy of the generators
        batch.pop("random")
    return {
        "random": choices["random"],
        "objects": choices["objects"],
        "script": carried_variables.values_by_name(choices.get("script", {})),
        "buffers": own["buffers"],
        "local": {
            name: codec.decode(value)
            for name, value in own.get("local", {}).get("parts", {}).items()
        },
        "batch": batch,
        "results": [codec.decode(each) for each in results if each != LOST],
        "ddp": msgspec.to_builtins(part.ddp),
    }
