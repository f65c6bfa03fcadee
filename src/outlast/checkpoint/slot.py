"""One arena of a rank, lent to its keeper, with the copies of the present layout into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch

from outlast.checkpoint.arena import Arena
from outlast.checkpoint.device import Device
from outlast.checkpoint.keeper.client import Keeper
from outlast.checkpoint.plan import Local
from outlast.checkpoint.record import Blob
from outlast.checkpoint.stage import BLOCK_BYTES, Copies, Layout, aligned, lay_blobs
from outlast.errors import StorageError


class Slot:
    """Filled with one version of the state at a time, while no write reads it."""

    def __init__(
        self,
        keeper: Keeper,
        size_bytes: int,
        device: Device | None,
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
        self._layout: Layout | None = None
        self._copies: Copies | None = None
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

    def bind(self, layout: Layout, table: Mapping[str, Local]) -> None:
        """Make the copies of a layout, once."""
        if self._layout is layout:
            return
        if self._layout:  # what lies between pieces is zero in every shard
            self._keeper.reuse(self.number)
            self._memory.zero_()
        self._copies = Copies(self._memory, layout, table)
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
