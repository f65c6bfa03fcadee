"""Map-style DataLoaders: exact, with a position of a few hundred bytes to a few kilobytes.

The user's loader says what to load and how; the loading is done by a DataLoader of ours with the
same settings, whose index lists come from `Order`. In loader workers every batch is drawn under a
seed of its own, so that it does not matter which worker draws it, or in which run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from outlast import generators
from outlast.data import randomness
from outlast.data.counted import Counted, set_epoch
from outlast.data.order import Order
from outlast.errors import UsageError


class _Ticket(NamedTuple):
    """One batch to be loaded, as it is sent to a loader worker."""

    seed: int
    indices: Any


class _Shelf(Dataset[Any]):
    """The user's dataset, asked for one ticket at a time."""

    def __init__(self, dataset: Any, collate: Any, batched: bool, seeded: bool) -> None:
        self.dataset = dataset
        self._collate = collate
        self._batched = batched
        self._seeded = seeded

    def __getitem__(self, ticket: _Ticket) -> Any:
        if self._seeded:
            kept = randomness.owned({"dataset": self.dataset, "collate": self._collate})
            randomness.reseed(ticket.seed, kept)
        if not self._batched:
            return self.dataset[ticket.indices]
        many = getattr(self.dataset, "__getitems__", None)
        return many(ticket.indices) if many else [self.dataset[i] for i in ticket.indices]


class _Hire:
    """What a loader worker does first: it sees the user's dataset, then runs the user's hook."""

    def __init__(self, hook: Callable[[int], None] | None) -> None:
        self._hook = hook

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None, "only loader workers are hired"
        if isinstance(info.dataset, _Shelf):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._hook is not None:
            self._hook(worker)


class _Tickets(Sampler[_Ticket]):
    """The rest of an epoch's order, as tickets."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.at = 0
        self.limit: int | None = None

    def __iter__(self) -> Iterator[_Ticket]:
        while self.limit is None or self.at < self.limit:
            try:
                indices = next(self._order)
            except StopIteration:
                return
            ticket = _Ticket(randomness.mix(self._order.seed, self.at), indices)
            self.at += 1
            yield ticket


class MappedSource(Counted):
    """A map-style DataLoader of any sampler, with or without workers."""

    kind = "map-style DataLoader"

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Raises UsageError when the loader has no batches."""
        super().__init__()
        if loader.num_workers > 0:
            self.note = (
                "random numbers in the loader's processes come from a seed for each batch: the same"
                " in every run of Outlast, others than under torchrun, which seeds each process"
            )
        self._batched = loader.batch_sampler is not None
        self._sampler: Any = loader.batch_sampler if self._batched else loader.sampler
        self._epochs = (loader.dataset, loader.sampler, self._sampler,
                        getattr(self._sampler, "sampler", None))  # fmt: skip
        if self.length == 0:
            raise UsageError(
                f"the loader given to session.batches() has no batches (dataset of"
                f" {type(loader.dataset).__name__}, batch size {loader.batch_size}, drop_last"
                f" {loader.drop_last}): nothing to train on"
            )
        self._order = Order(self._sampler, loader.generator, loader.dataset)
        self._tickets = _Tickets(self._order)
        self._kept: dict[str, generators.Generator] = {}
        if loader.num_workers == 0:
            self._kept = randomness.owned({"dataset": loader.dataset, "collate": loader.collate_fn})
        self._seeds = torch.Generator()  # so that our DataLoader draws nothing from the process
        self._inner: DataLoader[Any] | None = _like(
            loader, self._tickets, self._batched, self._seeds
        )
        self._batches: Iterator[Any] | None = None

    @property
    def length(self) -> int | None:
        try:
            return len(self._sampler)
        except (TypeError, NotImplementedError):  # a sampler that does not know
            return None

    def close(self) -> None:
        super().close()
        self._batches = None
        self._inner = None

    def start_epoch(self, epoch: int, length: int | None) -> None:
        super().start_epoch(epoch, length)
        set_epoch(epoch, *self._epochs)

    def _begin(self) -> None:
        self._order.begin()
        self._tickets.at = 0
        self._open()

    def _open(self) -> None:
        assert self._inner is not None, "a closed source gives no batches"
        self._tickets.limit = self._limit
        self._seeds.manual_seed(self._order.seed)
        self._batches = None  # the old workers end before new ones start
        self._batches = iter(self._inner)

    def _take(self) -> Any:
        if self._batches is None:
            self._open()
            assert self._batches is not None
        return next(self._batches)

    def _mark(self) -> dict[str, Any]:
        order = self._order.start if self._begun else self._order.states()
        return {"order": order, "kept": generators.states(self._kept)}

    def _return(self, position: dict[str, Any]) -> None:
        set_epoch(self.epoch, *self._epochs)
        self._batches = None
        if self._begun:
            self._order.rewind(position["order"], self._done)
            self._tickets.at = self._done
        else:
            self._order.put(position["order"])
        generators.put(self._kept, position["kept"])

    def _finish(self, exhausted: bool) -> None:
        self._order.finish(whole=not exhausted and self._limit == self.length)


def _like(
    loader: DataLoader[Any], tickets: _Tickets, batched: bool, seeds: torch.Generator
) -> DataLoader[Any]:
    """A DataLoader with the settings of `loader` that loads tickets, in their order."""
    workers: dict[str, Any] = {}
    if loader.num_workers > 0:
        workers = {
            "timeout": loader.timeout,
            "worker_init_fn": _Hire(loader.worker_init_fn),
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
    if loader.pin_memory and loader.pin_memory_device:
        workers["pin_memory_device"] = loader.pin_memory_device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # said once, when the user's was made
        return DataLoader(
            _Shelf(loader.dataset, loader.collate_fn, batched, loader.num_workers > 0),
            batch_size=None,
            sampler=tickets,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            generator=seeds,
            **workers,
        )
