"""Batch source protocol, its factory, and sources by index or by replay."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import xxhash
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from outlast.data.counted_source import Codec, CountedSource
from outlast.data.epoch_order import IteratorReplay
from outlast.data.foreign_streams import refuse_stream
from outlast.data.loader_state import LoaderState
from outlast.data.mapped_source import MappedSource
from outlast.data.split_dataset import SplitDataset
from outlast.data.stateful_source import (
    StatefulSource,
    declared_length,
    has_state_dict,
    is_stream_frame,
    is_torchdata,
)
from outlast.errors import CodecError, UsageError


class ReplayedSource(CountedSource):
    """Iterable without a position, restored by reading it again.

    It draws from the process's generators as under torchrun; an IteratorReplay records the states,
    so that a second reading draws the same numbers. If an epoch depends only on its number and
    recorded states, only the current epoch is read again, otherwise all epochs.
    """

    kind = "iterable"

    def __init__(self, loader: Any, codec: Codec) -> None:
        super().__init__()
        self._codec = codec
        name = type(loader).__name__
        self._once = isinstance(loader, Iterator)
        self._touched = False
        self._loader: Any = loader
        self._things = (loader, getattr(loader, "dataset", None), getattr(loader, "sampler", None))
        self._is_by_epoch = _starts_anew(loader, self._things)
        since = "the epoch's" if self._is_by_epoch else "the run's"
        self.note = (
            f"the loader ({name}) cannot report its position: a replacement worker reads all its"
            f" batches again from {since} start; to avoid that, give it state_dict and"
            " load_state_dict, or use a map-style DataLoader"
        )
        self._kept = LoaderState({"loader": loader})
        self._trail = IteratorReplay({})
        self._history: list[dict[str, Any]] = []  # one entry per epoch
        self._batches: Iterator[Any] | None = None

    def start_epoch(self, epoch: int, length: int | None) -> None:
        """See CountedSource.start_epoch; also sets the epoch of a SplitDataset, whose lengths may
        depend on it, and which others read beside its loader."""
        super().start_epoch(epoch, None)
        dataset = getattr(self._loader, "dataset", None)
        if isinstance(dataset, SplitDataset):
            self.set_epoch(epoch, dataset)
        self.set_length(length)

    @property
    def length(self) -> int | None:
        """Return the loader's declared length; None for iterators."""
        return None if self._once else declared_length(self._loader)

    def close(self) -> None:
        """Stop loader workers and drop the loader."""
        super().close()
        self._batches = None
        self._loader = None

    def _begin(self) -> None:
        kept = {} if self._once else self._kept.changes()
        self._history.append(
            {"epoch": self.epoch, "done": 0, "over": False, "whole": False, "kept": kept}
        )
        self._prepare(self.epoch)
        with self._trail.drawing():
            self._open()

    def _prepare(self, epoch: int) -> None:
        self._batches = None
        self.set_epoch(epoch, *self._things)
        self._trail = IteratorReplay({} if self._once else self._kept.generators())
        self._touched = True

    def _open(self) -> None:
        self._batches = iter(self._loader)

    def _take(self) -> Any:
        if self._batches is None:
            raise StopIteration
        with self._trail.drawing():
            batch = next(self._batches)
        entry = self._history[-1]
        if not entry["done"]:
            entry["first"] = self._digest(batch)
        entry["done"] += 1
        return batch

    def _digest(self, batch: Any) -> str:
        """Return the digest of a batch; of one that cannot be encoded, that of its type."""
        try:
            return xxhash.xxh3_64_hexdigest(self._codec.encode(batch))
        except CodecError:
            return type(batch).__name__

    def _mark(self) -> dict[str, Any]:
        needed = self._history[-1:] if self._is_by_epoch else self._history
        history = [dict(entry) for entry in needed]
        if history and not history[-1]["over"]:
            history[-1]["trail"] = self._trail.saved()
        return {"history": history, "kept": {} if self._once else self._kept.changes()}

    def _return(self, position: dict[str, Any]) -> None:
        if self._once and self._touched:
            raise UsageError(
                "the iterator given to session.batches() has been read and cannot be rewound in"
                " this process: give something that can be iterated again, or a loader with"
                " state_dict and load_state_dict"
            )
        self._history = [dict(entry) for entry in position["history"]]
        self._batches = None
        if getattr(self._loader, "persistent_workers", False) and isinstance(
            self._loader, DataLoader
        ):
            self._loader._iterator = None  # noqa: SLF001 - its processes have prefetched
        for entry in self._history:
            self._read_again(entry)
        if not self._once:
            self._kept.put(position["kept"])

    def _read_again(self, entry: dict[str, Any]) -> None:
        if not self._once:
            self._kept.put(entry["kept"])
        self._prepare(entry["epoch"])
        read = -1  # the first draw opens the iteration

        def draw() -> None:
            nonlocal read
            if self._batches is None:
                self._open()
                read += 1
                return
            batch = next(self._batches, self)
            if batch is self and read < entry["done"]:
                raise UsageError(
                    f"the loader gives {read} batches in epoch {entry['epoch']} where the"
                    f" run had taken {entry['done']}: continue with the same data, or start a"
                    " new run directory"
                )
            if read == 0 and "first" in entry and self._digest(batch) != entry["first"]:
                raise UsageError(
                    f"the loader begins epoch {entry['epoch']} with another batch when it is read"
                    " again: its data differ, or it shuffles by a generator without a seed; give"
                    " the shuffle a seed"
                )
            read += 1

        self._trail.follow(entry["trail"], draw)
        if entry["whole"]:
            self._batches = None

    def _finish(self, exhausted: bool) -> None:
        self._history[-1]["whole"] = exhausted
        self._history[-1]["over"] = True
        self._history[-1]["trail"] = self._trail.saved()
        self._batches = None


