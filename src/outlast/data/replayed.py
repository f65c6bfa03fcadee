"""Any other iterable: its place is found again by reading from the start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from outlast import generators
from outlast.data import randomness
from outlast.data.counted import Counted, set_epoch
from outlast.data.stateful import declared_length
from outlast.errors import UsageError


class ReplayedSource(Counted):
    """An iterable that cannot say its place.

    What it draws in this process comes from private generators, so that reading again draws the
    same. With `set_epoch` only the present epoch is read again, else every one since the first.
    """

    kind = "iterable"

    def __init__(self, loader: Any) -> None:
        super().__init__()
        name = type(loader).__name__
        self._once = isinstance(loader, Iterator)
        self._touched = False
        self._loader: Any = loader
        self._things = (loader, getattr(loader, "dataset", None), getattr(loader, "sampler", None))
        self._has_epochs = any(hasattr(thing, "set_epoch") for thing in self._things)
        since = "the epoch's" if self._has_epochs else "the run's"
        self.note = (
            f"the loader ({name}) cannot say its place: a worker that takes a seat reads all its"
            f" batches again from {since} start; give it state_dict and load_state_dict, or use a"
            " map-style DataLoader, to make that quick; random numbers that it draws come from"
            " generators of its own, and are others than under torchrun"
        )
        self._kept = randomness.owned({"loader": loader})
        self._fresh = generators.states(self._kept)
        self._history: list[dict[str, Any]] = []  # of each epoch so far
        self._batches: Iterator[Any] | None = None

    @property
    def length(self) -> int | None:
        return None if self._once else declared_length(self._loader)

    def close(self) -> None:
        super().close()
        self._batches = None
        self._loader = None

    def _begin(self) -> None:
        kept = {} if self._once else generators.states(self._kept)
        self._history.append(
            {"epoch": self.epoch, "seed": self._seed(), "done": 0, "whole": False, "kept": kept}
        )
        self._open(self._history[-1])

    def _seed(self) -> int:
        """A seed for this epoch. A DataLoader draws one from the process, other iterables do not:
        what the script draws next is what it would draw without us."""
        if isinstance(self._loader, DataLoader):
            return randomness.draw_seed(None)
        with generators.preserved():
            return randomness.mix(randomness.draw_seed(None), self.epoch) >> 1

    def _open(self, entry: dict[str, Any]) -> None:
        self._batches = None
        set_epoch(entry["epoch"], *self._things)
        self._private = randomness.Private(entry["seed"], {}, process=True)
        self._touched = True
        with self._private:
            self._batches = iter(self._loader)

    def _take(self) -> Any:
        if self._batches is None:
            raise StopIteration
        with self._private:
            batch = next(self._batches)
        self._history[-1]["done"] += 1
        return batch

    def _mark(self) -> dict[str, Any]:
        needed = self._history[-1:] if self._has_epochs else self._history
        return {"history": [dict(entry) for entry in needed]}

    def _return(self, position: dict[str, Any]) -> None:
        if self._once and self._touched:
            raise UsageError(
                "the iterator given to session.batches() has been read and cannot be rewound in"
                " this process: give something that can be iterated again, or a loader with"
                " state_dict and load_state_dict"
            )
        self._history = [dict(entry) for entry in position["history"]]
        self._batches = None
        if not self._has_epochs:
            generators.put(self._kept, self._fresh)
        with generators.preserved():
            for entry in self._history:
                self._read_again(entry)

    def _read_again(self, entry: dict[str, Any]) -> None:
        if self._has_epochs:
            generators.put(self._kept, entry["kept"])
        self._open(entry)
        assert self._batches is not None, "an opened epoch gives batches"
        with self._private:
            for number in range(entry["done"]):
                if next(self._batches, self) is self:
                    raise UsageError(
                        f"the loader gives {number} batches in epoch {entry['epoch']} where the"
                        f" run had taken {entry['done']}: continue with the same data, or start a"
                        " new run directory"
                    )
            if entry["whole"]:
                next(self._batches, None)

    def _finish(self, exhausted: bool) -> None:
        self._history[-1]["whole"] = exhausted
        self._batches = None
