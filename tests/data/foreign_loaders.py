"""Loaders with state and random numbers of their own."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tests.data.loader_kinds import BATCH, SIZE, Augmented, Dice, Stream, Uneven, Whole, plain
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader


class OldIdiom(Augmented):
    """Dataset with NumPy reseeded by hand in each process."""

    @staticmethod
    def hook(worker: int) -> None:
        np.random.seed(np.random.get_state(legacy=False)["state"]["key"][0] % 2**31 + worker)


class LazyDice(Dataset[Any]):
    """Dataset whose generator is made at the first item, from the seed of the process."""

    def __init__(self) -> None:
        self._is_ready = False
        self._rng: np.random.Generator | None = None

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if not self._is_ready:
            info = get_worker_info()
            self._rng = np.random.default_rng(info.seed if info else 5)
            self._is_ready = True
        assert self._rng is not None
        return index, self._rng.random()


class Hooked(Dataset[Any]):
    """Dataset with generators from worker_init_fn."""

    rng: random.Random

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return index, self.rng.random()

    @staticmethod
    def hook(_worker: int) -> None:
        info: Any = get_worker_info()
        info.dataset.rng = random.Random(torch.initial_seed())


class Counting(Dataset[Any]):
    """Dataset whose items depend on a count and on the last items."""

    def __init__(self) -> None:
        self._count = 0
        self._last: deque[int] = deque(maxlen=3)
        self._names: list[str] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        self._count += 1
        self._last.append(index)
        self._names = [str(index), *self._names[:2]]
        return index, self._count, sum(self._last), len("".join(self._names))


class Mixed(Dataset[Any]):
    """Dataset that mixes each item with the one before it."""

    def __init__(self, size: int = 3) -> None:
        self._previous = torch.zeros(size)
        self._mean = np.zeros(2)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        item = torch.full_like(self._previous, index)
        mixed = item + self._previous
        self._previous = item
        self._mean += index
        return mixed[:3], self._mean.sum()


class Shuffled(IterableDataset[Any]):
    """Shuffle buffer over numbers, split by process."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        buffer: list[int] = []
        for number in range(first, SIZE, step):
            buffer.append(number)
            if len(buffer) == 4:
                random.shuffle(buffer)
                yield buffer.pop(), torch.rand(1)
        yield from ((number, torch.rand(1)) for number in buffer)


class Shards(IterableDataset[Any]):
    """Shards of different sizes in an order drawn by epoch, as in Hugging Face's datasets."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        rng = np.random.default_rng(7 + self._epoch)
        shards = rng.permutation(5)[info.id :: info.num_workers] if info else rng.permutation(5)
        for shard in shards.tolist():
            for number in range(shard + 2):
                yield shard * 10 + number, np.random.rand(), rng.random()


class Pipeline(IterableDataset[Any]):
    """Nested stages, as in WebDataset; the shuffle has a generator."""

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self._stages: list[Callable[[Any], Any]] = [self._shuffle, self._crop]

    def _shuffle(self, source: Any) -> Iterator[int]:
        pool = list(source)
        self._rng.shuffle(pool)
        yield from pool

    def _crop(self, source: Any) -> Iterator[Any]:
        for number in source:
            yield number, torch.randint(9, (1,)), self._rng.random()

    def __iter__(self) -> Iterator[Any]:
        yield from functools.reduce(lambda source, stage: stage(source), self._stages, range(SIZE))


class Bookmarked(IterableDataset[Any]):
    """Iterator with a position and random draws."""

    def __init__(self) -> None:
        self._at = 0

    def __iter__(self) -> Iterator[Any]:
        while self._at < SIZE:
            self._at += 1
            yield self._at, torch.rand(1), random.random()
        self._at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]


class Eager(Sampler[int]):
    """Sampler that draws before it returns its iterator, and counts its epochs."""

    def __init__(self) -> None:
        self._epoch = 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._epoch + int(torch.randint(99, (1,))))
        self._epoch += 1
        return iter(torch.randperm(7, generator=generator).tolist())


class Episodes(Sampler[list[int]]):
    """Few-shot episodes, drawn on access."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(9):
            yield [*torch.randperm(SIZE)[:3].tolist(), *random.sample(range(SIZE), 2)]


class Buckets(BatchSampler):
    """BatchSampler with its own generator."""

    def __init__(self) -> None:
        super().__init__(RandomSampler(range(SIZE)), BATCH, False)
        self._rng = np.random.default_rng(3)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        self._rng.shuffle(batches)
        yield from batches


