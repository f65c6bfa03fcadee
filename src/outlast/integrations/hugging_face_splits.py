"""Streams of Hugging Face datasets in splits.

`split_dataset_by_node` deals all shards anew in each epoch, and loader processes divide those of
their rank: nobody knows the number of a process's samples before it has read them. Here a split
has the same shards in all epochs, in an order of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from outlast.errors import UsageError
from outlast.integrations.counted_shards import CountedShards

_ENTROPY_MIN = 1 << 64  # a larger seed is not a user's: NumPy has drawn it


class HuggingFaceSplits(CountedShards):
    """Splits of a `datasets.IterableDataset`, in place of `split_dataset_by_node`::

        dataset = HuggingFaceSplits(stream, lengths)

    `lengths`: of `HuggingFaceSplits.count(stream)`; None for a stream without an end.
    """

    def __init__(self, stream: Any, lengths: Sequence[int] | None = None) -> None:
        """Raise UsageError for a stream that other processes cannot read again."""
        why = _why_not_read(stream)
        if why:
            raise UsageError(f"HuggingFaceSplits cannot read {type(stream).__name__}: {why}")
        super().__init__(stream.num_shards, lengths)
        self.stream = stream

    @staticmethod
    def count(stream: Any) -> list[int]:
        """Return the number of samples of each shard. All of them are read: do so once, in
        `session.shared("lengths", lambda: HuggingFaceSplits.count(stream))`."""
        shards = range(stream.num_shards)
        return [sum(1 for _ in _shard(stream, number, len(shards), 0)) for number in shards]

    def read_shards(self, first: int, step: int) -> Iterator[Any]:
        """See CountedShards.read_shards."""
        return _shard(self.stream, first, step, self.epoch)


def _shard(stream: Any, first: int, step: int, epoch: int) -> Iterator[Any]:
    view = stream.shard(num_shards=step, index=first, contiguous=False)
    view.set_epoch(epoch)
    if get_worker_info() is not None:
        import_module("fsspec.asyn").reset_lock()  # it was copied from the process that forked
    samples = iter(view)
    with _outside_loader_process():  # else it takes a part of the view, when it begins
        begun = [*islice(samples, 1)]
    yield from begun
    yield from samples


@contextmanager
def _outside_loader_process() -> Iterator[None]:
    """Hide that this is a process of a DataLoader."""
    worker: Any = import_module("torch.utils.data._utils.worker")
    info = worker._worker_info  # noqa: SLF001 - no public name sets it
    worker._worker_info = None  # noqa: SLF001
    try:
        yield
    finally:
        worker._worker_info = info  # noqa: SLF001


def _why_not_read(stream: Any) -> str:
    if not all(hasattr(stream, name) for name in ("shard", "num_shards", "set_epoch", "skip")):
        return "it is no datasets.IterableDataset: a Dataset takes a DistributedSampler"
    parts = vars(stream)
    if parts.get("_distributed") is not None:
        return "it is divided already: leave split_dataset_by_node out"
    for generator in _generators(parts.get("_ex_iterable")):
        seeds = getattr(generator.bit_generator, "seed_seq", None)
        entropy = getattr(seeds, "entropy", 0)
        if isinstance(entropy, int) and entropy >= _ENTROPY_MIN:
            return "its shuffle has no seed, so that each process has another order: give it one"
    return ""


def _generators(part: Any) -> Iterator[np.random.Generator]:
    """Return the generators of a stream's operations, each of which has the one before it."""
    for value in vars(part).values() if part is not None else ():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, np.random.Generator):
                yield each
            elif type(each).__module__.startswith("datasets."):
                yield from _generators(each)
