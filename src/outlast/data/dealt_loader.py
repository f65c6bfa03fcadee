"""Batches of any rank of a loader, by their numbers in a deal (batch_deal.py).

| loader | how a rank reads those of others |
|---|---|
| DataLoader, StatefulDataLoader with a DistributedSampler | by the samples of its whole world |
| with another sampler that has `num_replicas` and `rank` | by copies of it (sampler_copies.py) |
| over a SplitDataset | by reading their splits from the start (split_dataset.py) |
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from outlast import random_state
from outlast.data.counted_source import Codec
from outlast.data.loader_state import LoaderState
from outlast.data.sampler_copies import (
    SamplerCopies,
    ShareOrder,
    chain_of,
    digest_of,
    why_not_copied,
)
from outlast.data.split_dataset import SplitDataset, SplitReader, find_batch, split_batches
from outlast.data.stateful_source import is_torchdata
from outlast.errors import CodecError, UsageError


def why_not_dealt(loader: Any) -> str:
    """Return why the batches of a loader's ranks cannot be dealt to others; "" if they can, or if
    there is no loader."""
    if loader is None:
        return ""
    name = type(loader).__name__
    is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not (is_plain or is_torchdata(loader)):
        return f"only a rank itself can read its batches (of a {name})"
    if isinstance(loader.dataset, SplitDataset):
        return _why_not_split(loader)
    if isinstance(loader.dataset, IterableDataset):
        kind = type(loader.dataset).__name__
        return (
            f"only a rank itself can read its batches (of a {name} over the stream {kind}, which is"
            " not an outlast.SplitDataset)"
        )
    return "" if _is_distributed(loader) else why_not_copied(loader)


def _why_not_split(loader: Any) -> str:
    kind = type(loader.dataset)
    if kind.__iter__ is not SplitDataset.__iter__:
        return f"{kind.__name__} reads in an __iter__ of its own, and not by SplitDataset's"
    return ""


def _is_distributed(loader: Any) -> bool:
    """Return whether all is as torch's DistributedSampler and BatchSampler have it."""
    *batches, sampler = chain_of(loader)
    return (
        type(sampler) is DistributedSampler
        and len(batches) <= 1
        and all(
            isinstance(part, BatchSampler)
            and type(part).__module__.startswith(("torch.", "torchdata."))
            for part in batches
        )
    )


class LoaderShares(ABC):
    """Batches of all ranks of a loader. `is_certain`: they need not be compared between ranks that
    run the same script."""

    is_certain = False

    @property
    @abstractmethod
    def place(self) -> tuple[int, int]:
        """Return the number of replicas that divide the samples, and this rank among them; a hot
        spare's is set with its rank."""

    @abstractmethod
    def order(self, epoch: int) -> ShareOrder:
        """Return the order of this rank's batches in an epoch, which dataset and sampler have been
        set to, before its first batch."""

    @abstractmethod
    def length(self, rank: int, epoch: int) -> int:
        """Return the number of a rank's batches in an epoch, as `order`."""

    @abstractmethod
    def digest(self, rank: int) -> str:
        """Return the digest of a rank's batches in the current epoch, as in its order."""

    @abstractmethod
    def load(self, row: int, rank: int) -> Any:
        """Return the batch of a rank in a row of the current epoch."""

    @abstractmethod
    def begin(self, epoch: int) -> None:
        """Begin to read an epoch, which dataset and sampler have been set to."""


def open_shares(loader: Any, codec: Codec, *, sets_epochs: bool) -> LoaderShares | None:
    """Return the shares of a loader that can be dealt; None for another one, or for none.
    `sets_epochs`: `session.batches` calls `set_epoch`, not the script."""
    if loader is None or why_not_dealt(loader):
        return None
    if isinstance(loader.dataset, SplitDataset):
        return SplitShares(loader, codec)
    if _is_distributed(loader):
        return DistributedShares(loader)
    return CopiedShares(loader, sets_epochs=sets_epochs)


