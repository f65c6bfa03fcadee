"""Loaders whose batches cannot be dealt are refused, with the reason, before a rank leaves."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import pytest
import torch
from tests.data.dealt_kinds import Buckets, Items, Maker, Numbers, SharedBatches
from tests.data.test_dealt_loaders import MESSAGES
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from outlast import random_state
from outlast.data.sampler_copies import why_unequal
from outlast.errors import UsageError
from outlast.testing.absent_ranks.simulated_data import SimGroups
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.rank_deal import RankDeal

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def reasons(make: Maker, world: int = 2) -> str:
    """Return why the batches of a loader cannot be dealt."""
    orders = []
    for rank in range(world):
        deal = RankDeal(cast("GroupRegistry", SimGroups(world, rank)), lambda _text, _key: None)
        deal.set_loader(make(rank), MESSAGES, sets_epochs=True)
        if deal.needs:
            return deal.needs
        before = random_state.snapshot()
        orders.append(deal.order(0))
        assert not random_state.moved(before)
    return why_unequal(orders)


class Strange(Buckets):
    """Batch sampler with one flaw."""

    def __init__(self, flaw: str, rank: int) -> None:
        super().__init__(40 + (flaw == "data" and rank), 2, rank)
        self.flaw, self._calls, self._first = flaw, 0, rank
        self._epochs = 0
        self._lock = threading.Lock() if flaw == "lock" else None
        self._model = torch.nn.Linear(2, 2) if flaw == "model" else None

    def set_epoch(self, epoch: int) -> None:
        self._epochs += 1
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        batches: Any = self._all()
        self._calls += 1
        if self.flaw == "process":
            random.shuffle(batches)
        elif self.flaw == "history":
            random.Random(self._calls).shuffle(batches)
        elif self.flaw == "module":
            GENERATOR.shuffle(batches)
        elif self.flaw == "epochs":
            random.Random(self._epochs).shuffle(batches)
        elif self.flaw == "seed":
            random.Random(self._first).shuffle(batches)
        elif self.flaw == "objects":
            batches = [[Odd()] for _ in batches]
        place = self._first if self.flaw == "place" else self.rank
        yield from batches[place :: self.num_replicas]


class Odd:
    """An index that cannot be compared."""


GENERATOR = random.Random(8)


@pytest.mark.parametrize(
    ("flaw", "why"),
    [
        ("process", "draws from the process's generators (python)"),
        ("history", "two iterations of its Strange in an epoch give other batches"),
        ("module", "two iterations of its Strange in an epoch give other batches"),
        ("epochs", "two iterations of its Strange in an epoch give other batches"),
        ("place", "a copy of the sampler of rank 0 for rank 1 gives other batches"),
        ("seed", "a copy of the sampler of rank 0 for rank 1 gives other batches"),
        ("data", "a copy of the sampler of rank 0 for rank 1 gives other batches"),
        ("lock", "cannot be copied for others (TypeError: cannot pickle '_thread.lock' object)"),
        ("model", "its Strange keeps a Linear"),
        ("objects", "a Odd in an index list cannot be compared"),
    ],
)
def test_samplers_with_a_flaw_are_refused(flaw: str, why: str) -> None:
    before = GENERATOR.getstate()
    found = reasons(lambda rank: DataLoader(Items(60), batch_sampler=Strange(flaw, rank)))  # pyright: ignore[reportArgumentType]
    assert why in found
    assert GENERATOR.getstate() == before, "the check has moved a generator of the script"


def test_ranks_with_other_seeds_are_refused() -> None:
    def make(rank: int) -> DataLoader[int]:
        return DataLoader(Items(20), 2, sampler=DistributedSampler(Items(20), 2, rank, seed=rank))

    assert "their seeds, data or settings differ" in reasons(make)


class Flawed(Numbers):
    """Data set in splits with one flaw."""

    def __init__(self, flaw: str, rank: int) -> None:
        super().__init__(40, 2, rank)
        self.flaw, self.rng = flaw, random.Random(1)

    def split_length(self, split: int, splits: int) -> int:
        return super().split_length(split, splits) + {"long": 1, "short": -1}.get(self.flaw, 0)

    def read_split(self, split: int, splits: int) -> Iterator[int]:
        if self.flaw == "process":
            yield random.randrange(5)
        elif self.flaw == "own":
            yield self.rng.randrange(5)
        elif self.flaw == "rank":
            yield self.rank
        yield from super().read_split(split, splits)


@pytest.mark.parametrize(
    ("flaw", "why"),
    [
        ("process", "Flawed.read_split draws from generators that outlast it (python)"),
        ("own", "Flawed.read_split draws from generators that outlast it (dataset/rng)"),
        ("rank", "a copy of the sampler of rank 0 for rank 1 gives other batches"),
    ],
)
def test_splits_with_a_flaw_are_refused(flaw: str, why: str) -> None:
    assert why in reasons(lambda rank: DataLoader(Flawed(flaw, rank), 3))


@pytest.mark.parametrize(("flaw", "found"), [("long", "only 20"), ("short", "more")])
def test_a_wrong_length_of_a_split_is_refused(flaw: str, found: str) -> None:
    with pytest.raises(UsageError, match=f"split 0 of 2 of Flawed gives {found} samples where"):
        list(Flawed(flaw, 0))


class OwnWay(Numbers):
    """Data set in splits that reads in its own way."""

    def __iter__(self) -> Iterator[int]:
        yield from range(3)


class Numbered(IterableDataset[int]):
    """Stream that only its rank can read."""

    num_replicas, rank = 2, 0

    def __iter__(self) -> Iterator[int]:
        yield from range(30)


class Endless(Buckets):
    """Batch sampler without a length."""

    __len__: ClassVar[Any] = None


class Moved(DataLoader[int]):
    """Loader that moves its batches to a device, as Accelerate's."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda rank: DataLoader(OwnWay(9, 2, rank)), "OwnWay reads in an __iter__ of its own"),
        (lambda _: DataLoader(Numbered()), "over the stream Numbered, which is not an outlast."),
        (lambda _: StatefulDataLoader(Numbered()), "over the stream Numbered, which is not an"),
        (lambda _: DataLoader(Items(9), shuffle=True), "a RandomSampler, which has no num_repl"),
        (
            lambda rank: DataLoader(Items(9), batch_sampler=Endless(9, 2, rank)),
            "its Endless has no length",
        ),
        (
            lambda rank: Moved(Items(9), sampler=DistributedSampler(Items(9), 2, rank)),
            "only a rank itself can read its batches (of a Moved)",
        ),
        (
            lambda rank: DataLoader(
                Items(20),
                batch_sampler=SharedBatches(
                    BatchSampler(DistributedSampler(Items(20), 2, rank), 2, False), 2, 1 - rank
                ),
            ),
            "parts of its sampler have different places: [(2, 0), (2, 1)]",
        ),
        (lambda _: [1, 2, 3], "only a rank itself can read its batches (of a list)"),
    ],
)
def test_loaders_that_are_refused(make: Any, why: str) -> None:
    assert why in reasons(make)
