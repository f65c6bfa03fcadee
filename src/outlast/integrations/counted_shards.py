"""Streams of shards with known numbers of samples, in splits.

| shards | split s of n |
|---|---|
| n or more | shards s, s + n, s + 2n, ... |
| fewer | samples s, s + n, s + 2n, ... of all shards, each of which each process reads |
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from outlast.data.split_dataset import SplitDataset
from outlast.errors import UsageError


class CountedShards(SplitDataset[Any]):
    """Base of streams that read shards by their numbers.

    `lengths`: samples of each shard, behind filters; None for a stream without an end.
    """

    def __init__(self, shards: int, lengths: Sequence[int] | None) -> None:
        if lengths is not None and len(lengths) != shards:
            raise UsageError(
                f"{type(self).__name__} was given the lengths of {len(lengths)} shards for a stream"
                f" of {shards}: count them again with {type(self).__name__}.count"
            )
        super().__init__()
        self.shards, self.lengths = shards, None if lengths is None else tuple(lengths)

    @abstractmethod
    def read_shards(self, first: int, step: int) -> Iterable[Any]:
        """Return the samples of shards `first`, `first` + `step`, ... in `self.epoch`."""

    def split_length(self, split: int, splits: int) -> int:
        """See SplitDataset.split_length."""
        if self.lengths is None:
            return sys.maxsize
        if self.shards < splits:
            return len(range(split, sum(self.lengths), splits))
        return sum(self.lengths[split::splits])

    def read_split(self, split: int, splits: int) -> Iterator[Any]:
        """See SplitDataset.read_split."""
        if self.shards < splits:
            return islice(self.read_shards(0, 1), split, None, splits)
        return iter(self.read_shards(split, splits))
