"""Saves from inside training: a copy into an arena, and an order to the keeper.

    engine = SaveEngine(SaveSettings(root=root, rank=rank, world=world, job=job), exchange, keeper)
    number = engine.save(SaveRequest(place, tensors, shared=shared, own=own, origin=origin))
    ...
    for outcome in engine.outcomes(): ...        # of earlier saves

Ranks communicate only when the set of tensors changes, and then all of them at the same save.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from typing import Literal

import torch
from msgspec import UNSET

from outlast.checkpoint.format.manifests import (
    CHUNK_BYTES,
    FORMAT,
    FORMAT_FROZEN,
    Blob,
    Manifest,
    SavePoint,
    ValueSample,
    pending_commit,
    shard_name,
)
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_frames import Outcome, SaveOrder
from outlast.checkpoint.load.tensor_fill import fill_tensors
from outlast.checkpoint.save.agreed_plan import (
    VALUES,
    Exchange,
    PlannedSave,
    SavePlan,
    agree,
    refuse,
)
from outlast.checkpoint.save.arena_slots import ArenaSlots, CudaCopier, only_device
from outlast.checkpoint.save.save_request import SaveRequest, SaveSettings
from outlast.checkpoint.save.shard_plan import (
    NamedTensors,
    Untrained,
    changed_names,
    describe,
    divide_boxes,
    frozen_names,
    held_boxes,
    saved_tensors,
)
from outlast.checkpoint.save.staging import BLOCK_BYTES, aligned, lay_out
from outlast.checkpoint.save.value_samples import digests_of, salt_of, samples_of
from outlast.errors import CodecError, GroupError, OutlastError, StorageError, UsageError

_OUTCOMES_MAX = 1024  # unread outcomes


class SaveEngine:
    """One rank's saves. Not thread-safe."""

    read = staticmethod(fill_tensors)

    def __init__(
        self,
        settings: SaveSettings,
        exchange: Exchange,
        keeper: KeeperClient,
        *,
        first_save: int = 1,
    ) -> None:
        """Create the engine.

        `exchange` returns every rank's message, in order of rank, and has a deadline. `first_save`:
        number of its first save, where several engines share a keeper.
        """
        self._settings = settings
        self._root = str(settings.root.absolute())
        self._rank = settings.rank
        self._exchange = exchange
        self._keeper = keeper
        self._read_back = True
        self._untrained = Untrained()
        self._saves = first_save - 1
        self._planned: PlannedSave | None = None
        self._slots = ArenaSlots(keeper, settings.arenas, settings.save_s, settings.when_busy)
        self._cuda: torch.device | None = None
        self._device: CudaCopier | None = None
        self._refused: dict[int, Outcome] = {}  # of saves that were never sent to the keeper
        self._news: deque[Outcome] = deque(maxlen=_OUTCOMES_MAX)  # unread outcomes

    def prepare(
        self,
        tensors: Mapping[str, torch.Tensor],
        blobs_bytes: int = 0,
        rank_specific: Collection[str] = (),
    ) -> None:
        """Plan and create arenas before the first save; all ranks call it. Raises as `save`."""
        self._plan(self._described(tensors), rank_specific, {}, frozen_names(tensors))
        self._make_slots(blobs_bytes)

    def reserve(
        self, tensors: Mapping[str, torch.Tensor], blobs_bytes: int, replicas: Collection[int]
    ) -> None:
        """Create arenas in the background, sized for saves of `tensors`.

        Ranks do not communicate. `replicas`: ranks with equal tables of plain tensors, as far as
        known. A wrong size only costs time at the first save.
        """
        described = describe(tensors)
        boxes = held_boxes(described.table)
        cuda = only_device(each.device for each in described.table.values())
        holders = tuple(sorted(replicas))
        shares = divide_boxes(
            [item if item.holders else item._replace(holders=holders) for item in boxes], self._rank
        )
        layout = lay_out({}, shares, frozen_names(tensors))
        self._slots.reserve(layout.size_bytes, blobs_bytes, self._device_of(cuda))

    def save(self, request: SaveRequest) -> int:
        """Copy the state and order its write; return the save's number.

        `outcomes` and `wait` report its outcome: "skipped" and "failed" there, never by an
        exception here. When this returns, the state may change again; with `request.overlap` not
        before `fence` was called: a device's copies continue meanwhile.

        Raises CodecError for tensors that cannot be saved, UsageError on all ranks when they
        contradict each other, errors of `exchange` where a rank is missing, and StorageError
        when there is no memory for the arenas.
        """
        place = request.place
        described = self._described(request.tensors)
        blobs = {"own": request.own} | ({"shared": request.shared} if self._rank == 0 else {})
        frozen = self._untrained.names(request.tensors)
        planned = self._plan(described, request.rank_specific, request.values, frozen)
        samples = self._samples(planned.plan, described, place, request.values)
        blobs_bytes = sum(aligned(len(data), BLOCK_BYTES) for data in blobs.values())
        self._make_slots(blobs_bytes)
        self._saves += 1
        save = self._saves
        slot = self._slots.free(planned.layout.size_bytes, blobs_bytes, self._device)
        if slot is None:
            self._skip_save(save, place)
            return save
        slot.bind(planned.layout, planned.table)
        laid, size_bytes = slot.fill(described.sources, blobs)
        slot.save = save
        manifest = self._manifest(place, planned, laid, size_bytes, samples)
        order = self._make_order(request, save, slot.number, manifest)
        self._read_back &= not request.to_disk
        slot.order(
            lambda: self._order(order),
            lambda error: self._refuse(save, place, "failed", error),
            described.sources,
        )
        if not request.overlap:
            self.fence()
        return save

    def _make_order(
        self, request: SaveRequest, save: int, arena: int, manifest: Manifest
    ) -> SaveOrder:
        commit = None
        if request.to_disk and self._rank == 0:
            commit = pending_commit(manifest, request.origin, request.parent, request.base)
        return SaveOrder(
            save=save,
            arena=arena,
            root=self._root,
            manifest=manifest,
            commit=commit,
            deadline_s=self._settings.save_s,
            to_disk=request.to_disk,
            read_back=self._read_back,
            owner=self._settings.owner,
            faults=request.faults,
        )

    def _manifest(
        self,
        place: SavePoint,
        planned: PlannedSave,
        blobs: tuple[Blob, ...],
        size_bytes: int,
        samples: tuple[ValueSample, ...],
    ) -> Manifest:
        frozen = planned.layout.frozen_bytes
        return Manifest(
            format=FORMAT_FROZEN if frozen else FORMAT,
            frozen=frozen or UNSET,
            job=self._settings.job,
            place=place,
            rank=self._rank,
            world=self._settings.world,
            shard=shard_name(self._rank),
            size_bytes=size_bytes,
            chunk_bytes=CHUNK_BYTES,
            chunks=(),
            plan=planned.plan.digest,
            tensors=planned.layout.tensors,
            pieces=planned.layout.pieces,
            blobs=blobs,
            samples=samples,
        )

    def read_back_next(self) -> None:
        """Have files read back before the next save links them: a load may have found damage."""
        self._read_back = True
        self._untrained.loaded()

    def agree_anew(self) -> None:
        """Make all ranks compare tables at the next save, as a new rank does. All call it."""
        self._planned = None

    def release(self) -> bool:
        """Release the memory of its versions; return whether that was possible."""
        return self._slots.release()

    def complete(self) -> None:
        """Release versions of earlier trainers, after every rank has copied the last save."""
        self._keeper.forget(lambda _: False)

    def fence(self) -> None:
        """Make work given to a device from here on wait for the copies of the last save."""
        if self._device:
            self._device.fence()

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes since the last call. Never blocks."""
        outcomes_so_far = self._keeper.outcomes()
        while self._news:
            outcomes_so_far.append(self._news.popleft())
        return outcomes_so_far

    def wait_news(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for outcomes, from any thread; return whether there are any."""
        return bool(self._news) or self._keeper.wait_news(timeout_s)

    def progress(self, save: int) -> tuple[Outcome | None, bool]:
        """Return a save's last outcome, if it has ended, and whether only others' parts lack.

        From any thread.
        """
        outcome, is_written = self._keeper.progress(save)
        return self._refused.get(save) or outcome, is_written

    def wait(self, save: int, timeout_s: float) -> Outcome:
        """Return the save's last outcome.

        "committed" on rank 0, "written" elsewhere; or "failed", "skipped". Raises StorageError
        after `timeout_s`: the save continues.
        """
        deadline = time.monotonic() + timeout_s
        for slot in self._slots:
            if slot.save == save:
                slot.settle(timeout_s)
        if save in self._refused:
            return self._refused[save]
        return self._keeper.wait(save, max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float) -> None:
        """Wait for writes, end the keeper, and release the memory.

        Raises StorageError naming saves that have not ended after `timeout_s`; the keeper continues
        alone.
        """
        deadline = time.monotonic() + timeout_s
        self._slots.stop()
        late: list[str] = []
        for slot in self._slots:
            try:
                slot.settle(max(0.0, deadline - time.monotonic()))
            except StorageError as error:
                late.append(str(error))
        if self._device:
            self._device.close()
        self._keeper.close(max(0.0, deadline - time.monotonic()))
        if late:  # a device still writes there
            raise StorageError("; ".join(late))
        self._slots.close()

    def _described(self, tensors: Mapping[str, torch.Tensor]) -> NamedTensors:
        try:
            return describe(tensors, self._planned.table if self._planned else None)
        except CodecError as error:
            refuse(str(error), self._exchange)
            raise

    def _samples(
        self, plan: SavePlan, described: NamedTensors, place: SavePoint, values: Mapping[str, bytes]
    ) -> tuple[ValueSample, ...]:
        """Return this rank's samples of all that it shares with others."""
        tensors = [group for group in plan.shared_holders if not group.key.startswith(VALUES)]
        others = [group for group in plan.shared_holders if group.key.startswith(VALUES)]
        names = [name for group in tensors for name in group.names]
        digests = digests_of({name: described.sources[name] for name in names}, salt_of(place))
        samples = samples_of(tensors, digests, self._rank) + samples_of(others, values, self._rank)
        return tuple(samples)

    def _plan(
        self,
        described: NamedTensors,
        rank_specific: Collection[str],
        values: Mapping[str, bytes],
        frozen: frozenset[str],
    ) -> PlannedSave:
        """Return the plan for these tensors: the last one as long as nothing has changed."""
        known = self._planned
        if known and known.table == described.table and known.values == values.keys():
            if known.frozen != frozen:
                layout = lay_out(saved_tensors(held_boxes(known.table)), known.plan.shares, frozen)
                known = self._planned = known._replace(layout=layout, frozen=frozen)
            return known
        try:
            boxes = held_boxes(described.table)
            there = {self._cuda} if self._cuda else set[torch.device]()
            self._cuda = only_device(there | {each.device for each in described.table.values()})
        except UsageError as error:
            refuse(str(error), self._exchange)
            raise
        try:
            plan = agree(
                boxes,
                described.sources,
                rank=self._rank,
                world=self._settings.world,
                exchange=self._exchange,
                rank_specific=rank_specific,
                values=values,
            )
        except GroupError as error:
            if not self._planned:
                raise
            names = changed_names(self._planned.table, described.table) or "values"
            raise GroupError(
                f"{error}; rank {self._rank} requests it: its tensors are not those of the save"
                f" before ({names}); nothing was saved; let all ranks change theirs at the same"
                " save"
            ) from error
        layout = lay_out(saved_tensors(boxes), plan.shares, frozen)
        self._planned = PlannedSave(described.table, plan, layout, frozenset(values), frozen)
        return self._planned

    def _make_slots(self, blobs_bytes: int) -> None:
        assert self._planned
        table, layout = self._planned.table, self._planned.layout
        self._slots.make(layout, table, blobs_bytes, self._device_of(self._cuda))

    def _device_of(self, cuda: torch.device | None) -> CudaCopier | None:
        if cuda and not self._device:
            self._device = CudaCopier(cuda)
        return self._device

    @property
    def ready(self) -> bool:
        """Return whether a save would copy at once, and interrupt no transfer to peers."""
        return not self._keeper.copying and not self._slots.busy

    def _order(self, order: SaveOrder) -> None:
        try:
            self._keeper.order(order)
        except OutlastError as error:  # training continues, and gets the error
            self._refuse(order.save, order.manifest.place, "failed", str(error))

    def _skip_save(self, save: int, place: SavePoint) -> None:
        arenas = self._slots.arenas
        what = f"step {place.step} of rank {self._rank}: all {arenas} arenas are being written"
        if self._settings.when_busy == "skip":
            error = f"{what}; nothing was copied; save less often, or use more arenas"
            self._refuse(save, place, "skipped", error)
        else:
            late_s = self._settings.save_s
            error = f"{what} after {late_s:g} s; nothing was copied; look at the storage"
            self._refuse(save, place, "failed", error)

    def _refuse(
        self, save: int, place: SavePoint, kind: Literal["failed", "skipped"], error: str
    ) -> None:
        outcome = Outcome(save=save, place=place, kind=kind, error=error)
        self._refused[save] = outcome
        self._news.append(outcome)
        if len(self._refused) > _OUTCOMES_MAX:
            del self._refused[min(self._refused)]
