"""Sentinel for allocations that fail: the phase is put back on all ranks and run again with empty
caches, then in parts, where its function reads the batch by `session.split`.

| failures at the phase, on the rank with most | next attempt, on all ranks |
|---|---|
| 1 | whole, with empty caches |
| 2, 3, ... | in 2, 4, ... parts |

A rank on a device that has itself failed three times at the phase, or twice at one that has no
parts, also keeps its optimizers' state on the host until the vote (optimizer_memory.py).

The count travels with the exchange that every new generation begins with. A rank that has needed
parts in `LASTING` steps in a row keeps them, since each such step costs two recoveries.
"""

from __future__ import annotations

import gc
import itertools
import platform
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import distributed as dist
from torch.optim import Optimizer

from outlast import events
from outlast.errors import PhaseError
from outlast.worker.sentinels.batch_parts import common_size, cut_rows
from outlast.worker.sentinels.optimizer_memory import StateOffload, StateReserve
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_status import WorkerStatus

LASTING = 3
_WORDS = ("can't allocate memory", "ALLOC_FAILED", "out of memory")
_DETAIL_MAX = 400


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that an allocation failed: torch's, of a device or of the
    host, or of a library on the device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def memory_text() -> str:
    """Return the memory of this rank's device, and how much of it is in unusable pieces; "" without
    a device."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return ""
    stats = torch.cuda.memory_stats()
    allocated = stats.get("allocated_bytes.all.current", 0)
    reserved = stats.get("reserved_bytes.all.current", 0)
    pieces = stats.get("inactive_split_bytes.all.current", 0)
    free, total = torch.cuda.mem_get_info()
    part = pieces / reserved if reserved else 0.0
    return (
        f"device {torch.cuda.current_device()}: {allocated >> 20} MiB allocated, {reserved >> 20}"
        f" reserved, {pieces >> 20} of them in free pieces ({part:.0%} fragmentation),"
        f" {free >> 20} of {total >> 20} free outside"
    )


def _empty_caches() -> None:
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _has_peers() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


class MemoryWord(msgspec.Struct, frozen=True, array_like=True):
    """One rank's count of failures at phase n+1, and the parts in which it runs every step."""

    n: int = -1
    failures: int = 0
    lasting: int = 1


class MemoryOwner(Protocol):
    """The phase runner, as the sentinel uses it."""

    def protected_state(self) -> ProtectedState:
        """Return the protected state."""
        ...