class MultiEpochs(DataLoader[Any]):
    """timm's loader: one iterator for all epochs, made with the loader."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "_DataLoader__initialized", False)
        self.batch_sampler = _Forever(self.batch_sampler)  # pyright: ignore[reportAttributeAccessIssue]
        object.__setattr__(self, "_DataLoader__initialized", True)
        self._all: Any = super().__iter__()

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        for _ in range(6):
            yield next(self._all)


class _Forever:
    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self._sampler)


class EachEpoch:
    """Loader with a new DataLoader for each epoch."""

    def __iter__(self) -> Iterator[Any]:
        return iter(plain(shuffle=True, num_workers=2))


class Zipped:
    """Two loaders at once; the shorter one is repeated."""

    def __init__(self, workers: int) -> None:
        self._one = plain(shuffle=True, num_workers=workers)
        self._two = plain(Augmented(9), shuffle=True, num_workers=workers)

    def __len__(self) -> int:
        return len(self._one)

    def __iter__(self) -> Iterator[Any]:
        two = iter(self._two)
        for batch in self._one:
            other = next(two, None)
            if other is None:
                two = iter(self._two)
                other = next(two)
            yield batch, other


def noisy_collate() -> Callable[[list[Any]], Any]:
    """Return a collate function with a generator in its closure."""
    rng = np.random.default_rng(8)
    return lambda samples: (default_collate(samples), rng.random(), torch.rand(1))


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


STRANGERS: dict[str, Callable[[], Any]] = {
    "old-idiom": lambda: plain(OldIdiom(), num_workers=2, worker_init_fn=OldIdiom.hook),
    "lazy-dice": lambda: plain(LazyDice()),
    "lazy-dice-workers": lambda: plain(LazyDice(), shuffle=True, num_workers=3),
    "lazy-dice-persistent": lambda: plain(LazyDice(), num_workers=2, persistent_workers=True),
    "hooked": lambda: plain(Hooked(), num_workers=2, worker_init_fn=Hooked.hook),
    "counting": lambda: plain(Counting()),
    "counting-workers": lambda: plain(Counting(), num_workers=3),
    "counting-persistent": lambda: plain(Counting(), num_workers=3, persistent_workers=True),
    "mixed": lambda: plain(Mixed()),
    "mixed-workers": lambda: plain(Mixed(), num_workers=2),
    "spawned-workers": lambda: plain(
        LazyDice(), shuffle=True, num_workers=1, multiprocessing_context="spawn"
    ),
    "uneven-persistent": lambda: plain(
        Augmented(26),
        batch_size=4,
        num_workers=3,
        persistent_workers=True,
        prefetch_factor=3,
        generator=_seeded(),
        shuffle=True,
    ),
    "more-workers-than-batches": lambda: plain(Augmented(6), num_workers=3),
    "episodes": lambda: plain(batch_sampler=Episodes()),
    "episodes-workers": lambda: plain(batch_sampler=Episodes(), num_workers=2),
    "eager": lambda: plain(sampler=Eager(), batch_size=None),
    "eager-batches": lambda: plain(batch_sampler=BatchSampler(Eager(), 2, False), num_workers=2),
    "eager-workers": lambda: plain(sampler=Eager(), batch_size=None, num_workers=2),
    "eager-persistent": lambda: plain(
        sampler=Eager(), batch_size=None, num_workers=2, persistent_workers=True
    ),
    "buckets": lambda: plain(batch_sampler=Buckets()),
    "buckets-workers": lambda: plain(batch_sampler=Buckets(), num_workers=2),
    "uneven-workers": lambda: plain(batch_sampler=Uneven(), num_workers=2),
    "dice-persistent": lambda: plain(sampler=Dice(), num_workers=2, persistent_workers=True),
    "drawn-again": lambda: plain(
        sampler=RandomSampler(range(SIZE), False, 3 * SIZE, generator=_seeded())
    ),
    "weighted-workers": lambda: plain(
        sampler=WeightedRandomSampler([1.0, 2.0, 3.0] * 7, 20, generator=_seeded()), num_workers=2
    ),
    "collate": lambda: plain(collate_fn=noisy_collate()),
    "collate-workers": lambda: plain(collate_fn=noisy_collate(), num_workers=2),
    "whole-workers": lambda: plain(Whole(), shuffle=True, num_workers=2, pin_memory=False),
    "stream": lambda: plain(Stream()),
    "stream-workers": lambda: plain(Stream(), num_workers=2),
    "stream-persistent": lambda: plain(Stream(), num_workers=2, persistent_workers=True),
    "shuffled": lambda: plain(Shuffled()),
    "shuffled-workers": lambda: plain(Shuffled(), num_workers=3, generator=_seeded()),
    "shards": lambda: plain(Shards()),
    "shards-workers": lambda: plain(Shards(), num_workers=3),
    "shards-persistent": lambda: plain(Shards(), num_workers=2, persistent_workers=True),
    "pipeline": lambda: plain(Pipeline()),
    "pipeline-workers": lambda: plain(Pipeline(), num_workers=2),
    "multi-epochs": lambda: MultiEpochs(Augmented(), BATCH, shuffle=True, num_workers=2),
    "each-epoch": lambda: EachEpoch(),
    "zipped": lambda: Zipped(0),
    "zipped-workers": lambda: Zipped(1),
    "torchdata": lambda: StatefulDataLoader(Augmented(), BATCH, shuffle=True, num_workers=2),
    "bookmarked": lambda: StatefulDataLoader(Bookmarked(), BATCH),
    "bookmarked-workers": lambda: StatefulDataLoader(Bookmarked(), BATCH, num_workers=2),
    "unbookmarked": lambda: StatefulDataLoader(Stream(), BATCH),
    "unbookmarked-workers": lambda: StatefulDataLoader(Stream(), BATCH, num_workers=2),
}
