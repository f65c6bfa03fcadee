"""Streams in splits, each of which any rank can read."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from outlast.errors import UsageError

T_co = TypeVar("T_co", covariant=True)
_END = object()


class SplitDataset(IterableDataset[T_co]):
    """Stream of samples that ranks divide into splits, and whose splits any rank can read.

    Each rank's loader reads split `rank` of `num_replicas`. With W loader processes, process w
    reads split `rank * W + w` of `num_replicas * W`. The samples of a split depend on its number
    and on `epoch` alone: while ranks are absent, others read their splits from the start.

    `num_replicas`, `rank`: as of DistributedSampler; by default those of the process group.
    """

    def __init__(self, num_replicas: int | None = None, rank: int | None = None) -> None:
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise UsageError(f"rank {self.rank} of a SplitDataset of {self.num_replicas} replicas")
        self.epoch = 0

    @abstractmethod
    def read_split(self, split: int, splits: int) -> Iterable[T_co]:
        """Return the samples of one of `splits` splits in `self.epoch`, from the first one. An
        iterator with `skip(count)` is not read for samples that are skipped."""

    @abstractmethod
    def split_length(self, split: int, splits: int) -> int:
        """Return the number of samples of a split in `self.epoch`; `sys.maxsize` if it never
        ends."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as `session.batches` does before each."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[T_co]:
        """Return the samples of this rank, in a loader process those of its own split."""
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return SplitReader(self, self.rank * workers + worker, self.num_replicas * workers)


class SplitReader(Iterator[Any]):
    """Iterator of one split, with a position."""

    def __init__(self, dataset: SplitDataset[Any], split: int, splits: int) -> None:
        self._dataset, self._split, self._splits = dataset, split, splits
        self._length = dataset.split_length(split, splits)
        self._samples: Any = None
        self.done = 0

    def __next__(self) -> Any:
        if self._samples is None:
            self._samples = iter(self._dataset.read_split(self._split, self._splits))
        sample = next(self._samples, _END)
        if (sample is _END) != (self.done >= self._length):
            found = f"only {self.done}" if sample is _END else "more"
            raise UsageError(
                f"split {self._split} of {self._splits} of {type(self._dataset).__name__} gives"
                f" {found} samples where split_length returns {self._length}: the batch was not"
                " trained; correct split_length, or read_split"
            )
        if sample is _END:
            raise StopIteration
        self.done += 1
        return sample

    def skip(self, count: int) -> None:
        """Go on by `count` samples."""
        if count and self._samples is None:
            self._samples = iter(self._dataset.read_split(self._split, self._splits))
        able = getattr(self._samples, "skip", None)
        if callable(able) and count:
            able(count)
            self.done += count
            return
        for _ in range(count):
            next(self)

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position that is not before this one."""
        self.skip(state["done"] - self.done)


def split_batches(loader: Any, dataset: SplitDataset[Any], rank: int) -> list[int]:
    """Return the number of batches of each loader process of a rank, in an epoch of a SplitDataset;
    without processes that of the loader."""
    processes, size = max(loader.num_workers, 1), loader.batch_size or 1
    counts: list[int] = []
    for process in range(processes):
        length = dataset.split_length(rank * processes + process, dataset.num_replicas * processes)
        counts.append(length // size if loader.drop_last else -(-length // size))
    return counts


def rank_length(loader: Any, dataset: SplitDataset[Any]) -> int:
    """Return the number of batches of the own rank's loader."""
    return min(sum(split_batches(loader, dataset, dataset.rank)), sys.maxsize)


def find_batch(counts: list[int], row: int) -> tuple[int, int]:
    """Return the loader process that gives batch `row`, and which of its own it is. Processes give
    batches in turn; one at its end is left out."""
    low = 0
    for level in sorted({*counts}):
        active = [process for process, count in enumerate(counts) if count > low]
        span = (level - low) * len(active)
        if row < span:
            return active[row % len(active)], low + row // len(active)
        row, low = row - span, level
    raise UsageError(f"a rank's splits have no batch {row} beyond their last ones")
