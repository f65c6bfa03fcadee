"""Batches of all ranks by copies of one rank's sampler.

A sampler is a chain: a batch sampler, the sampler that it takes samples from, and so on. A part of
it divides the samples among ranks, by `num_replicas` and `rank` or the names of _PLACES. A copy of
the chain with another rank gives that rank's batches if they depend on the rank and the epoch
alone. Before each epoch it is checked that

- two iterations of a copy for the own rank are equal, also if the epoch is set in between, and
  draw no numbers of the process;
- the copy for the next rank gives what that rank's copy for itself gives (`why_unequal`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import islice
from numbers import Integral
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from outlast import random_state
from outlast.data.counted_source import set_epoch
from outlast.data.loader_state import LoaderState

_PLACES = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))
_PARTS = ("batch_sampler", "sampler")
_SOURCES = ("dataset", "data_source")
_UNCOPIED = (torch.nn.Module, torch.optim.Optimizer)


class ShareOrder(msgspec.Struct, frozen=True, array_like=True):
    """Order of a rank's batches in one epoch, as ranks compare it. `own`, `next`: digests of the
    batches of `rank` and of the rank after it. `why`: why others cannot read them."""

    replicas: int = 0
    rank: int = 0
    own: str = ""
    next: str = ""
    why: str = ""


def why_unequal(orders: Iterable[ShareOrder]) -> str:
    """Return why ranks cannot read each other's batches, by the orders of all; "" if they can."""
    found = [order for order in orders if order.replicas]
    for order in found:
        if order.why:
            return f"rank {order.rank} of its sampler: {order.why}"
    by_rank: dict[int, ShareOrder] = {}
    for order in found:
        same = by_rank.setdefault(order.rank, order)
        if same.own != order.own or same.replicas != order.replicas:
            return f"two ranks have rank {order.rank} of the sampler, with other batches"
    for order in found:
        after = by_rank.get((order.rank + 1) % order.replicas)
        if after is not None and after.own != order.next:
            return (
                f"a copy of the sampler of rank {order.rank} for rank {after.rank} gives other"
                f" batches than that rank's own: their seeds, data or settings differ, or a rank's"
                " batches depend on more than its rank and the epoch"
            )
    return ""


def chain_of(loader: Any) -> list[Any]:
    """Return the sampler of a DataLoader and those that it takes its samples from."""
    part = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return _chain_from(part)


def _chain_from(part: Any) -> list[Any]:
    found: list[Any] = []
    while part is not None and all(part is not each for each in found):
        found.append(part)
        inner = (getattr(part, name, None) for name in _PARTS)
        part = next((each for each in inner if each is not None), None)
    return found


def place_of(part: Any) -> tuple[str, int, int] | None:
    """Return the name of a part's rank, the number of replicas and the rank; None without them."""
    for replicas, rank in _PLACES:
        values = getattr(part, replicas, None), getattr(part, rank, None)
        if all(isinstance(value, Integral) for value in values):
            return rank, int(values[0] or 0), int(values[1] or 0)
    return None


def why_not_copied(loader: Any) -> str:
    """Return why the sampler of a map-style loader cannot be copied for other ranks; "" if it is
    worth a try."""
    chain = chain_of(loader)
    places = {place[1:] for part in chain if (place := place_of(part)) is not None}
    if not places:
        return (
            f"its samples come from a {type(chain[-1]).__name__}, which has no num_replicas and"
            " rank: use a DistributedSampler, or give your sampler both"
        )
    if len(places) > 1:
        return f"parts of its sampler have different places: {sorted(places)} (replicas, rank)"
    for part in chain:
        for kept in getattr(part, "__dict__", {}).values():
            if isinstance(kept, _UNCOPIED):
                return f"its {type(part).__name__} keeps a {type(kept).__name__}"
    try:
        len(chain[0])
    except (TypeError, NotImplementedError):
        return f"its {type(chain[0]).__name__} has no length"
    return ""


class SamplerCopies:
    """Index lists of each rank, by copies of a loader's sampler."""

    def __init__(self, loader: Any, *, sets_epochs: bool) -> None:
        """`why_not_copied` returns "" for the loader. `sets_epochs`: copies get `set_epoch`; else
        they are copied as the script has set the sampler."""
        self._sets_epochs = sets_epochs
        chain = chain_of(loader)
        self._root, self._dataset = chain[0], loader.dataset
        sources = (getattr(part, name, None) for part in chain for name in _SOURCES)
        self._shared = {id(each): each for each in (loader.dataset, *sources)}
        self._divider = next(part for part in chain if place_of(part) is not None)

    @property
    def place(self) -> tuple[int, int]:
        """Return the number of replicas, and the rank among them."""
        place = place_of(self._divider)
        assert place is not None, "a sampler keeps its place"
        return place[1:]

    def lists(self, rank: int, epoch: int) -> list[Any]:
        """Return the index lists of a rank (single indices without batches) in an epoch."""
        return _iterate(self._at(rank, epoch))

    def length(self, rank: int, epoch: int) -> int:
        """Return the number of a rank's index lists in an epoch."""
        return len(self._at(rank, epoch))

    def _at(self, rank: int, epoch: int) -> Any:
        copied = self._copied(rank)
        self._set_epoch(copied, epoch)
        return copied

    def _copied(self, rank: int) -> Any:
        root = copy.deepcopy(self._root, dict(self._shared))
        for part in _chain_from(root):
            if (place := place_of(part)) is not None:
                setattr(part, place[0], rank)
        return root

    def _set_epoch(self, root: Any, epoch: int) -> None:
        if self._sets_epochs:
            set_epoch(epoch, root, getattr(root, "sampler", None))  # as MappedSource does

    def order(self, epoch: int) -> ShareOrder:
        """Return the order of this rank's batches in an epoch that the sampler has been set to, and
        why others cannot read them."""
        replicas, rank = self.place
        place: dict[str, Any] = {"replicas": replicas, "rank": rank}
        generators = LoaderState({"sampler": self._root}, apart=self._dataset).generators()
        states, before = random_state.states(generators), random_state.snapshot()
        name = type(self._root).__name__
        try:
            copied = self._copied(rank)
            own = digest_of(_iterate(copied))
            self._set_epoch(copied, epoch)
            second = digest_of(_iterate(copied))
            after = digest_of(self.lists((rank + 1) % replicas, epoch))
            drawn = random_state.moved(before)
        except Exception as error:  # noqa: BLE001 - of the script's sampler: no rank then leaves
            text = f"{type(error).__name__}: {error}"[:300]
            return ShareOrder(**place, why=f"its {name} cannot be copied for others ({text})")
        finally:
            random_state.restore(before)
            random_state.restore_state(generators, states)
        if drawn:
            why = f"its {name} draws from the process's generators ({', '.join(drawn)})"
            return ShareOrder(**place, why=f"{why}: seed a generator by the epoch in __iter__")
        if own != second:
            why = f"two iterations of its {name} in an epoch give other batches"
            return ShareOrder(**place, why=f"{why}: seed its generator by the epoch in __iter__")
        return ShareOrder(**place, own=own, next=after)


def _iterate(sampler: Any) -> list[Any]:
    return [*islice(iter(sampler), len(sampler))]


def digest_of(value: Any) -> str:
    """Return the digest of index lists. Raises TypeError for indices that have no plain value."""
    return xxhash.xxh3_64_hexdigest(_ENCODER.encode(value))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} in an index list cannot be compared")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
