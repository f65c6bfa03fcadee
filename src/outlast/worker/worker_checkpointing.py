"""Checkpoints of a whole job between steps: copied in a phase, written by keepers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from outlast import events
from outlast.checkpoint.format.manifests import Lineage, SavePoint
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_disk import DiskFault
from outlast.checkpoint.keeper.keeper_frames import Outcome
from outlast.checkpoint.save import agreed_plan
from outlast.checkpoint.save.save_engine import SaveEngine
from outlast.checkpoint.state.state_content import StateContent, flatten_state, rank_buffers
from outlast.checkpoint.stores.catalog import lineage_of
from outlast.checkpoint.stores.folder_store import Folder
from outlast.config import WorkerSettings
from outlast.controller.fault_spec import Where
from outlast.errors import CorruptionError, OutlastError, StorageError, UsageError
from outlast.transport import messages
from outlast.worker.checkpoint_restore import keeper_address
from outlast.worker.compute_environment import author
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.script_progress import Intervals, ProgressSlot, RankPart
from outlast.worker.save_timing import StepRhythm
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_status import WorkerStatus

NEWS_S = 1.0
OWN_BYTES = 64 << 10  # about what a seat's part takes at first


class _SaveProposal(msgspec.Struct, frozen=True, array_like=True):
    """Message of a rank before a save: why it cannot, whether it has room to copy at once, when it
    would save next, and where this save stands. Of the last two rank 0's word counts."""

    failure: str
    ready: bool
    every: Intervals
    place: SavePoint
    parent: str
    base: str


class _CopiedSave(NamedTuple):
    place: SavePoint
    begin_s: float
    prepared: bool  # something was made or compared as well, which no later save does


