"""Groups of batches, each for one optimizer step of a loop that accumulates gradients."""

from __future__ import annotations

from typing import Any

from outlast import random_state
from outlast.data.batch_source import BatchSource, open_source
from outlast.data.counted_source import Codec
from outlast.errors import UsageError


class BatchGroups:
    """Loader of lists of `size` batches of `loader`; the last list of an epoch may be shorter.

    `draws`: draws behind a list's first may advance the generators of the process. In a loop that
    draws between the passes over the batches they come at other times than here.
    """

    def __init__(self, loader: Any, size: int, *, draws: bool) -> None:
        self.loader, self.size, self.draws = loader, size, draws

    def __len__(self) -> int:
        return -(-len(self.loader) // self.size)


def open_grouped(loader: Any, codec: Codec) -> BatchSource:
    """Return the source of a loader, or of groups of its batches. See open_source."""
    if isinstance(loader, BatchGroups):
        return GroupedSource(open_source(loader.loader, codec), loader)
    return open_source(loader, codec)


class GroupedSource:
    """Source of lists of batches of another source."""

    def __init__(self, source: BatchSource, groups: BatchGroups) -> None:
        self._source, self._size, self._draws = source, groups.size, groups.draws
        self.note, self.epoch, self.sets_epochs = source.note, 0, True
        self._done = 0  # batches of this epoch
        self._limit: int | None = None

    @property
    def length(self) -> int | None:
        """Return the number of lists, None if unknown."""
        length = self._source.length
        return None if length is None else -(-length // self._size)

    def start_epoch(self, epoch: int, length: int | None) -> None:
        """Begin `epoch`, of at most `length` lists."""
        self._source.sets_epochs = self.sets_epochs
        self._source.start_epoch(epoch, None)
        self.epoch, self._done = epoch, 0
        self.set_length(length)

    def set_length(self, length: int | None) -> None:
        """Set the number of lists of an epoch that has given none."""
        own = self._source.length
        self._limit = None if length is None else length * self._size
        if self._limit is not None and own is not None:
            self._limit = min(self._limit, own)
        self._source.set_length(self._limit)

    def next(self) -> list[Any]:
        """Return the batches of a step. Raise StopIteration at the end of the epoch, UsageError if
        a draw advances a generator that it may not."""
        group = [self._source.next()]
        self._done += 1
        before = {} if self._draws else random_state.snapshot()
        while len(group) < self._size and self._done != self._limit:
            try:
                group.append(self._source.next())
            except StopIteration:
                break
            self._done += 1
            if names := sorted(random_state.moved(before)):
                raise UsageError(
                    f"the training data draw from generators of the process ({', '.join(names)})"
                    f" with each batch, of which a step has {self._size}: under torchrun these"
                    " draws come between the passes over the batches; draw from a generator of"
                    " the data set's own, or set num_workers above 0"
                )
        return group

    def position(self) -> dict[str, Any]:
        """Return the position before the next list."""
        return {"size": self._size, "batches": self._done, "source": self._source.position()}

    def seek(self, position: dict[str, Any]) -> None:
        """Go to a position. Raise UsageError if it is one between lists of another size."""
        if position.get("size") != self._size:
            raise UsageError(
                f"the saved data position is that of a loop with {position.get('size', 1)} batches"
                f" a step, and the loop has {self._size} now: continue with the number that the"
                " run began with, or start a new run directory"
            )
        self._done = position["batches"]
        self._source.sets_epochs = self.sets_epochs
        self._source.seek(position["source"])
        self.epoch = self._source.epoch

    def close(self) -> None:
        """Stop loader workers."""
        self._source.close()
