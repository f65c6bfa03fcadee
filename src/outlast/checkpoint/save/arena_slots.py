"""A rank's arenas in turn, and the copies into them from host and CUDA memory.

reserve: a thread fills `ahead` -> make: takes over those of a useful size -> free: in turn

Copies from a CUDA device overlap with its computation. They follow PyTorch's documentation and were
never run on hardware.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import torch

from outlast.checkpoint.format.manifests import Blob
from outlast.checkpoint.keeper.arena import ALIGN_BYTES, Arena, as_size, check_memory
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.save.shard_plan import LocalTensor
from outlast.checkpoint.save.staging import (
    BLOCK_BYTES,
    ArenaLayout,
    StagingCopies,
    aligned,
    lay_blobs,
)
from outlast.errors import OutlastError, StorageError, UsageError


class CudaCopier:
    """One device's own stream for copies, and a thread that waits for them to end."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copied = _event()
        self._waiting = ThreadPoolExecutor(1, "outlast-copied")

    def pin(self, memory: torch.Tensor) -> None:
        """Let the device write to this memory directly. Raises StorageError if CUDA refuses."""
        code = int(_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if code:
            raise StorageError(
                f"CUDA refuses to pin an arena of {memory.numel()} bytes (error {code}); nothing"
                " was saved; raise the limit of locked memory (ulimit -l)"
            )

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`."""
        _runtime().cudaHostUnregister(memory.data_ptr())

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Run copies on the own stream, after all work queued before."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied = self._stream.record_event(_event())

    def fence(self) -> None:
        """Make work queued from here on wait for the copies, on the device only."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def after(self, do: Callable[[], None], failed: Callable[[str], None]) -> Future[None]:
        """Call `do` from a thread after the copies, or `failed` with the reason if they fail."""
        copied = self._copied

        def wait() -> None:
            try:
                copied.synchronize()
            except RuntimeError as error:
                failed(f"the copies from {self._stream.device} failed: {error}")
            else:
                do()

        return self._waiting.submit(wait)

    def close(self) -> None:
        """Accept no more calls of `after`; does not wait."""
        self._waiting.shutdown(wait=False)


def only_device(devices: Iterable[torch.device]) -> torch.device | None:
    """Return the CUDA device among these, or None: other devices' copies are synchronous.

    Raises UsageError when there are several: a rank has one.
    """
    names = sorted(str(device) for device in devices if device.type == "cuda")
    if len(names) > 1:
        raise UsageError(
            f"a rank's tensors are, or were at earlier saves, on {len(names)} CUDA devices"
            f" ({', '.join(names)}); nothing was saved; keep them on one"
        )
    return torch.device(names[0]) if names else None


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # waiting threads block instead of spinning


def _runtime() -> Any:
    runtime = torch.cuda.cudart()
    assert runtime is not None, "a tensor is on a CUDA device"
    return runtime


class ArenaSlot:
    """An arena that is filled with one version at a time, while no write reads it."""

    def __init__(
        self,
        keeper: KeeperClient,
        size_bytes: int,
        device: CudaCopier | None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Create and lend an arena.

        Raises StorageError when memory is missing, the device must not write to it, or `wanted`
        returns False; nothing is allocated then.
        """
        self.arena = Arena.create(size_bytes, wanted)
        self._memory = torch.frombuffer(self.arena.view, dtype=torch.uint8)
        if device:
            try:
                device.pin(self._memory)
            except StorageError:
                del self._memory
                self.arena.close()
                raise
        self.number = keeper.lend(self.arena)
        self._keeper = keeper
        self._device = device
        self._layout: ArenaLayout | None = None
        self._copies: StagingCopies | None = None
        self._ordered: Future[None] | None = None
        self.save = 0  # number of the last save copied here

    @property
    def bound(self) -> bool:
        """Return whether `bind` was called."""
        return self._layout is not None

    @property
    def busy(self) -> bool:
        """Return whether copies into it or a write from it are in progress."""
        if self._ordered and not self._ordered.done():
            return True
        return self._keeper.busy(self.number)

    def bind(self, layout: ArenaLayout, table: Mapping[str, LocalTensor]) -> None:
        """Create the copies of a layout, once."""
        if self._layout is layout:
            return
        if self._layout:  # padding between pieces is zero in every shard
            self._keeper.reuse(self.number)
            self._memory.zero_()
        self._copies = StagingCopies(self._memory, layout, table)
        self._layout = layout

    def fill(
        self, sources: Mapping[str, torch.Tensor], blobs: Mapping[str, bytes]
    ) -> tuple[tuple[Blob, ...], int]:
        """Copy the state; return the positions of its blobs, and the bytes of the shard.

        Copies from a device are complete only after `order`.
        """
        assert self._layout and self._copies, "bound to a layout"
        self._keeper.reuse(self.number)
        if self._device:
            with self._device.copying():
                self._copies.run(sources, waiting=False)
        else:
            self._copies.run(sources, waiting=True)
        laid, size_bytes = lay_blobs(self._layout.size_bytes, {k: len(v) for k, v in blobs.items()})
        for blob in laid:
            end = blob.at + blob.size_bytes
            padding = bytes(aligned(end, BLOCK_BYTES) - end)
            self.arena.view[blob.at : end + len(padding)] = blobs[blob.name] + padding
        return laid, size_bytes

    def order(
        self,
        do: Callable[[], None],
        failed: Callable[[str], None],
        sources: Mapping[str, torch.Tensor],
    ) -> None:
        """Call `do`, which orders the write, once the copies are complete.

        That is now, or from a thread when a device's copies have ended; `failed` is called with the
        reason if they fail. `sources` live until then.
        """
        if not self._device:
            do()
            return
        kept = dict(sources)
        self._ordered = self._device.after(do, failed)
        self._ordered.add_done_callback(lambda _: kept.clear())

    def settle(self, timeout_s: float) -> None:
        """Wait until a callback of `order` was called. Raises StorageError after `timeout_s`."""
        try:
            if self._ordered:
                self._ordered.result(timeout_s)
        except TimeoutError as error:
            raise StorageError(
                f"the copies of save {self.save} from its device have not ended within"
                f" {timeout_s:g} s; they continue"
            ) from error

    def close(self) -> None:
        """Release the memory. The keeper must not read it any more."""
        if self._device:
            self._device.unpin(self._memory)
        self._copies = self._layout = None
        del self._memory  # before its memory is
        self.arena.close()


_SLACK_BYTES = 1 << 20
_PAUSE_S = 0.005
_TOO_LARGE = 1.25  # times the needed size: larger reserved arenas are released


class ArenaSlots:
    """Iterates over the slots, the least recently used first. Not thread-safe."""

    def __init__(
        self, keeper: KeeperClient, arenas: int, save_s: float, when_busy: Literal["wait", "skip"]
    ) -> None:
        """Manage at most `arenas` slots. `save_s` and `when_busy`: as in SaveEngine."""
        self._keeper, self.arenas = keeper, arenas
        self._save_s, self._when_busy = save_s, when_busy
        self._slots: list[ArenaSlot] = []
        self._making: threading.Thread | None = None
        self.ahead: list[ArenaSlot] = []  # used only by the thread until that has ended
        self._wanted = True

    def __iter__(self) -> Iterator[ArenaSlot]:
        return iter(self._slots)

    def reserve(self, pieces_bytes: int, blobs_bytes: int, device: CudaCopier | None) -> None:
        """Create the missing arenas, of this size, in a thread.

        Returns at once. No-op if there are any, or creation is in progress. If memory is missing,
        the first save raises the error.
        """
        if self._slots or self._making or self.ahead:
            return
        count, size_bytes = self._missing(), arena_bytes(pieces_bytes, blobs_bytes)

        def work() -> None:
            try:
                check_memory(count * size_bytes, f"{count} arenas of {as_size(size_bytes)}")
                while len(self.ahead) < count and self._wanted:
                    slot = ArenaSlot(self._keeper, size_bytes, device, lambda: self._wanted)
                    self.ahead.append(slot)
            except OutlastError:
                pass  # the first save tries again, and reports the error

        self._making = threading.Thread(target=work, name="outlast-arenas", daemon=True)
        self._making.start()

    def make(
        self,
        layout: ArenaLayout,
        table: Mapping[str, LocalTensor],
        blobs_bytes: int,
        device: CudaCopier | None,
    ) -> None:
        """Create and bind all missing arenas at once, so that a lack of memory is found early.

        Arenas that earlier trainers left count. Raises StorageError when memory is missing.
        """
        self._take_over(layout.size_bytes, blobs_bytes)
        missing = self._missing()
        if missing > 0:
            size_bytes = arena_bytes(layout.size_bytes, blobs_bytes)
            check_memory(missing * size_bytes, f"{missing} arenas of {as_size(size_bytes)}")
            for _ in range(missing):
                self._slots.insert(0, ArenaSlot(self._keeper, size_bytes, device))
        for slot in self._slots:
            if not slot.bound:
                slot.bind(layout, table)

    def free(
        self, pieces_bytes: int, blobs_bytes: int, device: CudaCopier | None
    ) -> ArenaSlot | None:
        """Return the least recently used slot: all ranks then hold the same versions.

        It is replaced where it is too small. None when it does not become free in time.
        """
        deadline = time.monotonic() + self._save_s
        while (slot := self._slots[0]).busy:
            if self._when_busy == "skip" or time.monotonic() > deadline:
                return None
            time.sleep(_PAUSE_S)  # training waits, by `when_busy`
        self._slots.remove(slot)
        if slot.arena.size_bytes < pieces_bytes + blobs_bytes:
            self._drop(slot)
            slot = ArenaSlot(self._keeper, arena_bytes(pieces_bytes, blobs_bytes), device)
        self._slots.append(slot)
        return slot

    @property
    def busy(self) -> bool:
        """Return whether the next save would wait."""
        return bool(self._slots) and self._slots[0].busy

    def release(self) -> bool:
        """Release all slots and their versions, unless one is busy; return whether it has."""
        if any(slot.busy for slot in self._slots):
            return False
        while self._slots:
            self._drop(self._slots.pop())
        return True

    def join(self) -> None:
        """Wait until the reserved arenas are created."""
        if self._making:
            self._making.join()
            self._making = None

    def stop(self) -> None:
        """Stop the creation of reserved arenas."""
        self._wanted = False
        self.join()

    def close(self) -> None:
        """Release the memory. The keeper must not read it any more."""
        self.stop()
        for slots in (self._slots, self.ahead):
            while slots:
                slots.pop().close()

    def _missing(self) -> int:
        missing = self.arenas - len(self._slots) - len(self._keeper.older)
        return max(missing, not self._slots)

    def _take_over(self, pieces_bytes: int, blobs_bytes: int) -> None:
        """Use reserved arenas of a suitable size; drop the others. Waits for their creation."""
        self.join()
        needed_bytes = pieces_bytes + blobs_bytes
        most_bytes = _TOO_LARGE * arena_bytes(pieces_bytes, blobs_bytes) + ALIGN_BYTES
        while self.ahead:
            slot = self.ahead.pop()
            useful = needed_bytes <= slot.arena.size_bytes <= most_bytes
            if useful and self._missing() > 0:
                self._slots.insert(0, slot)
            else:
                self._drop(slot)

    def _drop(self, slot: ArenaSlot) -> None:
        self._keeper.drop(slot.number)
        slot.close()


def arena_bytes(pieces_bytes: int, blobs_bytes: int) -> int:
    """Return the size of an arena, with room for growing blobs: a new one costs much more."""
    return pieces_bytes + 2 * blobs_bytes + _SLACK_BYTES


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let no garbage collection begin inside.

    A save of many tensors creates many small objects without cycles; a collection over a large
    script's objects takes 100 ms and more.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
