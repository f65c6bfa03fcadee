"""The batch source protocol, the choice of a source for a loader, and sources by index."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from outlast.data.counted_source import Codec, CountedSource, set_epoch
from outlast.data.loader_state import LoaderState
from outlast.data.mapped_source import MappedSource
from outlast.data.replayed_source import ReplayedSource
from outlast.data.stateful_source import (
    StatefulSource,
    has_state_dict,
    is_stream_frame,
    is_torchdata,
)
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


class BatchSource(Protocol):
    """Batches of one rank, epoch by epoch, that another process can continue.

    `position` and the states of this process's generators, both taken before a `next`, restore a
    fresh source: after `seek`, and with the generators restored, it yields the same batch, and
    every later one. An epoch draws no random numbers before its first `next`.
    """

    note: str  # one sentence for the user when replayed
    epoch: int  # from 0

    @property
    def length(self) -> int | None:
        """Return the batches in this epoch on this rank, None if unknown."""
        ...

    def start_epoch(self, epoch: int, length: int | None) -> None:
        """Begin `epoch`. `length`: the agreed minimum over ranks; None: until the loader ends."""
        ...

    def next(self) -> Any:
        """Return the next batch. Raises StopIteration at the end of the epoch."""
        ...

    def position(self) -> Any:
        """Return the position before the next batch, as data that `checkpoint.tree` encodes."""
        ...

    def seek(self, position: Any) -> None:
        """Go to a position. This process's generators stay unchanged."""
        ...

    def close(self) -> None:
        """Stop loader workers."""
        ...


def open_source(loader: Any, codec: Codec) -> BatchSource:
    """Return the source for the loader that a script passes to `session.batches`.

    `codec`: for messages between a loader's processes and this one. Raises UsageError when the
    loader is empty, or yields no batches.
    """
    if loader is None:
        return IndexSource()
    if isinstance(loader, DataLoader) and _is_mapped(loader):
        return MappedSource(loader, codec)
    if has_state_dict(loader) and not (is_torchdata(loader) and is_stream_frame(loader.dataset)):
        return StatefulSource(loader, codec)
    if isinstance(loader, Sequence):
        return SequenceSource(loader)
    if isinstance(loader, Iterable):
        return ReplayedSource(loader)
    if hasattr(loader, "__getitem__") and hasattr(loader, "__len__"):
        return SequenceSource(loader)
    raise UsageError(
        f"session.batches() was given a {type(loader).__name__}: it takes a DataLoader, a loader"
        " with state_dict and load_state_dict, a sequence of batches, another iterable, or None"
    )


def _is_mapped(loader: DataLoader[Any]) -> bool:
    """Return whether the loader is defined by its dataset and its sampler alone."""
    if isinstance(loader.dataset, IterableDataset | MapDataPipe):
        return False
    if is_torchdata(loader):
        return True
    return type(loader).__iter__ is DataLoader.__iter__ and not hasattr(loader, "state_dict")
