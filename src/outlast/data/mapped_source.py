"""Map-style DataLoaders with an exact position of a few kilobytes.

The user's loader defines data and settings. An internal DataLoader with the same settings loads,
with index lists from EpochOrder. It draws the same random numbers, from the same generators and at
the same times, as the user's loader would.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from outlast.data.counted_source import (
    Codec,
    CountedSource,
    LoadedBatch,
    StartHook,
    TicketDataset,
    identity_collate,
)
from outlast.data.epoch_order import EpochOrder, TicketSampler
from outlast.data.loader_state import LoaderState
from outlast.errors import UsageError

_END = object()


class MappedSource(CountedSource):
    """Map-style DataLoader with any sampler, with or without loader processes."""

    kind = "map-style DataLoader"

    def __init__(self, loader: DataLoader[Any], codec: Codec) -> None:
        """Wrap the loader; raises UsageError if it has no batches or no repeatable order."""
        super().__init__()
        if loader.num_workers > 1 and not getattr(loader, "in_order", True):
            raise UsageError(
                "the DataLoader given to session.batches() has in_order=False: its batches come in"
                " the order in which its processes are ready, another one in every run; leave"
                " in_order at True"
            )
        self._loader: DataLoader[Any] | None = loader
        self._dataset: Any = loader.dataset
        self._has_processes = loader.num_workers > 0
        self._persists = loader.persistent_workers
        is_batched = loader.batch_sampler is not None
        self._sampler: Any = loader.batch_sampler if is_batched else loader.sampler
        self._epochs = (
            loader.dataset,
            loader.sampler,
            self._sampler,
            getattr(self._sampler, "sampler", None),
        )
        if self.length == 0:
            raise UsageError(
                f"the loader given to session.batches() has no batches (dataset of"
                f" {type(loader.dataset).__name__}, batch size {loader.batch_size}, drop_last"
                f" {loader.drop_last}): nothing to train on"
            )
        self._order = EpochOrder(self._sampler, loader.generator, loader.dataset)
        self._codec = codec
        self._tickets = TicketSampler(self._order, loader, codec)
        self._shelf = TicketDataset(loader.dataset, loader.collate_fn, codec, is_batched=is_batched)
        self._kept = LoaderState({"dataset": loader.dataset, "collate": loader.collate_fn})
        self._start: dict[str, Any] = {}  # of the current loader processes: see `_mark`
        self._states: dict[int, dict[str, Any]] = {}  # by process, after its last batch
        self._ahead: list[Any] = []
        self._inner: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None

    @property
    def length(self) -> int | None:
        """Return the length of the sampler, or None if it has none."""
        try:
            return len(self._sampler)
        except (TypeError, NotImplementedError):  # a sampler without a length
            return None

    def close(self) -> None:
        """Stop loader workers and drop the loader."""
        super().close()
        self._batches = self._inner = self._loader = None

    def start_epoch(self, epoch: int, length: int | None) -> None:
        """See CountedSource.start_epoch; also calls `set_epoch` of dataset and samplers."""
        super().start_epoch(epoch, length)
        self.set_epoch(epoch, *self._epochs)
        self._order.begin()

    def _begin(self) -> None:
        self._order.begin()
        self._limit_tickets()
        if self._start and self._persists and self._inner is None:  # restored from another process
            self._order.open()
            self._ahead = []
            self._continue(0)
            return
        self._tickets.begin(draws_seed=not (self._start and self._persists))
        if not (self._start and self._persists):
            self._batches = None  # the old processes end before new ones start
            self._start = {"epoch": self.epoch, "kept": self._kept.changes()}
            self._states = {}
        self._batches = iter(self._own_loader())

    def _limit_tickets(self) -> None:
        is_cut = self._limit is not None and self._limit != self.length
        self._tickets.limit = self._limit if is_cut else None

    def _continue(self, done: int) -> None:
        """Start loader processes in the state restored by `_return`."""
        self._limit_tickets()
        now = self._kept.changes()
        blanks = self._tickets.go(done, self._ahead, self._states)
        if self._has_processes:
            self._tickets.seeds.set_state(self._tickets.base)
            self.set_epoch(self._start["epoch"], self._dataset)
            self._kept.put(self._start["kept"])
        self._batches = None
        self._batches = iter(self._own_loader())
        if self._has_processes:
            self.set_epoch(self.epoch, self._dataset)
            self._kept.put(now)
        for _ in range(blanks):
            next(self._batches)

    def _own_loader(self) -> DataLoader[Any]:
        if self._inner is None:
            assert self._loader is not None, "a closed source gives no batches"
            self._inner = _like(self._loader, self._shelf, self._tickets)
        return self._inner

    def _take(self) -> Any:
        if self._batches is None:
            self._continue(self._done)
            assert self._batches is not None
        batch = next(self._batches)
        if not self._has_processes:
            return batch
        parcel: LoadedBatch = batch
        if parcel.changes:
            self._states.setdefault(parcel.process, {}).update(self._codec.decode(parcel.changes))
        return parcel.batch

    def _mark(self) -> dict[str, Any]:
        mark = {"order": self._order.place(self._done), "kept": self._kept.changes()}
        if self._has_processes and self._start:
            mark["processes"] = {
                "start": self._start,
                "seeds": self._tickets.base,
                "states": {process: dict(state) for process, state in self._states.items()},
            }
        return mark

    def _return(self, position: dict[str, Any]) -> None:
        self.set_epoch(self.epoch, *self._epochs)
        self._batches = self._inner = None
        self._ahead = self._order.go(position["order"], self._done)
        self._kept.put(position["kept"])
        processes = position.get("processes", {})
        self._start = processes.get("start", {})
        self._states = processes.get("states", {})
        self._tickets.base = processes.get("seeds", self._tickets.base)

    def _finish(self, exhausted: bool) -> None:
        if exhausted or self._done != self._limit:
            return
        if self._batches is not None:
            more = next(self._batches, _END)  # ends processes; the sampler may draw
        else:
            more = next(self._order, _END) if self._limit == self.length else _END
        if more is not _END:
            raise UsageError(
                f"the loader gave more batches in epoch {self.epoch} than its length"
                f" ({self.length}): under torchrun it would continue; correct len(loader), or"
                " remove it"
            )


def _like(loader: DataLoader[Any], shelf: TicketDataset, tickets: TicketSampler) -> DataLoader[Any]:
    """Return a DataLoader with the settings of `loader` that loads the tickets in order."""
    workers: dict[str, Any] = {}
    if loader.num_workers > 0:
        workers = {
            "timeout": loader.timeout,
            "worker_init_fn": StartHook(loader.worker_init_fn),
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
    if loader.pin_memory and loader.pin_memory_device:
        workers["pin_memory_device"] = loader.pin_memory_device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # already raised by the user's loader
        return DataLoader(
            shelf,
            batch_size=None,
            sampler=tickets,
            num_workers=loader.num_workers,
            collate_fn=identity_collate,
            pin_memory=loader.pin_memory,
            generator=tickets.seeds,
            **workers,
        )
