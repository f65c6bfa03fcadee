"""Sources whose position is a number: sequences, and no loader at all."""

from __future__ import annotations

import sys
from typing import Any

from outlast.data.counted_source import CountedSource, set_epoch
from outlast.data.loader_state import LoaderState
from outlast.errors import UsageError


class SequenceSource(CountedSource):
    """A list of batches, or any object with a length and indexing."""

    kind = "sequence"

    def __init__(self, batches: Any) -> None:
        """Wrap the batches. Raises UsageError when there are none."""
        super().__init__()
        if len(batches) == 0:
            raise UsageError(
                f"the {type(batches).__name__} given to session.batches() is empty: nothing to"
                " train on"
            )
        self._batches = batches
        self._kept = LoaderState({"sequence": batches})

    @property
    def length(self) -> int | None:
        """Return the number of batches in the sequence."""
        return len(self._batches)

    def start_epoch(self, epoch: int, length: int | None) -> None:
        """See CountedSource.start_epoch; also calls the sequence's `set_epoch`, if any."""
        super().start_epoch(epoch, length)
        set_epoch(epoch, self._batches)

    def _begin(self) -> None:
        """Do nothing: a sequence is always ready."""

    def _take(self) -> Any:
        if self._done >= len(self._batches):
            raise StopIteration
        return self._batches[self._done]

    def _mark(self) -> dict[str, Any]:
        return {"kept": self._kept.changes()}

    def _return(self, position: dict[str, Any]) -> None:
        set_epoch(self.epoch, self._batches)
        self._kept.put(position["kept"])

    def _finish(self, exhausted: bool) -> None:
        """Do nothing: a sequence keeps no state between epochs."""


class IndexSource(CountedSource):
    """The source without a loader: each batch is its index, in one unbounded epoch.

    Every rank knows the length without asking, so that ranks need not agree on each index.
    """

    kind = "count"

    @property
    def length(self) -> int | None:
        """Return sys.maxsize: the epoch has no end of its own."""
        return sys.maxsize

    def _begin(self) -> None:
        """Do nothing."""

    def _take(self) -> int:
        return self._done

    def _mark(self) -> dict[str, Any]:
        return {}

    def _return(self, position: dict[str, Any]) -> None:
        """Do nothing: the position consists of the counts."""

    def _finish(self, exhausted: bool) -> None:
        """Do nothing: the position consists of the counts."""
