"""Saves of one rank under `outlast run`: copied in a phase, written by keepers."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from outlast import events
from outlast.checkpoint.format.manifests import Lineage, SavePoint
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_disk import DiskFault
from outlast.checkpoint.keeper.keeper_frames import Outcome
from outlast.checkpoint.save import agreed_plan
from outlast.checkpoint.save.save_driver import SaveDriver
from outlast.checkpoint.save.save_request import SaveRequest, SaveSettings
from outlast.checkpoint.state_content import StateContent, flatten_state, rank_buffers
from outlast.checkpoint.stores.catalog import lineage_of
from outlast.checkpoint.stores.folder_store import Folder
from outlast.config import WorkerSettings
from outlast.controller.fault_spec import Where
from outlast.errors import CorruptionError, OutlastError, StorageError, UsageError
from outlast.transport import messages
from outlast.worker.checkpoint_restore import keeper_address
from outlast.worker.compute_environment import author
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.absent_parts import AbsentParts, SaveProposal
from outlast.worker.phases.script_progress import Intervals, ProgressSlot, RankPart
from outlast.worker.save_timing import StepRhythm
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_events import memory_copied, peers_copied
from outlast.worker.worker_status import WorkerStatus

_NEWS_S = 1.0
_RANK_BYTES = 64 << 10  # estimated size of a rank's part


class _CopiedSave(NamedTuple):
    """A save whose phase is not complete yet.

    `prepared`: memory was allocated or tables compared, which later saves do not repeat.
    """

    place: SavePoint
    begin_s: float
    prepared: bool


class CheckpointOwner(Protocol):
    """A worker's methods that its saves need."""

    def send(self, body: messages.WorkerBody) -> None:
        """Send a message to the controller. Raises WireError."""

    def reach(self, where: Where) -> None:
        """Fire injected faults that are due at `where`."""

    def now_ns(self) -> int:
        """Return the time of the run's clock."""
        ...

    def note(self, text: str, *, warning: bool = True) -> None:
        """Add a note for the user to the run's events."""

    def copied(self, place: SavePoint, content: StateContent) -> None:
        """Record that this rank has copied its part."""

    def record(self, event: events.AnyEvent) -> None:
        """Add an event to the run's events."""


