"""Loaders with a position in state_dict and load_state_dict.

The state_dict of torchdata's StatefulDataLoader over a stream contains the positions of dataset
and iterator, but not the generators of loader processes. Wrappers of both add them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from outlast import random_state
from outlast.data.counted_source import (
    Codec,
    CountedSource,
    DatasetWrapper,
    LoaderProcessState,
    StartHook,
)
from outlast.data.loader_state import LoaderState
from outlast.data.split_dataset import SplitDataset, rank_length
from outlast.errors import UsageError


def is_torchdata(loader: Any) -> bool:
    """Return whether this is a StatefulDataLoader, or a subclass with the same iteration."""
    for base in type(loader).__mro__:
        if "__iter__" in vars(base):
            return f"{base.__module__}.".startswith("torchdata.stateful_dataloader.")
    return False


def has_state_dict(thing: Any) -> bool:
    """Return whether the object has `state_dict` and `load_state_dict`."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def is_stream_frame(dataset: Any) -> bool:
    """Return whether iterating the dataset creates a generator frame, which has no state."""
    return not has_state_dict(dataset) and inspect.isgeneratorfunction(type(dataset).__iter__)


def with_positions(loader: Any, codec: Codec) -> Any:
    """Return the loader with a dataset whose position includes the processes' generators."""
    if not isinstance(loader.dataset, IterableDataset):
        return loader
    copied = copy.copy(loader)
    kind = _StatefulBookmarks if has_state_dict(loader.dataset) else _Bookmarks
    vars(copied)["dataset"] = kind(loader.dataset, loader.collate_fn, codec)
    if loader.num_workers > 0:
        copied.worker_init_fn = StartHook(loader.worker_init_fn)
    return copied


class _Bookmarks(IterableDataset[Any], DatasetWrapper):
    """Stream with the generators of its loader process."""

    def __init__(self, dataset: Any, collate: Any, codec: Codec) -> None:
        self.dataset = dataset
        self._collate, self._codec = collate, codec
        self._desk: LoaderProcessState | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._desk is None and get_worker_info() is not None:
            self._desk = LoaderProcessState(
                {"dataset": self.dataset, "collate": self._collate}, attributes=False
            )
        read = iter(self.dataset)
        if not has_state_dict(self.dataset) and not has_state_dict(read):
            raise UsageError(
                f"neither {type(self.dataset).__name__} nor its iterator has state_dict and"
                " load_state_dict, so that StatefulDataLoader would read it again with other"
                " random numbers: give it a state, or use torch's DataLoader"
            )
        return _Bookmark(read, self._desk, self._codec)


class _StatefulBookmarks(_Bookmarks):
    """Stream with its own state_dict."""

    def state_dict(self) -> Any:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)