class RunCheckpointer:
    """One rank's saves: all ranks copy in one phase, and each one's keeper writes on its own."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        seat: int,
        groups: GroupRegistry,
        status: WorkerStatus,
        timeline: WorkerEvents,
        send: Callable[[messages.WorkerBody], None],
        watch: Callable[[Where], None],
        shared: Mapping[str, bytes],
        stays: Callable[[SavePoint | None], bool],
        origin: SavePoint | None = None,
    ) -> None:
        """`stays`: which versions of this seat's workers before this one are of use, until a save
        of this one's is complete. `origin`: what this worker began again from, if anything."""
        self._shared, self._stays, self._origin = shared, stays, origin
        self._lineage: Lineage | None = None
        self._settings, self._seat = settings, seat
        self._root = Path(settings.run_dir) / "checkpoints"
        self._groups, self._status, self._timeline = groups, status, timeline
        self._send, self._watch = send, watch
        self._engine: SaveEngine | None = None
        self._reserved = False
        self._author: dict[str, str] = {}
        self._generation = 0  # in which the ranks last compared what they hold
        self._copied: _CopiedSave | None = None
        self._pending: set[int] = set()
        self._void: set[SavePoint] = set()
        self._telling = threading.Lock()
        self._flushing: dict[
            SavePoint, float
        ] = {}  # those on their way to the disk: what they blocked
        self._fewer = False  # peers held the last version than were asked to
        self.rhythm = StepRhythm()

    def save(
        self, protected: ProtectedState, slot: ProgressSlot, *, to_disk: bool, propose: Intervals
    ) -> Intervals:
        """Inside a phase. A disk that fails costs this checkpoint and nothing else: it is said,
        older checkpoints stay, and training goes on. A copy in memory is left out where a rank has
        no room for it yet. Returns when to save from here on, as rank 0 proposes."""
        status = self._status
        if self._copied:  # that attempt was refused: nobody waits for what becomes of it
            self._void.add(self._copied.place)
            self._flushing.pop(self._copied.place, None)
        self._copied = None
        place = SavePoint(status.step, status.n, f"t{self._settings.term}g{status.generation}")
        parent = base = ""
        begin_s, failure, faults = time.monotonic(), "", self._disk_faults(to_disk)
        state = protected.content()
        content = flatten_state(state)
        # What is a rank's own is in its slot: small buffers, or all where weights differ by rank.
        apart = rank_buffers(state) if protected.local.has_replicas else content.tensors
        prepared = True
        try:
            prepared = self._prepare(content, apart)
            if self._seat == 0:
                place, parent, base = self._next(place)
        except (CorruptionError, StorageError, UsageError) as error:
            failure = str(error)
        ready = self._engine is not None and self._engine.ready
        answers = self._agree(_SaveProposal(failure, ready, propose, place, parent, base))
        place = answers[0].place
        failures = [
            f"rank {rank}: {each.failure}" for rank, each in enumerate(answers) if each.failure
        ]
        every = answers[0].every
        # All compare again once one could not prepare: it would else wait for them alone.
        self._generation = 0 if failures else status.generation
        if failures:
            self._failed(place, "; ".join(failures))
        elif to_disk or all(each.ready for each in answers):
            assert self._engine is not None
            part = RankPart(
                msgspec.structs.replace(slot, every=every).pack(),
                protected.reducers.states(),
                dict(self._shared),
            )
            if to_disk:
                self._flushing[place] = 0.0  # before it can be told that this has ended
            save = self._engine.save(
                place,
                content.tensors,
                shared=content.shared,
                own=part.pack(),
                origin=self._author,
                parent=parent,
                base=base,
                apart=apart,
                to_disk=to_disk,
                faults=faults,
            )
            self._pending.add(save)
            self._copied = _CopiedSave(place, begin_s, prepared)
        return every

    def reserve(self, protected: ProtectedState) -> None:
        """Have the memory for saves made beside the steps before the first one. Nothing is said to
        other ranks; what fails here is tried again, and told, at the first save."""
        if self._engine or self._reserved:
            return
        self._reserved = True
        with suppress(OutlastError):
            self._start().reserve(_tensors(protected), 2 * OWN_BYTES, range(self._settings.world))

    def _disk_faults(self, to_disk: bool) -> tuple[DiskFault, ...]:
        try:
            if to_disk:
                self._watch("checkpoint")
        except OSError:  # `--fault full`: it is the keeper's disk that is to be full
            return (DiskFault("ENOSPC", step="write"),)
        return ()

    def _prepare(self, content: StateContent, apart: Collection[str]) -> bool:
        """Everything that can fail on one rank alone, before the ranks agree to copy; whether
        there was more to do than usual."""
        anew = self._status.generation != self._generation
        try:
            first = not self._author
            engine = self._engine or self._start()
            if first:
                self._author = author()  # the script has set by now what it sets
        except StorageError as error:
            agreed_plan.refuse(str(error), self._groups.gather_bytes)  # the others wait to compare
            raise
        if anew:
            engine.agree_anew()  # somebody may be new, and has not compared anything yet
        engine.prepare(content.tensors, len(content.shared) + OWN_BYTES, apart)
        return anew

    def _next(self, place: SavePoint) -> tuple[SavePoint, str, str]:
        """Return this save's place among those of the directory, its parent and its base."""
        if self._lineage is None:
            self._lineage = lineage_of(Folder(self._root), self._origin)
        return self._lineage.go_on(place.step, place.n, place.attempt)

    def _agree(self, mine: _SaveProposal) -> list[_SaveProposal]:
        answers = self._groups.gather_bytes(msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(each, type=_SaveProposal) for each in answers]

    def complete(self) -> None:
        """The phase is complete: every rank has copied its part."""
        copied, self._copied = self._copied, None
        if copied and self._engine:
            self._engine.complete()
        if copied and self._seat == 0:
            blocked_s = 0.0 if copied.prepared else time.monotonic() - copied.begin_s
            place = copied.place
            with self._telling:
                if place in self._flushing:
                    self._flushing[place] = blocked_s
            self._send(
                messages.Checkpointed(
                    n=place.n,
                    step=place.step,
                    path=place.directory,
                    tier="memory",
                    blocking_s=blocked_s,
                    step_s=self.rhythm.step_s,
                )
            )

    @property
    def flushing(self) -> bool:
        """Return whether a checkpoint is on its way to the disk, as far as this rank knows."""
        return bool(self._flushing)

    def poll(self) -> None:
        """Tell what has become of saves."""
        with self._telling:
            for outcome in self._engine.outcomes() if self._engine else ():
                if outcome.kind == "copied":
                    self._copied_to_peers(outcome)
                    continue
                if outcome.kind == "written" and outcome.error:
                    self._timeline.note(outcome.error)
                if outcome.kind == "written" and self._seat == 0:
                    continue  # its commit is still to come
                self._pending.discard(outcome.save)
                if self._seat != 0:
                    self._flushing.pop(outcome.place, None)
                if outcome.kind == "committed":
                    self._saved(outcome.place, outcome)
                elif outcome.kind in ("failed", "skipped"):
                    self._failed(outcome.place, outcome.error)

    def _report(self) -> None:
        """On a thread of its own: a save's end is told when it is known, however long the script's
        step takes."""
        assert self._engine
        while True:
            if self._engine.wait_news(NEWS_S):
                self.poll()

    def settle(self, timeout_s: float) -> None:
        """Wait until this rank's saves have ended, at most so long, and tell of them. What has not
        ended by then its keeper goes on with."""
        until_s = time.monotonic() + timeout_s
        for save in list(self._pending):
            try:
                assert self._engine
                self._engine.wait(save, max(0.0, until_s - time.monotonic()))
            except StorageError as error:
                self._timeline.note(str(error))
        self.poll()

    def _start(self) -> SaveEngine:
        settings = self._settings
        keeper = KeeperClient.connect(
            keeper_address(settings, self._seat), settings.token, f"rank {self._seat}"
        )
        keeper.forget(self._stays)
        self._engine = SaveEngine(
            self._root,
            rank=self._seat,
            world=settings.world,
            job=settings.run,
            exchange=self._groups.gather_bytes,
            keeper=keeper,
            save_s=settings.limits.save_s,
        )
        if self._seat == 0:
            threading.Thread(target=self._report, name="outlast-saves", daemon=True).start()
        return self._engine

    def _saved(self, place: SavePoint, outcome: Outcome) -> None:
        path = str(self._root / place.directory)
        self._send(
            messages.Checkpointed(
                n=place.n,
                step=place.step,
                path=path,
                flush_s=outcome.seconds,
                blocking_s=self._flushing.pop(place, 0.0),
                drag_s=self.rhythm.drag_s(),
                step_s=self.rhythm.step_s,
            )
        )
        self._timeline.emit(
            events.CheckpointSaved(
                t_ns=self._timeline.now_ns(),
                n=place.n,
                step=place.step,
                path=path,
                size_bytes=outcome.size_bytes,
                seconds=outcome.seconds,
            )
        )

    def _copied_to_peers(self, outcome: Outcome) -> None:
        """Fewer copies than asked are said once, until all are there again."""
        if outcome.error and not self._fewer:
            lacking = (
                f"{outcome.copies} of {outcome.strips} strips are in the parity of its group"
                if outcome.strips
                else f"fewer copies in memory than asked ({outcome.copies} beside this rank's own"
                " keeper's)"
            )
            self._timeline.note(
                f"step {outcome.place.step}: {lacking}: {outcome.error}; training goes on, and the"
                " next version is sent to all of them again"
            )
        self._fewer = bool(outcome.error)

    def _failed(self, place: SavePoint, error: str) -> None:
        if self._seat != 0 or place in self._void:
            return  # one rank speaks for all
        self._flushing.pop(place, None)
        self._send(messages.SaveFailed(n=place.n, step=place.step, error=error))
        self._timeline.emit(
            events.CheckpointFailed(
                t_ns=self._timeline.now_ns(),
                n=place.n,
                step=place.step,
                path=str(self._root / place.directory),
                error=error,
            )
        )


def _tensors(protected: ProtectedState) -> dict[str, torch.Tensor]:
    """Almost what a save holds, under names of no meaning; no code of the script's runs."""
    found: dict[str, torch.Tensor] = {}
    for name, module in protected.modules.items():
        tensors = [*module.named_parameters(), *module.named_buffers()]
        found |= {f"{name}.{inside}": tensor for inside, tensor in tensors}
    for name, optimizer in protected.optimizers.items():
        states = [each for each in optimizer.state.values() if isinstance(each, Mapping)]
        found |= {
            f"{name}.state.{number}.{key}": value
            for number, state in enumerate(states)
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
    return found
