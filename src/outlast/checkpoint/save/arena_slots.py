"""A rank's arenas in turn, and the copies into them from host and CUDA memory.

reserve: a thread fills `ahead` -> make: takes over those of a useful size -> free: in turn

Copies from a CUDA device run beside its computation. They follow PyTorch's documentation and were
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
        """Let the device write to this memory directly. Raises StorageError when it must not."""
        code = int(_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if code:
            raise StorageError(
                f"CUDA refuses to pin an arena of {memory.numel()} bytes (error {code}); nothing"
                " was saved; raise the limit of locked memory (ulimit -l)"
            )

    def unpin(self, memory: torch.Tensor) -> None:
        _runtime().cudaHostUnregister(memory.data_ptr())

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """What is copied inside begins once what was queued before has ended."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied = self._stream.record_event(_event())

    def fence(self) -> None:
        """What is queued from here on begins once the copies have ended. Waits for nothing."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def after(self, do: Callable[[], None], failed: Callable[[str], None]) -> Future[None]:
        """Call `do` from a thread once the copies have ended, or `failed` with the reason why they
        never will."""
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
        """Take nothing more to wait for. Waits for nothing itself."""
        self._waiting.shutdown(wait=False)


def only_device(devices: Iterable[torch.device]) -> torch.device | None:
    """The CUDA device among these, or None: other devices' copies are waited for.

    Raises UsageError when there are several: a rank has one.
    """
    found = sorted(str(device) for device in devices if device.type == "cuda")
    if len(found) > 1:
        raise UsageError(
            f"a rank's tensors are, or were at earlier saves, on {len(found)} CUDA devices"
            f" ({', '.join(found)}); nothing was saved; keep them on one"
        )
    return torch.device(found[0]) if found else None


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # whoever waits leaves the processor to the training


def _runtime() -> Any:
    runtime = torch.cuda.cudart()
    assert runtime is not None, "a tensor is on a CUDA device"
    return runtime


class ArenaSlot:
    """Filled with one version of the state at a time, while no write reads it."""

    def __init__(
        self,
        keeper: KeeperClient,
        size_bytes: int,
        device: CudaCopier | None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Raises StorageError when there is no room for an arena of this size, or the device must
        not write to it, or it is not `wanted` any more; nothing is taken then."""
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
        self.save = 0  # the one that was last copied here

    @property
    def bound(self) -> bool:
        """Return whether it has the copies of a layout."""
        return self._layout is not None

    @property
    def busy(self) -> bool:
        """Whether copies into it or a write from it have not ended."""
        if self._ordered and not self._ordered.done():
            return True
        return self._keeper.busy(self.number)

    def bind(self, layout: ArenaLayout, table: Mapping[str, LocalTensor]) -> None:
        """Make the copies of a layout, once."""
        if self._layout is layout:
            return
        if self._layout:  # what lies between pieces is zero in every shard
            self._keeper.reuse(self.number)
            self._memory.zero_()
        self._copies = StagingCopies(self._memory, layout, table)
        self._layout = layout

    def fill(
        self, sources: Mapping[str, torch.Tensor], blobs: Mapping[str, bytes]
    ) -> tuple[tuple[Blob, ...], int]:
        """Bring the state here; where its blobs lie, and the bytes of the whole shard.

        From a device it is there only once the device's copies have ended.
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
        """Call `do`, which orders the write, once everything is here: now, or from a thread when a
        device's copies have ended; `failed` with the reason where they never will. `sources` live
        until then."""
        if not self._device:
            do()
            return
        kept = dict(sources)
        self._ordered = self._device.after(do, failed)
        self._ordered.add_done_callback(lambda _: kept.clear())

    def settle(self, timeout_s: float) -> None:
        """Wait until what `order` was given has been called. StorageError if not by then."""
        try:
            if self._ordered:
                self._ordered.result(timeout_s)
        except TimeoutError as error:
            raise StorageError(
                f"the copies of save {self.save} from its device have not ended within"
                f" {timeout_s:g} s; they go on"
            ) from error

    def close(self) -> None:
        """Let go of the memory, which the keeper has dropped, or reads no more."""
        if self._device:
            self._device.unpin(self._memory)
        self._copies = self._layout = None
        del self._memory  # before its memory is
        self.arena.close()


_SLACK_BYTES = 1 << 20
_PAUSE_S = 0.005
_TOO_LARGE = 1.25  # times what is needed: an arena that was made ahead and is larger is given back


class ArenaSlots:
    """Iterates over the slots, the one that was used longest ago first. Not for several threads at
    once."""

    def __init__(
        self, keeper: KeeperClient, arenas: int, save_s: float, when_busy: Literal["wait", "skip"]
    ) -> None:
        """Take `arenas` at most. `save_s` and `when_busy` are as for Engine."""
        self._keeper, self.arenas = keeper, arenas
        self._save_s, self._when_busy = save_s, when_busy
        self._slots: list[ArenaSlot] = []
        self._making: threading.Thread | None = None
        self.ahead: list[ArenaSlot] = []  # the thread's alone until that has ended
        self._wanted = True

    def __iter__(self) -> Iterator[ArenaSlot]:
        return iter(self._slots)

    def reserve(self, pieces_bytes: int, blobs_bytes: int, device: CudaCopier | None) -> None:
        """Make the arenas that are missing, of this size, in a thread of their own.

        Returns at once, and does nothing where there are any, or they are being made. Where there
        is no room, the first save raises what it would have raised without this.
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
                pass  # the first save tries again, and says it

        self._making = threading.Thread(target=work, name="outlast-arenas", daemon=True)
        self._making.start()

    def make(
        self,
        layout: ArenaLayout,
        table: Mapping[str, LocalTensor],
        blobs_bytes: int,
        device: CudaCopier | None,
    ) -> None:
        """All arenas at once, so that a lack of room for one of them is told at the start; and one
        that there was no room for, again. Those that trainers before this one have left count.

        Raises StorageError when there is no room.
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
        """The slot that was used longest ago: in turn, so that all ranks hold the same versions.
        It is made anew where it is too small. None when it is not free in time."""
        deadline = time.monotonic() + self._save_s
        while (slot := self._slots[0]).busy:
            if self._when_busy == "skip" or time.monotonic() > deadline:
                return None
            time.sleep(_PAUSE_S)  # training waits anyway: the policy is to wait
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

    def join(self) -> None:
        """Wait until the arenas ahead are made."""
        if self._making:
            self._making.join()
            self._making = None

    def stop(self) -> None:
        """Make no arena ahead any more."""
        self._wanted = False
        self.join()

    def close(self) -> None:
        """Let go of the memory, which the keeper reads no more."""
        self.stop()
        for slots in (self._slots, self.ahead):
            while slots:
                slots.pop().close()

    def _missing(self) -> int:
        missing = self.arenas - len(self._slots) - len(self._keeper.older)
        return max(missing, not self._slots)

    def _take_over(self, pieces_bytes: int, blobs_bytes: int) -> None:
        """Wait for what `reserve` makes: to make the same here would take longer."""
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
    """With room for blobs that grow: a new arena costs far more than a save."""
    return pieces_bytes + 2 * blobs_bytes + _SLACK_BYTES


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let no collection begin inside. A save of many tensors makes many small objects, of which
    none are garbage in cycles; a look through a large script's objects takes 100 ms and more."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
