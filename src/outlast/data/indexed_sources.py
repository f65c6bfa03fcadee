"""Sources whose position is a number: sequences, and no loader at all."""

from __future__ import annotations

import sys
from typing import Any

from outlast.data.counted_source import CountedSource, set_epoch
from outlast.data.loader_state import LoaderState
from outlast.errors import UsageError


class SequenceSource(CountedSource):
    """A list of batches, or anything with a length that is asked by index."""

    kind = "sequence"

    def __init__(self, batches: Any) -> None:
        """Raises UsageError when there are none."""
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
        return len(self._batches)

    def start_epoch(self, epoch: int, length: int | None) -> None:
        super().start_epoch(epoch, length)
        set_epoch(epoch, self._batches)

    def _begin(self) -> None:
        """A sequence is always ready."""

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
        """A sequence keeps nothing between epochs."""


class IndexSource(CountedSource):
    """No loader: the batch is its index, and the one epoch ends where the loop does. Every rank
    knows that without asking, so the length is a number: nobody has to agree on each index."""

    kind = "count"

    @property
    def length(self) -> int | None:
        return sys.maxsize

    def _begin(self) -> None:
        """There is nothing to begin."""

    def _take(self) -> int:
        return self._done

    def _mark(self) -> dict[str, Any]:
        return {}

    def _return(self, position: dict[str, Any]) -> None:
        """The counts are all there is."""

    def _finish(self, exhausted: bool) -> None:
        """The counts are all there is."""
