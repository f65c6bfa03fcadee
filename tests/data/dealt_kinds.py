"""Loaders whose batches any rank can read, and some that only look so."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from outlast.data.split_dataset import SplitDataset


class Items(Dataset[int]):
    """Numbers from 0."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return range(self.size)[index]


class LengthGrouped(DistributedSampler[int]):
    """Samples of like lengths together, as DistributedLengthGroupedSampler of transformers."""

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        size = len(self.dataset)  # pyright: ignore[reportArgumentType]
        order = torch.randperm(size, generator=generator).tolist()
        chunks = [sorted(order[at : at + 8], key=lambda i: i % 5) for at in range(0, size, 8)]
        whole = list(itertools.chain(*chunks))
        whole += whole[: max(0, self.total_size - size)]
        yield from whole[self.rank : self.total_size : self.num_replicas]


class Buckets:
    """Batch sampler that gives a rank every n-th of the batches, of several sizes; the last ranks
    have fewer."""

    def __init__(self, size: int, num_replicas: int, rank: int) -> None:
        self.size, self.num_replicas, self.rank = size, num_replicas, rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _all(self) -> list[list[int]]:
        rng = np.random.default_rng([3, self.epoch])
        rest, found = rng.permutation(self.size), []
        while len(rest):
            count = int(rng.integers(1, 5))
            found.append(list(rest[:count]))  # numbers of NumPy
            rest = rest[count:]
        return found

    def __len__(self) -> int:
        return len(self._all()[self.rank :: self.num_replicas])

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._all()[self.rank :: self.num_replicas]


class Seeded(Sampler[int]):
    """Random order by a seed and the epoch, the same on all ranks."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self.epoch).sample(range(self.size), self.size)


class SharedBatches:
    """Each process's batches of another batch sampler, as BatchSamplerShard of Accelerate."""

    def __init__(self, sampler: BatchSampler, num_processes: int, process_index: int) -> None:
        self.batch_sampler, self.sampler = sampler, sampler.sampler
        self.num_processes, self.process_index = num_processes, process_index

    def __len__(self) -> int:
        return len(self.batch_sampler) // self.num_processes

    def __iter__(self) -> Iterator[list[int]]:
        found = [*self.batch_sampler][self.process_index :: self.num_processes]
        yield from found[: len(self)]


class Numbers(SplitDataset[int]):
    """Numbers by residue, in an order of their own in each epoch."""

    def __init__(self, size: int, num_replicas: int, rank: int, *, skips: bool = False) -> None:
        super().__init__(num_replicas, rank)
        self.size, self.skips = size, skips

    def split_length(self, split: int, splits: int) -> int:
        return len(range(split, self.size, splits))

    def read_split(self, split: int, splits: int) -> Iterator[int]:
        numbers = [*range(split, self.size, splits)]
        random.Random(f"{self.epoch} {split}").shuffle(numbers)
        return Skipping(numbers) if self.skips else iter(numbers)


class Skipping(Iterator[int]):
    """Iterator that skips samples without reading them."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers, self._at = numbers, 0

    def __next__(self) -> int:
        if self._at >= len(self._numbers):
            raise StopIteration
        self._at += 1
        return self._numbers[self._at - 1]

    def skip(self, count: int) -> None:
        self._at += count


Maker = Callable[..., DataLoader[Any]]


def _distributed(kind: type[DataLoader[Any]], sampler: type[DistributedSampler[Any]]) -> Maker:
    def make(size: int, world: int, rank: int, batch: int, **more: Any) -> DataLoader[Any]:
        items = Items(size)
        places = sampler(items, world, rank, seed=5, drop_last=more.get("drop_last", False))
        return kind(items, batch_size=batch, sampler=places, **more)

    return make


def _single(size: int, world: int, rank: int, _batch: int, **more: Any) -> DataLoader[Any]:
    items = Items(size)
    more.pop("drop_last", None)
    return DataLoader(items, None, sampler=DistributedSampler(items, world, rank), **more)


def _given(size: int, world: int, rank: int, batch: int, **more: Any) -> DataLoader[Any]:
    items = Items(size)
    batches = BatchSampler(
        DistributedSampler(items, world, rank), batch, more.pop("drop_last", False)
    )
    return DataLoader(items, batch_sampler=batches, **more)


def _buckets(size: int, world: int, rank: int, _batch: int, **more: Any) -> DataLoader[Any]:
    more.pop("drop_last", None)
    return StatefulDataLoader(Items(size), batch_sampler=Buckets(size, world, rank), **more)  # pyright: ignore[reportArgumentType]


def _shared(size: int, world: int, rank: int, batch: int, **more: Any) -> DataLoader[Any]:
    batches = BatchSampler(Seeded(size), batch, more.pop("drop_last", False))
    return DataLoader(Items(size), batch_sampler=SharedBatches(batches, world, rank), **more)  # pyright: ignore[reportArgumentType]


def _split(kind: type[DataLoader[Any]], *, skips: bool) -> Maker:
    def make(size: int, world: int, rank: int, batch: int, **more: Any) -> DataLoader[Any]:
        return kind(Numbers(size, world, rank, skips=skips), batch_size=batch, **more)

    return make


def _split_single(size: int, world: int, rank: int, _batch: int, **more: Any) -> DataLoader[Any]:
    more.pop("drop_last", None)
    return DataLoader(Numbers(size, world, rank), batch_size=None, **more)


DEALT: dict[str, Maker] = {
    "DataLoader": _distributed(DataLoader, DistributedSampler),
    "StatefulDataLoader": _distributed(StatefulDataLoader, DistributedSampler),
    "StatefulDistributedSampler": _distributed(StatefulDataLoader, StatefulDistributedSampler),
    "single samples": _single,
    "given batch sampler": _given,
    "subclass": _distributed(DataLoader, LengthGrouped),
    "buckets": _buckets,
    "shared batches": _shared,
    "splits": _split(DataLoader, skips=False),
    "splits with a position": _split(StatefulDataLoader, skips=True),
    "single samples of splits": _split_single,
}
