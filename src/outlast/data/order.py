"""The order of one epoch: index lists from a sampler, repeatable without loading anything.

A sampler draws from the generators that it draws from under a plain DataLoader, and at the same
moments: when its iteration begins, and with each list, which loader processes fetch ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from outlast.data.loader_state import LoaderState
from outlast.data.trail import Trail
from outlast.errors import UsageError

# These draw from the process's generators at their first list only.
_DRAWS_ONCE = (
    SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler
)  # fmt: skip


class Order(Iterator[Any]):
    """One sampler's index lists, with all that is needed to come to the same place again."""

    def __init__(self, sampler: Any, generator: torch.Generator | None, dataset: Any) -> None:
        self._sampler = sampler
        self._kept = LoaderState(
            {"sampler": sampler, "generator": generator}, apart=dataset, modules=False
        )
        inner = sampler.sampler if type(sampler) is BatchSampler else sampler
        self._draws_once = type(inner) in _DRAWS_ONCE
        self.begin()

    def begin(self) -> None:
        """A new epoch: its iteration has not been opened yet."""
        self._start = self._kept.changes()
        self._owned = self._kept.generators()
        self._trail = Trail(self._owned)
        self._opens = 0
        self._lists: Iterator[Any] = iter(())
        self.fetched = 0
        self.ended = False

    def open(self) -> None:
        """Begin the sampler's iteration, or begin it anew, as loaders with processes do."""
        self._opens += 1
        with self._trail.drawing():
            self._lists = iter(self._sampler)

    def __next__(self) -> Any:
        """The next list. Once the sampler has ended it is not asked again."""
        if self.ended:
            raise StopIteration
        try:
            if self.fetched and self._draws_once and not self._owned:
                fetched = next(self._lists)
            else:
                with self._trail.drawing():
                    fetched = next(self._lists)
        except StopIteration:
            self.ended = True
            raise
        self.fetched += 1
        return fetched

    def place(self) -> dict[str, Any]:
        """Return where the order is, as plain data."""
        now = self._kept.changes().items()
        return {
            "start": self._start,
            "now": {path: value for path, value in now if not self._trail.leads_to(path, value[1])},
            "trail": self._trail.saved(),
            "opens": self._opens,
            "fetched": self.fetched,
            "ended": self.ended,
        }

    def go(self, place: Mapping[str, Any], done: int) -> list[Any]:
        """Go to `place`. Return the lists behind the first `done` that were fetched already.
        Raises UsageError when the sampler gives fewer."""
        self._kept.put(place["start"])
        self.begin()
        ahead: list[Any] = []

        def draw() -> None:
            if self._opens < place["opens"]:
                self._opens += 1
                self._lists = iter(self._sampler)
                return
            fetched = next(self._lists, self)
            if fetched is self:
                self.ended = True
                return
            self.fetched += 1
            if self.fetched > done:
                ahead.append(fetched)

        self._trail.follow(place["trail"], draw)
        while self.fetched < place["fetched"] and not self.ended:  # of those that draw once
            draw()
        if self.fetched < place["fetched"]:
            raise UsageError(
                f"the sampler now gives {self.fetched} batches where the run had taken"
                f" {place['fetched']}: continue with the same data and batch size, or start a new"
                " run directory"
            )
        self.ended = place["ended"]
        self._kept.put({**self._kept.changes(), **place["now"]})
        return ahead
