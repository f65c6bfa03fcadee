"""Positions of torchdata's StatefulDataLoader over streams, with its processes' generators.

Its state_dict has the position of the dataset and of its iterator, and not the generators of its
processes. A wrapper around both adds them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from outlast.data.counted_source import Codec
from outlast.data.loader_process import DatasetWrapper, LoaderProcessState, StartHook
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
    """Return the loader over a dataset whose position includes its processes' generators."""
    if not isinstance(loader.dataset, IterableDataset):
        return loader
    copied = copy.copy(loader)
    kind = _StatefulBookmarks if has_state_dict(loader.dataset) else _Bookmarks
    vars(copied)["dataset"] = kind(loader.dataset, loader.collate_fn, codec)
    if loader.num_workers > 0:
        copied.worker_init_fn = StartHook(loader.worker_init_fn)
    return copied


class _Bookmarks(IterableDataset[Any], DatasetWrapper):
    """A stream, and the generators of the process that reads it."""

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
    """A stream with a state_dict of its own."""

    def state_dict(self) -> Any:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)


class _Bookmark(Iterator[Any]):
    """An iterator whose state has the generators of its process, and whether it has ended."""

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
