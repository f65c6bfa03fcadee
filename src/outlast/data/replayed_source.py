"""Any other iterable, with its position restored by reading from the start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from outlast.data.counted_source import CountedSource, set_epoch
from outlast.data.epoch_order import IteratorReplay
from outlast.data.loader_state import LoaderState
from outlast.data.stateful_source import declared_length
from outlast.errors import UsageError


class ReplayedSource(CountedSource):
    """An iterable without a position of its own.

    It draws from the process's generators as it does under torchrun; an IteratorReplay records the
    states, so that reading again draws the same. Where an epoch depends only on its number and its
    recorded states, only the present one is read again, else every one since the first.
    """

    kind = "iterable"

    def __init__(self, loader: Any) -> None:
        super().__init__()
        name = type(loader).__name__
        self._once = isinstance(loader, Iterator)
        self._touched = False
        self._loader: Any = loader
        self._things = (loader, getattr(loader, "dataset", None), getattr(loader, "sampler", None))
        self._is_by_epoch = _starts_anew(loader, self._things)
        since = "the epoch's" if self._is_by_epoch else "the run's"
        self.note = (
            f"the loader ({name}) cannot say its place: a worker that takes a seat reads all its"
            f" batches again from {since} start; give it state_dict and load_state_dict, or use a"
            " map-style DataLoader, to make that quick"
        )
        self._kept = LoaderState({"loader": loader})
        self._trail = IteratorReplay({})
        self._history: list[dict[str, Any]] = []  # of each epoch so far
        self._batches: Iterator[Any] | None = None

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
        set_epoch(epoch, *self._things)
        self._trail = IteratorReplay({} if self._once else self._kept.generators())
        self._touched = True

    def _open(self) -> None:
        self._batches = iter(self._loader)

    def _take(self) -> Any:
        if self._batches is None:
            raise StopIteration
        with self._trail.drawing():
            batch = next(self._batches)
        self._history[-1]["done"] += 1
        return batch

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
            self._loader._iterator = None  # noqa: SLF001 - its processes have read ahead
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
            elif next(self._batches, self) is self and read < entry["done"]:
                raise UsageError(
                    f"the loader gives {read} batches in epoch {entry['epoch']} where the"
                    f" run had taken {entry['done']}: continue with the same data, or start a"
                    " new run directory"
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
    """Return whether an epoch does not depend on epochs read before it in this process."""
    is_plain = type(loader).__iter__ is DataLoader.__iter__
    if getattr(loader, "num_workers", 0) > 0:
        # Its processes copy the dataset as it is when the epoch begins, and end with the epoch.
        return is_plain and not getattr(loader, "persistent_workers", False)
    return any(hasattr(thing, "set_epoch") for thing in things)