class IndexedShares(LoaderShares):
    """Shares as index lists of a map-style dataset."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def _load(self, indices: Any) -> Any:
        one = {"batch_sampler": [indices]}
        if self._loader.batch_sampler is None:
            one = {"sampler": [indices], "batch_size": None}
        return _read_one(self._loader, self._loader.dataset, one)


class DistributedShares(IndexedShares):
    """Shares of torch's DistributedSampler, by the samples of its whole world."""

    is_certain = True

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._sampler = chain_of(loader)[-1]
        self._samples: list[int] = []  # rank r has those from r on, in steps of all

    @property
    def place(self) -> tuple[int, int]:
        """See LoaderShares.place."""
        return int(self._sampler.num_replicas), int(self._sampler.rank)

    def order(self, epoch: int) -> ShareOrder:  # noqa: ARG002 - the same in all epochs
        """See LoaderShares.order. The settings of the sampler decide it."""
        replicas, rank = self.place
        own, following = self.digest(rank), self.digest((rank + 1) % replicas)
        return ShareOrder(replicas=replicas, rank=rank, own=own, next=following)

    def length(self, rank: int, epoch: int) -> int:  # noqa: ARG002 - the same for all
        """See LoaderShares.length."""
        return len(chain_of(self._loader)[0])

    def digest(self, rank: int) -> str:
        """See LoaderShares.digest."""
        sampler, loader = self._sampler, self._loader
        names = ("total_size", "num_samples", "num_replicas", "seed", "shuffle", "drop_last")
        settings = [getattr(sampler, name) for name in names]
        batches = [
            getattr(loader.batch_sampler, name, None) for name in ("batch_size", "drop_last")
        ]
        return digest_of([rank, len(sampler.dataset), *settings, *batches])

    def begin(self, epoch: int) -> None:  # noqa: ARG002 - the sampler has it
        """See LoaderShares.begin."""
        whole: Any = copy.copy(self._sampler)
        whole.num_samples, whole.num_replicas, whole.rank = whole.total_size, 1, 0
        self._samples = [*whole]

    def load(self, row: int, rank: int) -> Any:
        """See LoaderShares.load."""
        batches, step = self._loader.batch_sampler, self.place[0]
        size = 1 if batches is None else batches.batch_size
        indices = self._samples[row * size * step + rank : (row + 1) * size * step : step]
        return self._load(indices if batches is not None else indices[0])


class CopiedShares(IndexedShares):
    """Shares of a sampler that divides samples by a rank, by copies of it."""

    def __init__(self, loader: Any, *, sets_epochs: bool) -> None:
        super().__init__(loader)
        self._copies = SamplerCopies(loader, sets_epochs=sets_epochs)
        self._epoch = 0
        self._lists: dict[int, list[Any]] = {}  # by rank

    @property
    def place(self) -> tuple[int, int]:
        """See LoaderShares.place."""
        return self._copies.place

    def order(self, epoch: int) -> ShareOrder:
        """See LoaderShares.order."""
        return self._copies.order(epoch)

    def length(self, rank: int, epoch: int) -> int:
        """See LoaderShares.length."""
        with random_state.preserved():
            return self._copies.length(rank, epoch)

    def begin(self, epoch: int) -> None:
        """See LoaderShares.begin."""
        self._epoch, self._lists = epoch, {}

    def _of(self, rank: int) -> list[Any]:
        if rank not in self._lists:
            with random_state.preserved():
                self._lists[rank] = self._copies.lists(rank, self._epoch)
        return self._lists[rank]

    def digest(self, rank: int) -> str:
        """See LoaderShares.digest."""
        return digest_of(self._of(rank))

    def load(self, row: int, rank: int) -> Any:
        """See LoaderShares.load."""
        lists = self._of(rank)
        if row >= len(lists):
            raise UsageError(
                f"the sampler gives {len(lists)} batches to its rank {rank} in epoch {self._epoch}"
                f" where its length is more: batch {row} does not exist; correct its length"
            )
        return self._load(lists[row])