class MemorySentinel:
    """Sentinel of one worker. `counts`: whether the attempt under way is neither a dry run nor a
    rehearsal."""

    def __init__(
        self,
        status: WorkerStatus,
        timeline: WorkerEvents,
        owner: MemoryOwner,
        counts: Callable[[], bool],
    ) -> None:
        self._status, self._timeline, self._owner = status, timeline, owner
        self._counts = counts
        self._n, self._failures = -1, 0
        self._own_failures: list[str] = []  # of this rank at this phase
        self._is_splittable = False  # a function has called `split`
        self._lasting = 1
        self._row = 0  # steps in a row that needed parts
        self._is_relief_due = False
        self._used = 1  # parts of the attempt under way
        self._syncs: list[bool] = []  # of DDP modules, before a batch in parts
        self.offload, self._reserve = StateOffload(), StateReserve()
        self._away_bytes = 0  # of optimizers' state, in the attempt under way
        self._is_away_lasting = False

    # --- the attempt ---

    def begin(self) -> None:
        """Begin an attempt; empty the caches if the one before it ran out of memory."""
        self._used, self._away_bytes = 1, 0
        self._restore_syncs()
        if self._is_relief_due:
            self._is_relief_due = False
            _empty_caches()

    def put_away(self) -> None:
        """Move the optimizers' state to the host, if nothing else has helped."""
        is_here = self._n == self._status.n and self._counts()
        needed = 3 if self._is_splittable else 2
        if self._is_away_lasting or (is_here and len(self._own_failures) >= needed):
            optimizers = self._owner.protected_state().optimizers.values()
            try:
                self._away_bytes = self.offload.put_away(optimizers)
            except (RuntimeError, MemoryError) as error:  # of the host's allocator
                if not is_out_of_memory(error):
                    raise
                self._timeline.note_once(f"no memory on the host for optimizers' state: {error}")
                self.offload.bring_back()
            if self._away_bytes:
                _empty_caches()

    def before_vote(self, optimizer: Optimizer | None = None) -> None:
        """Move the optimizers' state back, and reserve what an optimizer's first step will make."""
        self.offload.bring_back()
        if optimizer is not None and self._counts():
            self._reserve.take(optimizer)

    def settle(self) -> str:
        """Move the optimizers' state back behind a refused attempt; return why that failed."""
        try:
            self.offload.bring_back()
        except torch.OutOfMemoryError as error:
            return f"the optimizer's state, which was on the host, did not fit any more: {error}"
        return ""

    @property
    def parts(self) -> int:
        """Return in how many parts a batch is to be computed."""
        failures = self._failures if self._n == self._status.n else 0
        return max(self._lasting, 1 << max(0, failures - 1))

    @property
    def place(self) -> str:
        """Return what all ranks' ballots must have in common: the parts that were computed."""
        return f" in {self._used} parts" if self._used > 1 else ""

    def split(self, batch: Any) -> Iterator[tuple[Any, float]]:
        """Yield (part, its share of the rows): the batch itself, or parts of it. DDP reduces
        gradients in the backward of the last one."""
        self._is_splittable = True
        parts = self.parts if self._counts() else 1
        if parts == 1:
            yield batch, 1.0
            return
        reducers = self._owner.protected_state().reducers
        size = common_size([batch])
        if size < 2 or reducers.is_static:
            why = "a static graph" if reducers.is_static else "no common first dimension above 1"
            self._timeline.note_once(
                f"a step that ran out of memory cannot run in parts: {why}", "no parts"
            )
            yield batch, 1.0
            return
        modules = self._owner.protected_state().tree.reducers
        if size < parts and not modules and _has_peers():
            raise PhaseError(
                f"a batch of {size} rows cannot be computed in {parts} parts, as on the other"
                " ranks, whose collectives need the same parts; give each rank more rows"
            )
        parts = self._used = min(parts, size)
        bounds = [size * part // parts for part in range(parts + 1)]
        before = self._syncs = [module.require_backward_grad_sync for module in modules]
        try:
            for part, (low, high) in enumerate(itertools.pairwise(bounds)):
                for module, syncs in zip(modules, before, strict=True):
                    module.require_backward_grad_sync = syncs and part == parts - 1
                yield cut_rows(batch, low, high, size), (high - low) / size
        finally:
            if self._syncs is before:  # else another attempt has begun
                self._restore_syncs()

    def _restore_syncs(self) -> None:
        """Let DDP reduce again: an attempt may have left its function between two parts."""
        before, self._syncs = self._syncs, []
        modules = self._owner.protected_state().tree.reducers
        for module, syncs in zip(modules, before, strict=False):
            module.require_backward_grad_sync = syncs

    # --- failures ---

    def failed(self, error: BaseException) -> str:
        """Count a failure at this phase; return its description. Frames of the script are cleared,
        since they hold what the attempt had allocated."""
        if self._n != self._status.n:
            self._n, self._failures, self._own_failures = self._status.n, 0, []
        parts = self._used
        self._failures += 1
        self._is_relief_due = True
        text = " ".join(f"{type(error).__name__}: {error}".split())[:_DETAIL_MAX]
        used = memory_text()
        traceback.clear_frames(error.__traceback__)
        described = f"in {parts} part{'s' * (parts > 1)}: {text}{f' ({used})' if used else ''}"
        self._own_failures.append(described)
        if not self._is_splittable:
            described += "; a step that reads its batch by session.split can run in parts"
        return described

    def word(self) -> MemoryWord:
        """Return this rank's word for the ranks of a new generation."""
        return MemoryWord(self._n, self._failures, self._lasting)

    def learn(self, words: Sequence[MemoryWord]) -> None:
        """Take the words of all ranks of a new generation, which begins before phase n+1."""
        here = [word.failures for word in words if word.n == self._status.n]
        self._lasting = max(self._lasting, *(word.lasting for word in words))
        if most := max(here, default=0):
            if self._n != self._status.n:
                self._own_failures = []
            self._n, self._failures = self._status.n, most
            self._is_relief_due = True

    # --- the end of a phase ---

    def completed(self, step: int, *, is_step: bool) -> None:
        """Report a phase that ran out of memory and is complete."""
        is_here = self._n == self._status.n
        is_new = self._away_bytes > 0 and not self._is_away_lasting
        needed = is_here and (self._used > self._lasting or is_new)
        if is_step:
            self._row = self._row + 1 if needed else 0
        if not is_here:
            return
        own, self._own_failures = self._own_failures, []
        failures, self._n, self._failures = self._failures, -1, 0
        if own:
            how = f"in {self._used} parts" if self._used > 1 else "whole, with empty caches"
            if self._away_bytes:
                how += f", {self._away_bytes >> 20} MiB of optimizers' state on the host"
            self._report(f"step {step}: out of memory {own[-1]}; then it ran {how}, on all ranks")
        if self._row >= LASTING and is_new and self._used == 1:
            self._is_away_lasting, self._row = True, 0
            self._timeline.note(
                f"{LASTING} steps in a row needed the optimizers' state on the host: from here on"
                " it is there until the vote of each; smaller batches would be faster"
            )
        elif self._row >= LASTING and self._used > 1:
            self._lasting, self._row = self._used, 0
            self._is_away_lasting = self._is_away_lasting or is_new
            self._timeline.note(
                f"{LASTING} steps in a row ran out of memory {failures} times: from here on each"
                f" runs in {self._lasting} parts on all ranks; smaller batches would be faster"
            )

    def _report(self, text: str) -> None:
        is_device = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._timeline.emit(
            events.Warned(
                t_ns=self._timeline.now_ns(),
                host=platform.node(),
                check="oom",
                symptom="oom",
                severity="warn",
                code="out of memory",
                device=f"GPU {torch.cuda.current_device()}" if is_device else "cpu",
                detail=text,
                worker=self._timeline.worker,
            )
        )
