"""Loaders of every kind; each call builds one as a new process would."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

SIZE, BATCH = 22, 4


class Augmented(Dataset[Any]):
    """Dataset whose samples carry draws from every generator that augmentations use."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2), random.random(), np.random.rand()


class OwnDice(Augmented):
    """Dataset with its own generators for augmentations."""

    def __init__(self) -> None:
        super().__init__()
        self._transforms = [{"rng": np.random.default_rng(3)}, random.Random(4)]
        self._torch = torch.Generator().manual_seed(5)

    def __getitem__(self, index: int) -> Any:
        own = torch.rand(1, generator=self._torch)
        return (
            *super().__getitem__(index), own, self._transforms[0]["rng"].random(),
            self._transforms[1].random(),
        )  # fmt: skip


class Whole(Augmented):
    """Dataset that fetches a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(i, torch.rand(1) + len(indices)) for i in indices]


class Dice(Sampler[int]):
    """Sampler that draws each index on demand, from the process's generators."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield (
                random.randrange(SIZE) + int(torch.randint(SIZE, (1,))) + np.random.randint(9)
            ) % SIZE


class Uneven(Sampler[list[int]]):
    """Batch sampler with batches of random sizes, from its own generator."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(11)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(6):
            yield self._rng.integers(0, SIZE, size=self._rng.integers(1, 5)).tolist()


class Stream(IterableDataset[Any]):
    """Iterable dataset without a position."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(SIZE):
            yield index, torch.rand(1), random.random()


class Ledger(IterableDataset[Any]):
    """Iterable dataset whose iterator has a position."""

    def __iter__(self) -> Iterator[Any]:
        return LedgerPage()


class LedgerPage(Iterator[Any]):
    """Iterator that stays at its end: torchdata calls it again after the last batch."""

    def __init__(self) -> None:
        self._at = 0

    def __next__(self) -> Any:
        if self._at == SIZE:
            raise StopIteration
        self._at += 1
        return self._at, torch.rand(1) if torch.utils.data.get_worker_info() is None else 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]


class Homemade:
    """Loader with a position that is not a DataLoader."""

    def __init__(self) -> None:
        self._at, self._epoch = 0, 0

    def __iter__(self) -> Iterator[Any]:
        while self._at < 5:
            self._at += 1
            yield self._epoch * 100 + self._at, torch.rand(1)
        self._at, self._epoch = 0, self._epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at, self._epoch = state["at"], state["epoch"]


class Bookmark:
    """Iterator whose state at the end is the end: loaded there, it is empty once, then restarts."""

    def __init__(self) -> None:
        self._at, self._from = 0, 0

    def __iter__(self) -> Iterator[Any]:
        begin, self._from = self._from, 0
        for self._at in range(begin + 1, 6):
            yield self._at, torch.rand(1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = self._from = state["at"]


class Forgetful:
    """Loader that counts its epochs and has no position."""

    def __init__(self) -> None:
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        for at in range(5):
            yield self._epoch * 100 + at, random.random()
        self._epoch += 1


class Told:
    """Loader whose epoch is set by the caller."""

    epoch = -1

    def __init__(self) -> None:
        self._rng = random.Random(5)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for at in range(5):
            yield self.epoch * 100 + at, random.random(), self._rng.random()


def plain(dataset: Dataset[Any] | None = None, **settings: Any) -> DataLoader[Any]:
    if "batch_sampler" not in settings:
        settings.setdefault("batch_size", BATCH)
    return DataLoader(Augmented() if dataset is None else dataset, **settings)


def distributed(**settings: Any) -> DataLoader[Any]:
    sampler = DistributedSampler(Augmented(), num_replicas=2, rank=1, seed=3)
    return plain(sampler=sampler, **{"batch_size": 2, **settings})


def _seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mapped(name: str, **workers: Any) -> DataLoader[Any]:
    """Return a map-style loader by the name of its sampler or feature."""
    match name:
        case "sequential":
            return plain(**workers)
        case "shuffled":
            return plain(shuffle=True, drop_last=True, **workers)
        case "generator":
            return plain(shuffle=True, generator=_seeded(), **workers)
        case "divisible":
            return plain(Augmented(20), shuffle=True, generator=_seeded(), **workers)
        case "replacement":
            sampler = RandomSampler(range(SIZE), True, 40, generator=_seeded())
            return plain(sampler=sampler, **workers)
        case "weighted":
            return plain(sampler=WeightedRandomSampler([1.0, 2.0, 3.0] * 7, 20), **workers)
        case "distributed":
            return distributed(**workers)
        case "lazy":
            return plain(sampler=Dice(), **workers)
        case "uneven":
            return plain(batch_sampler=Uneven(), **workers)
        case "batches":
            return plain(batch_sampler=BatchSampler(Dice(), 5, False), **workers)
        case "samples":
            return plain(shuffle=True, batch_size=None, dataset=Augmented(7), **workers)
        case "dice":
            return plain(OwnDice(), shuffle=True, **workers)
        case "whole":
            return plain(Whole(), shuffle=True, **workers)
        case "torchdata":
            return StatefulDataLoader(Augmented(), batch_size=BATCH, shuffle=True, **workers)
    raise ValueError(name)


MAPPED = (
    "sequential", "shuffled", "generator", "divisible", "replacement", "weighted", "distributed",
    "lazy",
    "uneven", "batches", "samples", "dice", "whole", "torchdata",
)  # fmt: skip


def other(name: str) -> Any:
    """Return a loader that is no map-style DataLoader."""
    match name:
        case "none":
            return None
        case "list":
            return [torch.full((2,), i) for i in range(5)]
        case "ledger":
            return StatefulDataLoader(Ledger(), batch_size=BATCH)
        case "ledger-workers":
            return StatefulDataLoader(Ledger(), batch_size=BATCH, num_workers=2)
        case "homemade":
            return Homemade()
        case "bookmark":
            return Bookmark()
        case "stream":
            return DataLoader(Stream(), batch_size=BATCH)
        case "stream-workers":
            return DataLoader(Stream(), batch_size=BATCH, num_workers=2, generator=_seeded())
        case "forgetful":
            return Forgetful()
        case "told":
            return Told()
    raise ValueError(name)


OTHERS = (
    "none", "list", "ledger", "ledger-workers", "homemade", "bookmark", "stream",
    "stream-workers",
    "forgetful", "told",
)  # fmt: skip