class SplitShares(LoaderShares):
    """Shares of a SplitDataset: the splits that the loader of each rank reads."""

    def __init__(self, loader: Any, codec: Codec) -> None:
        self._loader, self._codec = loader, codec
        self._dataset: SplitDataset[Any] = loader.dataset
        self._processes = max(loader.num_workers, 1)
        self._readers: dict[int, SplitReader] = {}  # by split

    @property
    def place(self) -> tuple[int, int]:
        """See LoaderShares.place."""
        return int(self._dataset.num_replicas), int(self._dataset.rank)

    def order(self, epoch: int) -> ShareOrder:  # noqa: ARG002 - the dataset has it
        """See LoaderShares.order. The first samples and the lengths of a rank stand for all."""
        replicas, rank = self.place
        place: dict[str, Any] = {"replicas": replicas, "rank": rank}
        generators = LoaderState({"dataset": self._dataset}).generators()
        states, before = random_state.states(generators), random_state.snapshot()
        name = type(self._dataset).__name__
        try:
            own, second = (self.digest(rank) for _ in range(2))
            after = self.digest((rank + 1) % replicas)
            drawn = [*random_state.moved(before)]
            now = random_state.states(generators)
            drawn += [path for path in states if not random_state.same(states[path], now[path])]
        finally:
            random_state.restore(before)
            random_state.restore_state(generators, states)
        if drawn:
            why = f"{name}.read_split draws from generators that outlast it ({', '.join(drawn)})"
            return ShareOrder(**place, why=f"{why}: make one in it, seeded by epoch and split")
        if own != second:
            return ShareOrder(**place, why=f"{name}.read_split gives other samples when read twice")
        return ShareOrder(**place, own=own, next=after)

    def length(self, rank: int, epoch: int) -> int:  # noqa: ARG002 - the dataset has it
        """See LoaderShares.length."""
        return sum(split_batches(self._loader, self._dataset, rank))

    def digest(self, rank: int) -> str:
        """See LoaderShares.digest."""
        counts = split_batches(self._loader, self._dataset, rank)
        found: list[Any] = [rank, counts]
        for process in range(self._processes):
            reader = self._reader(rank, process)
            size = self._loader.batch_size or 1
            samples = [*islice(reader, size if counts[process] else 0)]
            try:
                found.append(self._codec.encode(samples))
            except CodecError:  # pictures, for example: they count by their types
                found.append([type(sample).__name__ for sample in samples])
        return digest_of(found)

    def _reader(self, rank: int, process: int) -> SplitReader:
        split = rank * self._processes + process
        return SplitReader(self._dataset, split, self.place[0] * self._processes)

    def begin(self, epoch: int) -> None:  # noqa: ARG002 - the dataset has it
        """See LoaderShares.begin."""
        self._readers = {}

    def load(self, row: int, rank: int) -> Any:
        """See LoaderShares.load."""
        loader = self._loader
        process, number = find_batch(split_batches(loader, self._dataset, rank), row)
        first, size = number * (loader.batch_size or 1), loader.batch_size or 1
        split = rank * self._processes + process
        reader = self._readers.get(split)
        if reader is None or reader.done > first:
            reader = self._readers[split] = self._reader(rank, process)
        reader.skip(first - reader.done)
        samples = [*islice(reader, size)]
        one = {"batch_sampler": [range(len(samples))]}
        if loader.batch_size is None:
            one = {"sampler": [0], "batch_size": None}
        return _read_one(loader, samples, one)


def _read_one(loader: Any, dataset: Any, batches: dict[str, Any]) -> Any:
    """Return the one batch of a loader in this process with the settings of another."""
    one: DataLoader[Any] = DataLoader(
        dataset,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=torch.Generator(),  # else its base seed would come from the process's own
        **batches,
    )
    try:
        (batch,) = one
    except Exception as error:
        if loader.num_workers:
            error.add_note(
                "outlast: this batch was read in the main process, since ranks are or were absent"
                " in this epoch; the dataset must be readable there as in a loader process"
            )
        raise
    return batch
