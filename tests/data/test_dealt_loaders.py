"""Each sample of an epoch is trained once, for each kind of loader that can be dealt."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.data.dealt_kinds import DEALT, Buckets, Items, Maker, Numbers
from torch.utils.data import DataLoader

from outlast import random_state
from outlast.checkpoint.format import codec
from outlast.data.batch_source import open_source
from outlast.data.counted_source import Codec, set_epoch
from outlast.data.sampler_copies import chain_of, why_unequal
from outlast.errors import UnsupportedError, UsageError
from outlast.testing.absent_ranks.simulated_data import SimGroups
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.rank_deal import RankDeal

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
MESSAGES = Codec(codec.encode, codec.decode)


def ids(batch: Any) -> list[int]:
    """Return the samples of a batch."""
    found = batch.tolist() if hasattr(batch, "tolist") else batch
    return found if isinstance(found, list) else [found]


def plain(make: Maker, world: int, epoch: int) -> Counter[int]:
    """Return the samples of an epoch of all ranks, as plain loaders give them up to the first end
    of one."""
    epochs: list[list[list[int]]] = []
    for rank in range(world):
        loader = make(rank)
        set_epoch(epoch, loader.dataset, *chain_of(loader))
        epochs.append([ids(batch) for batch in loader])
    rows = min(map(len, epochs))
    return Counter(sample for batches in epochs for batch in batches[:rows] for sample in batch)


class OneRank:
    """A process of a rank: its own loader, source and deal."""

    def __init__(self, make: Maker, world: int, rank: int) -> None:
        self.groups = SimGroups(world, rank)
        self.loader = make(rank)
        self.deal = RankDeal(cast("GroupRegistry", self.groups), lambda _text, _key: None)
        self.deal.set_loader(self.loader, MESSAGES, sets_epochs=True)
        assert not self.deal.needs
        self.source = open_source(self.loader, MESSAGES)
        self.batch: list[int] = []

    def draw(self) -> None:
        if not self.deal.is_dealt:
            self.batch = ids(self.source.next())
            return
        before = random_state.snapshot()
        self.batch = ids(self.deal.load())
        assert not random_state.moved(before), "the process's generators have moved"

    def take(self, place: dict[str, Any], length: int) -> None:
        """Take the place of another rank in an epoch that is dealt."""
        assert self.deal.take_place(place, length)
        self.source.start_epoch(place["epoch"], length)


class Job:
    """All ranks in one process."""

    def __init__(self, make: Maker, world: int) -> None:
        self.make, self.world = make, world
        self.ranks = {rank: OneRank(make, world, rank) for rank in range(world)}
        self.step = 0
        self.epoch = -1
        self.length = 0

    def begin_epoch(self) -> None:
        self.epoch += 1
        for rank in self.ranks.values():
            rank.source.start_epoch(self.epoch, None)
        orders = {n: rank.deal.order(self.epoch) for n, rank in self.ranks.items()}
        unequal = why_unequal(orders.values())
        lengths = [
            rank.deal.shortest(rank.source.length, self.epoch) for rank in self.ranks.values()
        ]
        self.length = min(each for each in lengths if each is not None)
        for number, rank in self.ranks.items():
            rank.deal.set_order(self.epoch, orders[number], unequal)
            assert not rank.deal.needs
            rank.source.set_length(self.length)
            rank.deal.begin_epoch(self.length, self.step, rank.groups.presence.absent)

    def draw(self) -> bool:
        """Draw a batch on each rank that is present; return whether there is one."""
        rows = {rank.deal.go_on(self.step, skips=False) for rank in self.ranks.values()}
        assert len(rows) == 1
        if rows == {False}:
            return False
        try:
            for rank in self.ranks.values():
                rank.draw()
        except StopIteration:
            return False
        return True

    def change(self, present: set[int]) -> None:
        """Change the ranks that are present inside the step."""
        donor = next(rank for number, rank in self.ranks.items() if number in present)
        absent = frozenset(range(self.world)) - present
        for number in sorted(present - {*self.ranks}):
            comer = OneRank(self.make, self.world, number)
            comer.groups.presence.absent = donor.groups.presence.absent
            comer.take(self._place(donor), self.length)
            self.ranks[number] = comer
            comer.batch = []
        self.ranks = {number: rank for number, rank in self.ranks.items() if number in present}
        for rank in self.ranks.values():
            rank.groups.presence.absent = absent
            rank.deal.follow(self.step)
            if not rank.batch:
                rank.draw()

    def _place(self, donor: OneRank) -> dict[str, Any]:
        row, _ = donor.deal._newest
        place = {"epoch": self.epoch, "step": self.step, "position": {"done": row}}
        return codec.decode(codec.encode(place | donor.deal.place()))

    def trained(self) -> list[int]:
        idle = {frozenset(rank.deal.idle()) for rank in self.ranks.values()}
        assert len(idle) == 1
        working = [rank for number, rank in self.ranks.items() if number not in next(iter(idle))]
        self.step += 1
        return [sample for rank in working for sample in rank.batch]


def train(job: Job, epochs: int, changes: list[set[int] | None]) -> list[Counter[int]]:
    """Return the samples of each epoch. `changes`: ranks that are present from a step on."""
    found: list[Counter[int]] = []
    plan = iter(changes)
    for _ in range(epochs):
        job.begin_epoch()
        found.append(Counter())
        while job.draw():
            now = next(plan, None)
            if now is not None and not now.isdisjoint(job.ranks):
                job.change(now)
            found[-1].update(job.trained())
    return found


def members(world: int) -> st.SearchStrategy[set[int] | None]:
    return st.none() | st.sets(st.integers(0, world - 1), min_size=1)


@pytest.mark.parametrize("kind", DEALT)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_each_sample_is_trained_once(kind: str, data: st.DataObject) -> None:
    world = data.draw(st.integers(2, 5))
    size, batch = data.draw(st.integers(world, 90)), data.draw(st.integers(1, 4))
    more = {"drop_last": data.draw(st.booleans())}
    changes = data.draw(st.lists(members(world), max_size=40))

    def make(rank: int) -> DataLoader[Any]:
        return DEALT[kind](size, world, rank, batch, **more)

    expected = [plain(make, world, epoch) for epoch in range(2)]
    assume(all(expected))
    assert train(Job(make, world), 2, changes) == expected


@pytest.mark.parametrize("kind", ["StatefulDataLoader", "splits", "splits with a position"])
@pytest.mark.parametrize("size", [pytest.param(40, marks=pytest.mark.extended), 43])
def test_loader_processes(kind: str, size: int) -> None:
    """Batches are read in this process as loader processes would give them, in turn."""

    def make(rank: int) -> DataLoader[Any]:
        return DEALT[kind](size, 3, rank, 2, num_workers=2)

    expected = [plain(make, 3, epoch) for epoch in range(2)]
    changes = [None, {0, 2}, None, {0, 1, 2}, {1}, None, None, {0, 1, 2}]
    assert train(Job(make, 3), 2, changes) == expected


def test_a_sampler_that_changes_in_the_epoch_is_refused() -> None:
    def make(rank: int) -> DataLoader[Any]:
        return DEALT["buckets"](40, 2, rank, 2)

    job = Job(make, 2)
    job.begin_epoch()
    assert job.draw()
    for rank in job.ranks.values():
        chain_of(rank.loader)[0].size = 39
    job.change({0})
    job.trained()
    with pytest.raises(UnsupportedError, match="are not what they were when epoch 0 began"):
        job.draw()


def test_an_endless_stream_is_dealt() -> None:
    """Once all ranks are back, each reads one split."""

    class Forever(Numbers):
        def split_length(self, split: int, splits: int) -> int:
            del split, splits
            return sys.maxsize

        def read_split(self, split: int, splits: int) -> Iterator[int]:
            return itertools.count(split, splits)

    job = Job(lambda rank: DataLoader(Forever(0, 3, rank), 2), 3)
    job.begin_epoch()
    found: list[int] = []
    for now in [None, {0, 2}, None, None, {0, 1, 2}, *[None] * 9]:
        assert job.draw()
        if now is not None:
            job.change(now)
        found += job.trained()
    assert sorted(found) == sorted({*found}) and {*range(60)} <= {*found}


class TooLong(Buckets):
    """Batch sampler whose length is one too many."""

    def __len__(self) -> int:
        return super().__len__() + 1


def test_a_batch_that_does_not_exist_is_refused() -> None:
    def make(rank: int) -> DataLoader[Any]:
        return DataLoader(Items(30), batch_sampler=TooLong(30, 2, rank))  # pyright: ignore[reportArgumentType]

    with pytest.raises(UsageError, match="where its length is more: batch"):
        train(Job(make, 2), 1, [{1}])


@pytest.mark.parametrize(
    ("kind", "why"), [("buckets", "when the next epoch begins"), ("DataLoader", "")]
)
def test_orders_of_a_run_that_could_not_shrink_count_from_the_next_epoch(
    kind: str, why: str
) -> None:
    """A checkpoint of a run with another policy has none; copies are not believed without."""
    rank = OneRank(lambda rank: DEALT[kind](40, 2, rank, 2), 2, 0)
    rank.deal.are_compared = False
    assert rank.deal.order(0).replicas == 0
    place = {"epoch": 0, "step": 3, "position": {"done": 3}}
    assert not rank.deal.take_place(place, 10)
    assert rank.deal.needs.endswith(why) and bool(rank.deal.needs) == bool(why)
    rank.deal.are_compared = True
    rank.source.start_epoch(1, None)
    rank.deal.set_order(1, rank.deal.order(1), "")
    assert not rank.deal.needs
