"""Loop of `Session.batches`, with a data position that another process can take over.

A batch is a step. Before each draw the loop records its place: the source's position and the state
of the generators that the draw may use. A joiner then draws the same batch again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from outlast.checkpoint.format import codec
from outlast.data.batch_source import BatchSource, open_source
from outlast.data.counted_source import Codec
from outlast.data.sampler_copies import ShareOrder, why_unequal
from outlast.errors import UsageError
from outlast.worker.auditor import Auditor
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.batch_use import BatchUse
from outlast.worker.phases.phase_runner import PhaseRunner
from outlast.worker.phases.rank_deal import RankDeal
from outlast.worker.phases.script_progress import ScriptProgress
from outlast.worker.save_timing import SaveTimer
from outlast.worker.script.script_variables import ScriptVariables
from outlast.worker.state import protected_state
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_status import WorkerStatus

_LENGTH_AND_ORDER = msgspec.msgpack.Decoder(tuple[int, ShareOrder])


class BatchLoop:
    """Training loop: epochs over a source until `until` steps or `epochs` epochs are done."""

    def __init__(
        self,
        *,
        phases: PhaseRunner,
        place: ScriptProgress,
        status: WorkerStatus,
        groups: GroupRegistry,
        timeline: WorkerEvents,
        saver: SaveTimer,
        script: ScriptVariables,
        auditor: Auditor,
    ) -> None:
        self._phases, self._place, self._status = phases, place, status
        self._joining = phases.joining
        self._groups, self._timeline = groups, timeline
        self._saver, self._script, self._auditor = saver, script, auditor
        self.pending = False  # a batch was drawn and its phase is not complete
        self.batch: Any = None  # the newest one
        self.first_batch: Any = None  # until its phase is complete
        self.ranks = RankDeal(groups, timeline.note_once)
        self._use = BatchUse()
        self._is_of_batch = False  # the phase under way works on the newest batch
        self._started = False
        self._has_drawn = False
        self._newest: dict[str, Any] = {}  # description of the newest draw

    def run(self, loader: Any, until: int | None, epochs: int | None) -> Iterator[Any]:
        """Yield batches to the script's loop."""
        if self._started:
            raise UsageError(
                "session.batches() was called twice: a run has one training loop (loop over other"
                " loaders inside a function that you give to session.run)"
            )
        if until is None and epochs is None:
            raise UsageError("session.batches(loader) needs until=STEPS or epochs=EPOCHS")
        if loader is None and until is None:
            raise UsageError("session.batches(None) has no end: it needs until=STEPS")
        self._started = True
        messages = Codec(codec.encode, codec.decode)
        self.ranks.set_loader(loader, messages)
        source = open_source(loader, messages)
        if source.note:
            self._timeline.note(source.note)
        self._timeline.loop(until, epochs, source.length)
        try:
            yield from self._epochs(source, until, epochs)
        except GeneratorExit:  # the script has left the loop
            self._leave()
            raise
        else:
            self._leave()
        finally:
            source.close()

    def _leave(self) -> None:
        self._joining.leave_loop()
        self._auditor.loop_ended(not self.pending and self._joining.walk is None)

    def _epochs(self, source: BatchSource, until: int | None, epochs: int | None) -> Iterator[Any]:
        epoch, resumed, again = 0, False, False
        length: int | None = None
        walk = self._joining.walk
        if walk is not None and walk.slot.batch:
            walk.in_loop = True
            batch = codec.decode(walk.slot.batch)
            self._place.prelude[:] = walk.slot.prelude
            is_dealt = self.ranks.take_place(batch, batch["length"])
            if self._status.is_open:  # a restart: ranks that the checkpoint lacks are there
                self.ranks.follow(walk.slot.step)
            self._joining.recover()
            if until is not None and batch["step"] >= until:
                return
            epoch, resumed, again = batch["epoch"], True, True
            source.start_epoch(epoch, batch["length"])
            if not is_dealt:
                source.seek(batch["position"])
            self._status.step = batch["step"]
            length = batch["length"]
            if walk.slot.at_draw:
                self._joining.begin_from_copy()
            else:
                self._joining.restore_drawn(batch["own"])
                protected_state.restore(batch["random"], self._phases.generators())
        while epochs is None or epoch < epochs:
            if not resumed:
                if until is not None and self._status.step >= until:
                    return
                source.start_epoch(epoch, None)
                length, absent = self._agree_on_length(source, epoch)
                source.set_length(length)
                self.ranks.begin_epoch(length, self._status.step, absent)
            resumed = False
            yield from self._batches(source, epoch, length, until, again)
            again = False
            if until is not None and self._status.step >= until:
                return
            epoch += 1

    def _batches(
        self, source: BatchSource, epoch: int, length: int | None, until: int | None, again: bool
    ) -> Iterator[Any]:
        """Yield one epoch's batches. `again`: a joiner draws the first one a second time."""
        while again or until is None or self._status.step < until:
            if not again and not self.ranks.go_on(self._status.step, skips=self.pending):
                return
            place = self._describe(source, epoch, length)
            if not again:
                self._saver.end_step(place)
            again = False
            if self.ranks.is_dealt:  # perhaps since that save
                place = self._describe(source, epoch, length)
            self._place.draw(place)
            try:
                batch = (self.ranks.load() if self.ranks.is_dealt else source.next(),)
            except StopIteration:
                batch = ()
            if length is None and not self._all_have(bool(batch)):
                batch = ()
            if not batch:
                return
            self.pending = True
            self._use.draw(batch[0])
            self.batch = batch[0]
            self.first_batch = None if self._has_drawn else batch[0]
            self._has_drawn = True
            self._script.at_top()
            yield batch[0]

    def _describe(self, source: BatchSource, epoch: int, length: int | None) -> bytes:
        """Return a description of the next batch, from which another process can draw it."""
        self._newest = {
            "epoch": epoch,
            "length": length,
            "step": self._status.step,
            "position": source.position(),
            "random": protected_state.capture(self._phases.generators()),
            "own": self._joining.at_draw(),
        }
        return codec.encode(self._newest | self.ranks.place())

    def follow_ranks(self, step: int) -> None:
        """Follow a change of the ranks that are present, at a place with `step` committed steps."""
        if self.ranks.follow(step) and self._newest:
            self._place.batch = codec.encode(self._newest | self.ranks.place())
            self._phases.slots.forget_before()

    def begin_phase(self, key: str, call: Callable[[], Any]) -> None:
        """Note whether a phase of the script works on the newest batch: as its step, as a step of
        another optimizer, or since it gets or reads the batch."""
        if self.pending:
            self._use.step(call)
        joining = self._joining
        trains = key in joining.rehearsed_here or key in joining.rehearsed_elsewhere
        self._is_of_batch = self.pending or trains or self._use.holds(call)

    def idle_ranks(self, kind: str) -> frozenset[int]:
        """Return the ranks without a batch in a phase of this kind."""
        is_of_batch = self._is_of_batch and kind in ("step", "eval")
        return self.ranks.idle() if is_of_batch else frozenset()

    def _agree_on_length(self, source: BatchSource, epoch: int) -> tuple[int | None, list[int]]:
        """Return the length of an epoch, and the ranks that are absent at its beginning. Compare
        the orders in which ranks read their batches."""
        source_length, order = source.length, self.ranks.order(epoch)

        def agree() -> tuple[int | None, list[int], str]:
            own = self.ranks.shortest(source_length, epoch) or -1
            packed = self._groups.gather_bytes(msgspec.msgpack.encode((own, order)))
            found = [_LENGTH_AND_ORDER.decode(each) for each in packed]
            shortest = min(length for length, _ in found)
            absent = sorted(self._groups.presence.absent)
            unequal = why_unequal(order for _, order in found)
            return (shortest if shortest >= 0 else None), absent, unequal

        if self._groups.world == 1:
            return source_length, []
        found = self._phases.run(agree, key=f"outlast.epoch.{epoch}", kind="epoch")
        if not isinstance(found, tuple):  # of a checkpoint of before
            found = found, []
        self.ranks.set_order(epoch, order, *found[2:] or ("",))
        return found[0], found[1]

    def _all_have(self, mine: bool) -> bool:
        if self._groups.world == 1:
            return mine

        def agree() -> bool:
            return all(x == b"1" for x in self._groups.gather_bytes(b"1" if mine else b"0"))

        return self._phases.run(agree, key="outlast.draw", kind="draw")
