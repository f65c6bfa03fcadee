"""The batch source protocol, and the choice of a source for a loader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from outlast.data.counted_source import Codec
from outlast.data.indexed_sources import IndexSource, SequenceSource
from outlast.data.mapped_source import MappedSource
from outlast.data.replayed_source import ReplayedSource
from outlast.data.stateful_source import StatefulSource
from outlast.data.stream_positions import has_state_dict, is_stream_frame, is_torchdata
from outlast.errors import UsageError


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
