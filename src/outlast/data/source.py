"""Batches with a position: what a source is, and which one fits a loader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from outlast.data.mapped import MappedSource
from outlast.data.plain import IndexSource, SequenceSource
from outlast.data.replayed import ReplayedSource
from outlast.data.stateful import StatefulSource
from outlast.errors import UsageError


class Source(Protocol):
    """Batches of one rank, epoch by epoch, that another process can continue.

    `position` with the states of this process's generators, both taken before a `next`, is all
    that a fresh source needs: after `seek`, and the generators put back, it gives the same batch,
    and every later one. An epoch draws nothing before its first `next`.
    """

    note: str  # one sentence for the user when replayed
    epoch: int  # from 0

    @property
    def length(self) -> int | None:
        """Batches in this epoch on this rank, None if unknown."""
        ...

    def start_epoch(self, epoch: int, length: int | None) -> None:
        """Begin `epoch`. `length`: the agreed minimum over ranks; None: until the loader ends."""
        ...

    def next(self) -> Any:
        """The next batch. Raises StopIteration at the end of the epoch."""
        ...

    def position(self) -> Any:
        """The place before the next batch, as data that `checkpoint.tree` encodes."""
        ...

    def seek(self, position: Any) -> None:
        """Go to a place. This process's generators stay as they are."""
        ...

    def close(self) -> None:
        """Stop loader workers."""
        ...


def open_source(loader: Any) -> Source:
    """The source for what a script gives to `session.batches`.

    Raises UsageError when the loader is empty, or nothing that gives batches.
    """
    if loader is None:
        return IndexSource()
    if isinstance(loader, DataLoader) and _is_mapped(loader):
        return MappedSource(loader)
    if all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")):
        return StatefulSource(loader, _stateful_note(loader))
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
    """Whether the loader is nothing but its dataset and its sampler."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader).__module__.startswith("torchdata."):
        parts = (loader.dataset, loader.sampler, loader.batch_sampler)
        return not any(
            hasattr(part, "state_dict") for part in parts
            if not type(part).__module__.startswith("torchdata.")
        )  # fmt: skip
    return type(loader).__iter__ is DataLoader.__iter__ and not hasattr(loader, "state_dict")


def _stateful_note(loader: Any) -> str:
    if getattr(loader, "num_workers", 0) > 0:
        return (
            "random draws inside the loader's workers are as exact as what its state_dict keeps of"
            " them; draw in the main process, or from the dataset's own saved state"
        )
    return ""