class RunCheckpointer:
    """One rank's saves under `outlast run`.

    All ranks copy in one phase; each rank's keeper writes its copy alone.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        groups: GroupRegistry,
        status: WorkerStatus,
        owner: CheckpointOwner,
        shared: Mapping[str, bytes],
        *,
        absent: AbsentParts,
        joins: bool = False,
        begun_at: SavePoint | None = None,
    ) -> None:
        """Create the checkpointer of one rank.

        `shared`: values that all ranks share. `absent`: of the ranks without a worker. `joins`:
        this worker replaces another in a running generation. `begun_at`: the checkpoint that this
        worker was restored from, if any.
        """
        self._settings = settings
        self._seat = groups.seat
        self._groups = groups
        self._status = status
        self._owner = owner
        self._shared = shared
        self._absent = absent
        self._joins = joins
        self._begun_at = begun_at
        self._lineage: Lineage | None = None
        self._root = Path(settings.checkpoints or f"{settings.run_dir}/checkpoints")
        self._driver: SaveDriver | None = None
        self._reserved = self._reports = False
        self._origin: dict[str, str] = {}
        self._generation = 0  # of the last comparison of tables
        self._copied: _CopiedSave | None = None
        self._refused: set[SavePoint] = set()
        self._outcomes = threading.Lock()  # around polls, and `_flushing`
        self._flushing: dict[SavePoint, float] = {}  # saves that are being written: seconds blocked
        self._lacks_copies = False
        self.rhythm = StepRhythm()

    def save(
        self, protected: ProtectedState, slot: ProgressSlot, *, to_disk: bool, propose: Intervals
    ) -> Intervals:
        """Copy the state and order its write, inside a phase; return the next intervals.

        A failing disk costs this checkpoint alone: the failure is reported, older checkpoints stay,
        and training continues. A copy in memory is skipped if a rank lacks memory for it. Rank 0
        proposes the intervals.
        """
        status = self._status
        if self._copied:  # the vote refused that attempt: its outcome is not reported
            self._refused.add(self._copied.place)
            self._flushing.pop(self._copied.place, None)
        self._copied = None
        begin_s = time.monotonic()
        place = SavePoint(status.step, status.n, f"t{status.term}g{status.generation}")
        parent = base = failure = ""
        faults = self._disk_faults(to_disk)
        state = protected.content()
        content = flatten_state(state)
        # A rank's own tensors are in its slot: small buffers, or all if weights differ by rank.
        rank_specific = rank_buffers(state) if protected.local.has_replicas else content.tensors
        prepared = True
        try:
            prepared = self._prepare(content, rank_specific, is_staged=bool(protected.pipeline))
            if self._absent.leads:
                place, parent, base = self._next(place)
        except (CorruptionError, StorageError, UsageError) as error:
            failure = str(error)
        ready = self._driver is not None and self._driver.is_ready
        packed = slot.pack() if self._absent.is_place else b""
        mine = SaveProposal(failure, ready, propose, place, parent, base, packed)
        answers = self._absent.agree(mine)
        failures = self._absent.failures(answers)
        _, _, every, place, parent, base, _ = msgspec.structs.astuple(answers[0])
        if not answers[0].failure:  # rank 0 may be absent at the next save, or back
            self._lineage = Lineage(place.line, base, place.directory, place.position)
        # After a failure all ranks compare again, since a rank that failed alone would wait alone.
        self._generation = 0 if failures else status.generation
        if failures and self._absent.leads:
            self._report_failure(place, "; ".join(failures))
        elif not failures and (to_disk or all(answer.ready for answer in answers)):
            driver = self._reporting_driver()
            slots = {self._seat: slot} | self._absent.slots(answers)
            parts = self._pack_parts(protected, slots, every)
            if to_disk:
                self._flushing[place] = 0.0  # before its outcome can arrive
            driver.save(
                SaveRequest(
                    place,
                    content.tensors,
                    shared=content.shared,
                    own=parts.pop(self._seat),
                    origin=self._origin,
                    parent=parent,
                    base=base,
                    rank_specific=rank_specific,
                    to_disk=to_disk,
                    faults=faults,
                ),
                parts,
            )
            self._copied = _CopiedSave(place, begin_s, prepared)
            self._owner.copied(place, content)
        return every

    def _pack_parts(
        self, protected: ProtectedState, slots: Mapping[int, ProgressSlot], every: Intervals
    ) -> dict[int, bytes]:
        """Return the parts with these slots, by rank."""
        ddp, shared = protected.reducers.states(), dict(self._shared)
        packed = {
            rank: msgspec.structs.replace(each, every=every).pack() for rank, each in slots.items()
        }
        return {rank: RankPart(slot, ddp, shared).pack() for rank, slot in packed.items()}

    def _reporting_driver(self) -> SaveDriver:
        """Return the driver, whose outcomes are reported at once where this rank leads."""
        assert self._driver is not None
        if self._absent.leads and not self._reports:
            self._reports = True
            report = partial(self._report_outcomes, self._driver)
            threading.Thread(target=report, name="outlast-saves", daemon=True).start()
        return self._driver

    def reserve(self, protected: ProtectedState) -> None:
        """Allocate the memory for saves in the background, before the first one.

        Ranks do not communicate. An error here is dropped: the first save tries again, and
        reports it.
        """
        if self._driver or self._reserved:
            return
        self._reserved = True
        ranks = range(self._settings.world)
        with suppress(OutlastError):
            self._start().engine.reserve(protected.tensors(), 2 * _RANK_BYTES, ranks)

    def _disk_faults(self, to_disk: bool) -> tuple[DiskFault, ...]:
        try:
            if to_disk:
                self._owner.reach("checkpoint")
        except OSError:  # `--fault full`: the keeper's disk is to be full
            return (DiskFault("ENOSPC", step="write"),)
        return ()

    def _prepare(
        self, content: StateContent, rank_specific: Collection[str], *, is_staged: bool
    ) -> bool:
        """Do what can fail on one rank alone, before the ranks agree to copy.

        Return whether this took more than it usually does.
        """
        anew = self._status.generation != self._generation
        try:
            self._absent.check(content.tensors, is_staged=is_staged)
            driver = self._driver or self._start()
            if not self._origin:
                self._origin = author()  # by the first save the script has set up everything
        except StorageError as error:
            agreed_plan.refuse(str(error), self._absent.exchange)  # others wait to compare
            raise
        if anew:
            driver.agree_anew()  # a new rank has not compared its table yet
        size_bytes = len(content.shared) + _RANK_BYTES
        driver.prepare(content.tensors, size_bytes, rank_specific, self._absent.ranks)
        return anew

    def _next(self, place: SavePoint) -> tuple[SavePoint, str, str]:
        """Return this save's place among those of the directory, its parent and its base."""
        if self._lineage is None:
            self._lineage = lineage_of(Folder(self._root), None if self._joins else self._begun_at)
        return self._lineage.go_on(place.step, place.n, place.attempt)

    def complete(self) -> None:
        """Report a copy in memory: the phase is complete, and every rank has copied its part."""
        copied, self._copied = self._copied, None
        if copied and self._driver:
            self._driver.complete()
        if not (copied and self._absent.leads):
            return
        blocked_s = 0.0 if copied.prepared else time.monotonic() - copied.begin_s
        place = copied.place
        with self._outcomes:
            if place in self._flushing:
                self._flushing[place] = blocked_s
        self._owner.record(memory_copied(self._owner.now_ns(), place, blocked_s))
        self._owner.send(
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
        """Return whether, to this rank's knowledge, a checkpoint is being written."""
        return bool(self._flushing)

    def poll(self) -> None:
        """Report outcomes of saves."""
        with self._outcomes:
            if self._driver:
                self._driver.poll()

    def _report_outcomes(self, driver: SaveDriver) -> None:
        """Report outcomes as they arrive, on a thread: a step may take long."""
        while True:
            if driver.engine.wait_news(_NEWS_S):
                self.poll()

    def settle(self, timeout_s: float) -> None:
        """Wait until this rank's saves have ended, and report their outcomes.

        After `timeout_s` the keeper continues with the rest.
        """
        for late in self._driver.wait(timeout_s) if self._driver else []:
            self._owner.note(late)
        self.poll()

    def _start(self) -> SaveDriver:
        settings = self._settings
        keeper = KeeperClient.connect(
            keeper_address(settings, self._seat), settings.token, f"rank {self._seat}"
        )
        keeper.forget(self._is_needed)
        self._driver = driver = SaveDriver(
            SaveSettings(
                root=self._root,
                rank=self._seat,
                world=settings.world,
                job=settings.run,
                save_s=settings.limits.save_s,
            ),
            self._absent.exchange,
            keeper,
            self,
        )
        return driver

    def _is_needed(self, place: SavePoint | None) -> bool:
        """Return whether a version of an earlier worker of this rank must stay in memory.

        This holds until a save of this worker is complete.
        """
        # One that joins does not know which versions the others still need.
        return self._joins or (place is not None and place == self._begun_at)

    def save_warned(self, text: str) -> None:
        """Note damage that a save found in an older file."""
        self._owner.note(text)

    def save_copied(self, outcome: Outcome) -> None:
        """Record copies at peers; note missing ones once, until all copies are there again."""
        assert self._driver is not None
        seat = self._driver.rank_of(outcome.save)
        self._owner.record(peers_copied(self._owner.now_ns(), seat, outcome))
        if outcome.error and not self._lacks_copies:
            self._owner.note(
                f"step {outcome.place.step}: {outcome.shortfall}: {outcome.error}; training"
                " continues; the next version is sent to all of them again"
            )
        self._lacks_copies = bool(outcome.error)

    def save_ended(self, outcome: Outcome) -> None:
        """Report a save's last outcome to the controller; rank 0's part reports for all."""
        place = outcome.place
        is_rank_0 = self._driver is not None and self._driver.rank_of(outcome.save) == 0
        if not (is_rank_0 or self._absent.leads):
            self._flushing.pop(place, None)
        if outcome.kind in ("failed", "skipped") and is_rank_0:
            self._report_failure(place, outcome.error)
        if outcome.kind != "committed":
            return
        path = str(self._root / place.directory)
        self._owner.send(
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
        self._owner.record(
            events.CheckpointSaved(
                t_ns=self._owner.now_ns(),
                n=place.n,
                step=place.step,
                path=path,
                size_bytes=outcome.size_bytes,
                seconds=outcome.seconds,
            )
        )

    def _report_failure(self, place: SavePoint, error: str) -> None:
        if place in self._refused:
            return
        self._flushing.pop(place, None)
        self._owner.send(messages.SaveFailed(n=place.n, step=place.step, error=error))
        self._owner.record(
            events.CheckpointFailed(
                t_ns=self._owner.now_ns(),
                n=place.n,
                step=place.step,
                path=str(self._root / place.directory),
                error=error,
            )
        )