class _Bookmark(Iterator[Any]):
    """Iterator whose state includes its process's generators and whether it is exhausted."""

    def __init__(self, read: Iterator[Any], desk: LoaderProcessState | None, codec: Codec) -> None:
        self._read: Any = read
        self._desk, self._codec = desk, codec
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            return next(self._read)
        except StopIteration:
            self._ended = True
            raise

    def state_dict(self) -> dict[str, Any]:
        place = self._read.state_dict() if has_state_dict(self._read) else None
        process = self._codec.encode(self._desk.all_changes()) if self._desk is not None else b""
        return {"place": place, "process": process, "ended": self._ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["place"] is not None:
            self._read.load_state_dict(state["place"])
        if self._desk is not None and state["process"]:
            self._desk.put(self._codec.decode(state["process"]))
        self._ended = state["ended"]


class StatefulSource(CountedSource):
    """Iterable with `state_dict` and `load_state_dict`, of torchdata or any other library.

    Within one process the loader is iterated without reloading. A state is loaded only to restore a
    position, or after an epoch was cut before the loader's end.
    """

    kind = "loader with a state_dict"

    def __init__(self, loader: Any, codec: Codec) -> None:
        super().__init__()
        self._restarts = is_torchdata(loader)
        self._parts = (loader, *_parts(loader))
        self._loader: Any = with_positions(loader, codec) if self._restarts else loader
        self._persists = self._restarts and loader.persistent_workers and loader.num_workers > 0
        roots = {"loader": loader} if not self._restarts else {"dataset": loader.dataset}
        self._kept = LoaderState(roots, attributes=False)
        self._batches: Iterator[Any] | None = None
        self._saved_state: Any = None  # loader state at the last epoch's end; None: not iterated
        self._cut = False  # that epoch ended before the loader's end
        self._is_elsewhere = False  # `_saved_state` is not loaded into this process's loader yet

    @property
    def length(self) -> int | None:
        """Return the loader's declared length; None for streams."""
        return declared_length(self._loader)

    def close(self) -> None:
        """Stop loader workers and drop the loader."""
        super().close()
        self._batches = None
        self._loader = None

    def start_epoch(self, epoch: int, length: int | None) -> None:
        """See CountedSource.start_epoch; also calls `set_epoch` of loader, dataset and sampler."""
        super().start_epoch(epoch, length)
        self.set_epoch(self.epoch, *self._parts)

    def _begin(self) -> None:
        if not (self._is_elsewhere or self._cut):
            self._batches = iter(self._loader)
            return
        self._is_elsewhere = False
        kept = self._kept.changes()
        with random_state.preserved():
            self._loader.load_state_dict(self._saved_state)
            if self._restarts or self._cut:
                self._batches = iter(self._loader)  # at the last epoch's end
            self._kept.put(kept)
        if not self._persists or self._cut:
            self._batches = iter(self._loader)

    def _take(self) -> Any:
        assert self._batches is not None, "an epoch begins before it gives batches"
        try:
            return next(self._batches)
        except StopIteration:
            if self._done or self._saved_state is None:
                raise
            # The loaded position is the loader's end: iterate it again.
            self._batches = iter(self._loader)
            return next(self._batches)

    def _mark(self) -> dict[str, Any]:
        state = self._saved_state if self._batches is None else self._loader.state_dict()
        return {"state": state, "cut": self._cut, "kept": self._kept.changes()}

    def _return(self, position: dict[str, Any]) -> None:
        self._batches = None
        self.set_epoch(self.epoch, *self._parts)
        self._saved_state, self._cut = position["state"], position["cut"]
        self._is_elsewhere = self._saved_state is not None
        if self._begun and not position["ended"]:
            self._is_elsewhere = False
            with random_state.preserved():
                self._loader.load_state_dict(self._saved_state)
                self._batches = iter(self._loader)
        self._kept.put(position["kept"])

    def _finish(self, exhausted: bool) -> None:
        if self._batches is None:  # the epoch had ended at the restored position
            return
        self._cut = False
        if not exhausted:
            with random_state.preserved():
                self._run_out()
        self._saved_state = self._loader.state_dict()
        self._batches = None

    def _run_out(self) -> None:
        """Exhaust the loader, or set `_cut` for torchdata's loaders.

        A new epoch must begin at the loader's end, since most loaders continue from their position
        when iterated again.
        """
        assert self._batches is not None, "only an epoch that has begun runs out"
        if self._restarts and not self._done == self._limit == self.length:
            self._cut = True
            return
        for _ in self._batches:
            pass


def declared_length(loader: Any) -> int | None:
    """Return `len(loader)` if it is exact; None for streams, whose length is an estimate, unless
    they have splits."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, DatasetWrapper):
        dataset = dataset.dataset
    if isinstance(dataset, SplitDataset) and isinstance(loader, DataLoader):
        return rank_length(loader, dataset)
    if isinstance(dataset, IterableDataset):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _parts(loader: Any) -> list[Any]:
    names = ("dataset", "sampler", "batch_sampler")
    return [part for name in names if (part := getattr(loader, name, None)) is not None]
