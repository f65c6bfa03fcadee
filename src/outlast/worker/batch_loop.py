"""Loop of `Session.batches`, with a data position that another process can take over.

A batch is a step. Before each draw the loop records its place: the source's position and the state
of the generators that the draw may use. A joiner then draws the same batch again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from outlast.checkpoint.format import codec
from outlast.data.batch_groups import open_grouped
from outlast.data.batch_source import BatchSource
from outlast.data.counted_source import Codec
from outlast.data.sampler_copies import ShareOrder, why_unequal
from outlast.errors import UsageError
from outlast.worker.auditor import Auditor
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.batch_use import BatchUse
from outlast.worker.phases.commit_gate import must_not_nest
from outlast.worker.phases.phase_runner import PhaseRunner
from outlast.worker.phases.rank_deal import RankDeal
from outlast.worker.phases.script_progress import ReplayWalk, ScriptProgress
from outlast.worker.save_timing import SaveTimer
from outlast.worker.script.loop_headers import continued, generators_suspended
from outlast.worker.script.script_variables import ScriptVariables
from outlast.worker.script.weight_reads import WeightReads
from outlast.worker.state import generator_states
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_status import WorkerStatus

_OTHER_LOOP = (
    "the place that is continued is in a loop over {}, and the script now loops over {}: continue"
    " with the loop that the run began with, or start a new run directory"
)
ENDLESS = 1 << 31  # epochs of a loop whose script has no number of them
_TURNS_WATCHED = 2  # epochs at whose beginnings reads of weights are looked for
_LENGTH_AND_ORDER = msgspec.msgpack.Decoder(tuple[int, ShareOrder])


class BatchLoop:
    """Training loop: epochs over a source until `until` steps or `epochs` epochs are done, or the
    script's own loop over `epochs`, with one of batches in each."""

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
        self._reads = WeightReads()
        self._is_of_batch = False  # the phase under way works on the newest batch
        self._started = False
        self._has_drawn = False
        self._source: BatchSource | None = None
        self._loader: Any = None
        self._turns: int | None = None  # epochs of the script's loop over them
        self._turn = 0  # the current one
        self._rest = range(0)  # its number and the next ones
        self._has_begun = False  # its loop over batches
        self._is_first = True  # no loop over batches has begun in this process
        self.index = 0  # of the newest batch, in its epoch
        self._newest: dict[str, Any] = {}  # description of the newest draw

    def run(self, loader: Any, until: int | None, epochs: int | None) -> Iterator[Any]:
        """Yield batches to the script's loop: of one epoch, inside a loop over `epochs`."""
        must_not_nest("session.batches", self._phases.attempt)
        if self._turns is not None:
            self._needs_end(loader, until)
            if epochs is not None:
                raise UsageError(
                    "session.batches(..., epochs=...) inside a loop over session.epochs: each"
                    " iteration is one epoch; leave epochs out"
                )
            yield from self._one_epoch(loader, until)
            return
        self._start()
        if until is None and epochs is None:
            raise UsageError(
                "session.batches(loader) needs until=STEPS or epochs=EPOCHS, or a loop over"
                " session.epochs(...) around it"
            )
        self._needs_end(loader, until)
        source = self._open(loader)
        self._timeline.loop(until, epochs, source.length)
        yield from self._until_left(self._epochs(source, until, epochs))

    def _needs_end(self, loader: Any, until: int | None) -> None:
        if loader is None and until is None:
            raise UsageError("session.batches(None) has no end: it needs until=STEPS")

    def epochs(self, numbers: range) -> Iterator[int]:
        """Yield the numbers of epochs to the script's loop over them."""
        must_not_nest("session.epochs", self._phases.attempt)
        self._start()
        self._script.at_epoch()
        first, resumed = 0, False
        walk = self._joining.walk
        if walk is not None and walk.slot.epoch:
            walk.enter()
            place = codec.decode(walk.slot.epoch)
            self._place.prelude[:] = walk.slot.prelude
            self._place.epoch = walk.slot.epoch
            self._joining.recover()
            self._status.step = place["step"]
            self._joining.restore_drawn(place["own"])
            generator_states.restore(place["random"], self._phases.generators())
            first, resumed = place["turn"], True
            numbers = continued(numbers, place.get("rest"), first)
        elif walk is not None and walk.slot.batch:
            raise UsageError(_OTHER_LOOP.format("session.batches alone", "session.epochs"))

        self._turns = first + len(numbers)

        def turns() -> Iterator[int]:
            for self._turn in range(first, first + len(numbers)):
                self._rest = numbers[self._turn - first :]
                self.pending, self._has_begun, self._newest = False, False, {}
                again = resumed and self._turn == first
                if not again:
                    self._place.begin_epoch(self._describe_epoch())
                if self._turn < _TURNS_WATCHED or (again and walk is not None and walk.slot.batch):
                    self._watch(self._refuse_head)
                yield self._rest[0]

        yield from self._until_left(turns())

    def _start(self) -> None:
        if self._started:
            raise UsageError(
                "a run has one training loop, and a second one has begun: session.batches() was"
                " called twice outside of session.epochs(), or session.epochs() twice. Make stages"
                " of training one loop (session.epochs(FIRST + SECOND)), or a run each; loop over"
                " other loaders inside a function that you give to session.run"
            )
        self._started = True

    def _until_left(self, turns: Iterator[Any]) -> Iterator[Any]:
        """Yield from a loop until it ends, or the script leaves it."""
        try:
            yield from turns
        except GeneratorExit:  # the script has left the loop
            self._leave()
            raise
        else:
            self._leave()
        finally:
            self._reads.end()
            if self._source is not None:
                self._source.close()

    def _watch(self, on_read: Callable[[], None]) -> None:
        modules = self._phases.protected_state().modules.values()
        self._reads.watch(modules, on_read)

    def _refuse_head(self) -> None:
        self._script.refuse(
            "code between session.epochs and its loop over batches reads the weights of a protected"
            " module, and a replacement worker repeats that code with the weights of a later step",
            "give it to session.run as a function, or move it behind the loop over batches",
        )

    def _watch_walk(self) -> None:
        """Watch code that this worker repeats, although the phase behind it is complete."""
        if (walk := self._joining.walk) is not None and walk.remaining:
            self._watch(self._joining.must_not_read_weights)

    def _leave(self) -> None:
        has_state = self._joining.leave_loop()
        self._auditor.loop_ended(not self.pending and has_state)

    def _open(self, loader: Any) -> BatchSource:
        """Return the source of a loader, which stays that of the loop while the loader does."""
        if self._source is None or self._loader is not loader:
            if self._source is not None:
                self._source.close()
            messages, sets_epochs = Codec(codec.encode, codec.decode), self._turns is None
            self.ranks.set_loader(loader, messages, sets_epochs=sets_epochs)
            self._source, self._loader = open_grouped(loader, messages), loader
            self._source.sets_epochs = sets_epochs
            if self._source.note:
                self._timeline.note_once(self._source.note, "loader")
        return self._source

    def _describe_epoch(self) -> bytes:
        """Return a description of the beginning of an epoch."""
        place = {
            "turn": self._turn,
            "rest": [self._rest.start, self._rest.stop, self._rest.step],
            "step": self._status.step,
            "random": generator_states.capture(self._phases.generators()),
            "own": self._joining.at_draw(),
        }
        return codec.encode(place)

    def _one_epoch(self, loader: Any, until: int | None) -> Iterator[Any]:
        """Yield the batches of the current epoch of `epochs`."""
        turn = self._turn
        if self._has_begun:
            raise UsageError(
                "session.batches() was called twice in one epoch: an epoch has one training loop"
                " (loop over other loaders inside a function that you give to session.run)"
            )
        self._has_begun = True
        self._reads.end()
        source = self._open(loader)
        walk = self._joining.walk
        again = self._is_first and walk is not None and bool(walk.slot.batch)
        if self._is_first:
            turns = None if self._turns == ENDLESS else self._turns
            self._timeline.loop(until, turns, source.length)
        self._is_first = False
        if walk is not None and again:
            self._place.head[:] = walk.slot.head
            self._place.head_between[:] = walk.slot.head_between
            length = self._resume(source, walk)["length"]
        else:
            self._place.end_head()
            length = self._start_epoch(source, turn)
        try:
            for batch in self._batches(source, turn, length, until, again):
                yield batch
                if self._turn != turn:
                    raise UsageError(f"a batch of epoch {turn} was drawn after that epoch's end")
        finally:
            if self._turn == turn:
                self.pending = False  # the script may have left the loop at a batch

    def _epochs(self, source: BatchSource, until: int | None, epochs: int | None) -> Iterator[Any]:
        epoch, again = 0, False
        length: int | None = None
        walk = self._joining.walk
        if walk is not None and walk.slot.epoch:
            raise UsageError(_OTHER_LOOP.format("session.epochs", "session.batches alone"))
        if walk is not None and walk.slot.batch:
            self._place.prelude[:] = walk.slot.prelude
            batch = self._resume(source, walk)
            epoch, length, again = batch["epoch"], batch["length"], True
        while epochs is None or epoch < epochs:
            if until is not None and self._status.step >= until:
                return
            if not again:
                length = self._start_epoch(source, epoch)
            yield from self._batches(source, epoch, length, until, again)
            again = False
            epoch += 1

    def _start_epoch(self, source: BatchSource, epoch: int) -> int | None:
        """Start an epoch with all ranks; return its length."""
        source.start_epoch(epoch, None)
        length, absent = self._agree_on_length(source, epoch)
        source.set_length(length)
        self.ranks.begin_epoch(length, self._status.step, absent)
        self.index = 0
        return length

    def _resume(self, source: BatchSource, walk: ReplayWalk) -> dict[str, Any]:
        """Go to the place of a walk; return the description of its draw."""
        walk.enter()
        batch = codec.decode(walk.slot.batch)
        is_dealt = self.ranks.take_place(batch, batch["length"])
        if self._status.is_open:  # a restart: ranks that the checkpoint lacks are there
            self.ranks.follow(walk.slot.step)
        self._joining.recover()
        self._status.step, self.index = batch["step"], batch.get("index", 0)
        source.start_epoch(batch["epoch"], batch["length"])
        if not is_dealt:
            source.seek(batch["position"])
        if walk.slot.at_draw:
            self._joining.begin_from_copy()
        else:
            self._joining.restore_drawn(batch["own"])
            generator_states.restore(batch["random"], self._phases.generators())
        return batch

    def _batches(
        self, source: BatchSource, epoch: int, length: int | None, until: int | None, again: bool
    ) -> Iterator[Any]:
        """Yield one epoch's batches. `again`: a joiner draws the first one a second time."""
        while again or until is None or self._status.step < until:
            must_not_nest("a draw of session.batches", self._phases.attempt)
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
            self._use.draw(batch[0], is_second=self.pending)
            self.pending = True
            self.batch = batch[0]
            self.first_batch = None if self._has_drawn else batch[0]
            self._has_drawn = True
            self._script.at_top()
            self._watch_walk()
            with generators_suspended():
                yield batch[0]
            self._reads.end()
            self.index += 1

    def _describe(self, source: BatchSource, epoch: int, length: int | None) -> bytes:
        """Return a description of the next batch, from which another process can draw it."""
        self._newest = {
            "epoch": epoch,
            "length": length,
            "step": self._status.step,
            "index": self.index,
            "position": source.position(),
            "random": generator_states.capture(self._phases.generators()),
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
        self._reads.end()
        if self.pending:
            self._use.step(call)
        joining = self._joining
        trains = key in joining.rehearsed_here or key in joining.rehearsed_elsewhere
        self._is_of_batch = self.pending or trains or self._use.holds(call)

    def end_phase(self) -> None:
        """Go on behind a phase of the script."""
        self.pending = False
        self._watch_walk()

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
