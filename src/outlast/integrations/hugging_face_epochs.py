"""Order of an epoch in loaders that Accelerate has prepared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class EpochBatches:
    """Lists of indices of an epoch, in the order of Accelerate: its sampler counts the times that
    it is read, and gets the epoch's number before each."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        inner = getattr(batches, "batch_sampler", batches)
        self._parts: tuple[Any, ...] = (batches, inner, getattr(inner, "sampler", None))
        self.epoch = 0
        for each in self._parts:
            if hasattr(each, "initial_seed") and each.generator is None:
                each.generator = torch.Generator().manual_seed(each.initial_seed)  # else lazily

    def __iter__(self) -> Iterator[list[int]]:
        for each in self._parts:
            if hasattr(each, "set_epoch"):
                each.set_epoch(self.epoch)
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)
