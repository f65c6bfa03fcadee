"""Batches of any rank of a loader, by their numbers in a deal (batch_deal.py)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset


def sampler_of(loader: Any) -> tuple[int, ...]:
    """Return `num_replicas` and `rank` of a loader that can be dealt; () without one."""
    if loader is None or why_not_dealt(loader):
        return ()
    return int(loader.sampler.num_replicas), int(loader.sampler.rank)


def why_not_dealt(loader: Any) -> str:
    """Return why the batches of a loader's ranks cannot be dealt to others; "" if they can, or if
    there is no loader."""
    if loader is None:
        return ""
    name = type(loader).__name__
    if type(loader).__iter__ is not DataLoader.__iter__ or isinstance(
        loader.dataset, IterableDataset
    ):
        return f"only a rank itself can read its batches (of a {name})"
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(batches) not in (BatchSampler, type(None)) or (
        batches is not None and batches.sampler is not sampler
    ):
        return f"its batches come from a {type(batches).__name__}, not from a DistributedSampler"
    if type(sampler) is not DistributedSampler:
        return f"its samples come from a {type(sampler).__name__}, not from a DistributedSampler"
    return ""


class DealtLoader:
    """The batches of all ranks of a sampler in one epoch, read in this process."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        """`why_not_dealt` returns "" for the loader, whose sampler has its epoch."""
        sampler: Any = copy.copy(loader.sampler)
        self._replicas = int(sampler.num_replicas)
        sampler.num_samples, sampler.num_replicas, sampler.rank = sampler.total_size, 1, 0
        self._samples: list[int] = [*sampler]  # rank r has those from r on, in steps of all
        self._loader = loader
        self._size = loader.batch_size

    def load(self, row: int, rank: int) -> Any:
        """Return the batch of a rank in a row."""
        size, step = self._size or 1, self._replicas
        at = slice(row * size * step + rank, (row + 1) * size * step, step)
        indices = self._samples[at]
        batched: dict[str, Any] = {"batch_sampler": [indices]}
        if self._size is None:
            batched = {"sampler": indices, "batch_size": None}
        one: DataLoader[Any] = DataLoader(
            self._loader.dataset,
            collate_fn=self._loader.collate_fn,
            pin_memory=self._loader.pin_memory,
            generator=torch.Generator(),  # else its base seed would come from the process's own
            **batched,
        )
        (batch,) = one
        return batch