def _starts_anew(loader: Any, things: tuple[Any, ...]) -> bool:
    """Return whether an epoch is independent of earlier epochs in this process."""
    is_plain = type(loader).__iter__ is DataLoader.__iter__
    if getattr(loader, "num_workers", 0) > 0:
        # Loader processes copy the dataset at the start of the epoch, and end with it.
        return is_plain and not getattr(loader, "persistent_workers", False)
    return any(hasattr(thing, "set_epoch") for thing in things)


class SequenceSource(CountedSource):
    """List of batches, or any object with a length and indexing."""

    kind = "sequence"

    def __init__(self, batches: Any) -> None:
        """Wrap the batches; raises UsageError if there are none."""
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
        self.set_epoch(epoch, self._batches)

    def _begin(self) -> None:
        """Do nothing: a sequence is always ready."""

    def _take(self) -> Any:
        if self._done >= len(self._batches):
            raise StopIteration
        return self._batches[self._done]

    def _mark(self) -> dict[str, Any]:
        return {"kept": self._kept.changes()}

    def _return(self, position: dict[str, Any]) -> None:
        self.set_epoch(self.epoch, self._batches)
        self._kept.put(position["kept"])

    def _finish(self, exhausted: bool) -> None:
        """Do nothing: a sequence keeps no state between epochs."""


class IndexSource(CountedSource):
    """Source without a loader: each batch is its index, in one unbounded epoch.

    All ranks have the same length, so that they need not agree on each index.
    """

    kind = "count"

    @property
    def length(self) -> int | None:
        """Return sys.maxsize: the epoch is unbounded."""
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
    fresh source: after `seek`, with the generators restored, it yields the same batches from there
    on. An epoch draws no random numbers before its first `next`.
    """

    note: str  # sentence for the user about the cost of a replay, or ""
    epoch: int  # from 0
    sets_epochs: bool  # else the script calls `set_epoch` itself

    @property
    def length(self) -> int | None:
        """Return the batches in this epoch on this rank, None if unknown."""
        ...

    def start_epoch(self, epoch: int, length: int | None) -> None:
        """Begin `epoch`. `length`: the agreed minimum over ranks; None: until the loader ends."""

    def set_length(self, length: int | None) -> None:
        """Set the length of an epoch that has given no batch: `length` may depend on the epoch."""

    def next(self) -> Any:
        """Return the next batch; raises StopIteration at the end of the epoch."""
        ...

    def position(self) -> Any:
        """Return the position before the next batch, as data that `checkpoint.tree` encodes."""
        ...

    def seek(self, position: Any) -> None:
        """Go to a position; this process's generators stay unchanged."""

    def close(self) -> None:
        """Stop loader workers."""


def open_source(loader: Any, codec: Codec) -> BatchSource:
    """Return the source for the loader that a script passes to `session.batches`.

    `codec`: for messages between loader processes and this process. Raises UsageError if the loader
    is of an unsupported type or empty.
    """
    if loader is None:
        return IndexSource()
    refuse_stream(loader)
    if isinstance(loader, DataLoader) and _is_mapped(loader):
        return MappedSource(loader, codec)
    if has_state_dict(loader) and not (is_torchdata(loader) and is_stream_frame(loader.dataset)):
        return StatefulSource(loader, codec)
    if isinstance(loader, Sequence):
        return SequenceSource(loader)
    if isinstance(loader, Iterable):
        return ReplayedSource(loader, codec)
    if hasattr(loader, "__getitem__") and hasattr(loader, "__len__"):
        return SequenceSource(loader)
    raise UsageError(
        f"session.batches() was given a {type(loader).__name__}: it takes a DataLoader, a loader"
        " with state_dict and load_state_dict, a sequence of batches, another iterable, or None"
    )


def _is_mapped(loader: DataLoader[Any]) -> bool:
    """Return whether the loader is defined by its dataset and sampler alone."""
    if isinstance(loader.dataset, IterableDataset | MapDataPipe):
        return False
    if is_torchdata(loader):
        return True
    return type(loader).__iter__ is DataLoader.__iter__ and not hasattr(loader, "state_dict")
