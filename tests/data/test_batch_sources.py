"""Batch sources: torch's order, small positions and error messages."""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.data.foreign_loaders import Mixed
from tests.data.loader_kinds import SIZE, Augmented, Homemade, Stream, Uneven, mapped, other, plain
from tests.data.source_driver import open_source, seen, train
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

from outlast import random_state
from outlast.checkpoint.format import codec
from outlast.data.batch_source import BatchSource
from outlast.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.mark.parametrize(
    "name", ["sequential", "shuffled", "generator", "divisible", "replacement", "weighted",
             "distributed", "samples", "dice", "whole"],
)  # fmt: skip
def test_same_batches_and_draws_as_the_plain_loader(name: str) -> None:
    seed()
    loader = mapped(name)
    expected = []
    for epoch in range(3):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        expected += [seen(batch) for batch in loader]
        expected.append(seen("end"))
    seed()
    assert [draw.seen for draw in train(open_source(mapped(name)), 3, None)] == expected


def indices(batches: list[Any]) -> list[int]:
    return torch.cat([batch[0].reshape(-1) for batch in batches]).tolist()


def test_workers_give_the_same_samples_in_the_same_order() -> None:
    orders = []
    for workers in (0, 1, 2):
        seed()
        source = open_source(mapped("shuffled", num_workers=workers))
        source.start_epoch(0, source.length)
        orders.append(indices([source.next() for _ in range(source.length or 0)]))
        source.close()
    assert orders[0] == orders[1] == orders[2]
    assert len(set(orders[0])) == 20


class Numbers(Dataset[int]):
    """Too many items for their order to be kept."""

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> int:
        return index


def test_position_over_ten_million_items_is_small() -> None:
    sampler = DistributedSampler(Numbers(), num_replicas=2, rank=0)
    loader = DataLoader(Numbers(), batch_size=64, sampler=sampler)
    source = open_source(loader)
    source.start_epoch(0, source.length)
    source.next()
    position = codec.encode(source.position())
    after = source.next()
    assert len(position) < 1000
    fresh = open_source(loader)
    fresh.seek(codec.decode(position))
    assert torch.equal(fresh.next(), after)


@pytest.mark.parametrize(("name", "limit_bytes"), [("shuffled", 6000), ("generator", 12000),
                                                   ("dice", 14000)])  # fmt: skip
def test_positions_are_small(name: str, limit_bytes: int) -> None:
    sizes = [len(draw.position) for draw in train(open_source(mapped(name)), 2, None)]
    assert max(sizes) < limit_bytes


class Untouched(Augmented):
    """Counts what is loaded, where nobody looks."""

    loaded: ClassVar[list[int]] = []

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


def test_seek_loads_nothing() -> None:
    source = open_source(plain(Untouched(), shuffle=True))
    source.start_epoch(0, source.length)
    for _ in range(4):
        source.next()
    Untouched.loaded.clear()
    fresh = open_source(plain(Untouched(), shuffle=True))
    fresh.seek(source.position())
    assert Untouched.loaded == []
    assert torch.equal(fresh.next(), source.next())
    assert len(Untouched.loaded) == 8


def test_seek_back_in_the_same_process() -> None:
    source = open_source(mapped("generator", num_workers=2, persistent_workers=True))
    source.start_epoch(0, source.length)
    first = source.next()[0].tolist()
    place = source.position()
    then = [source.next()[0].tolist() for _ in range(4)]
    source.seek(place)
    assert [source.next()[0].tolist() for _ in range(4)] == then
    assert first not in then
    source.close()


@pytest.mark.parametrize("name", ["stream-workers", "told", "stream"])
def test_replay_in_the_same_process(name: str) -> None:
    source = open_source(other(name))
    source.start_epoch(0, None)
    source.next()
    place, states = source.position(), random_state.snapshot()
    then = [codec.encode(source.next()) for _ in range(3)]
    source.seek(place)
    random_state.restore(states)
    assert [codec.encode(source.next()) for _ in range(3)] == then
    source.close()


def test_close_stops_the_workers() -> None:
    source = open_source(mapped("shuffled", num_workers=2, persistent_workers=True))
    source.start_epoch(0, source.length)
    source.next()
    assert len(multiprocessing.active_children()) == 2
    source.close()
    assert multiprocessing.active_children() == []


class Told(Augmented):
    """What the user's hook may ask of the worker."""

    greeting = ""

    def __getitem__(self, index: int) -> str:
        return self.greeting


def greet(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.greeting = f"hello from {worker}"  # pyright: ignore[reportAttributeAccessIssue]


def test_worker_init_fn_sees_the_users_dataset() -> None:
    source = open_source(plain(Told(), num_workers=1, worker_init_fn=greet))
    source.start_epoch(0, source.length)
    assert source.next() == ["hello from 0"] * 4
    source.close()


def tell_seed(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.greeting = str(info.seed - worker)  # pyright: ignore[reportAttributeAccessIssue]


def test_workers_have_the_same_seed_in_every_process() -> None:
    source = open_source(plain(Told(), num_workers=1, worker_init_fn=tell_seed))
    source.start_epoch(0, source.length)
    told = source.next()
    fresh = open_source(plain(Told(), num_workers=1, worker_init_fn=tell_seed))
    fresh.seek(source.position())
    assert fresh.next() == told
    source.start_epoch(1, source.length)
    later = source.next()
    assert later != told
    fresh.close()
    fresh = open_source(plain(Told(), num_workers=1, worker_init_fn=tell_seed))
    fresh.seek(source.position())
    assert fresh.next() == later
    source.close()
    fresh.close()


def test_pinned_memory_and_other_settings() -> None:
    loader = plain(num_workers=2, prefetch_factor=3, timeout=60, multiprocessing_context="fork")
    source = open_source(loader)
    assert len(train(source, 1, None)) == 7
    source.close()


@pytest.mark.parametrize("loader", [plain(Augmented(0)), plain(Augmented(2), drop_last=True), []])
def test_empty_loader(loader: Any) -> None:
    with pytest.raises(UsageError, match="nothing to train on"):
        open_source(loader)


def test_iterable_that_gives_nothing() -> None:
    source = open_source(iter([]))
    source.start_epoch(0, None)
    with pytest.raises(UsageError, match="gave no batch in epoch 0"):
        source.next()


def test_length_of_zero_somewhere() -> None:
    source = open_source(mapped("shuffled"))
    with pytest.raises(UsageError, match="0 batches on some rank"):
        source.start_epoch(0, 0)


class Boaster(Homemade):
    """Promises more than it gives."""

    def __len__(self) -> int:
        return 9


def test_length_that_is_not_kept() -> None:
    source = open_source(Boaster())
    source.start_epoch(0, source.length)
    for _ in range(5):
        source.next()
    with pytest.raises(UsageError, match="gave 5 batches in epoch 0 where its length is 9"):
        source.next()


class Estimate(Uneven):
    """Gives one batch more than its length says."""

    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize("workers", [0, 2])
def test_more_batches_than_the_length(workers: int) -> None:
    source = open_source(plain(batch_sampler=Estimate(), num_workers=workers))
    source.start_epoch(0, source.length)
    for _ in range(5):
        source.next()
    with pytest.raises(UsageError, match=r"more batches in epoch 0 than its length \(5\)"):
        source.next()
    source.close()


def test_batches_in_any_order_are_refused() -> None:
    with pytest.raises(UsageError, match="in_order=False"):
        open_source(plain(num_workers=2, in_order=False))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_too_large_to_be_kept_is_refused(workers: int) -> None:
    source = open_source(plain(Mixed(10_000), num_workers=workers))
    source.start_epoch(0, source.length)
    with pytest.raises(UsageError, match=r"dataset._previous \(40000 bytes\) changes from batch"):
        read(source, 5)
    source.close()


@pytest.mark.extended
def test_draws_in_turn_with_the_model_are_counted_and_cost_nothing() -> None:
    source = open_source(plain(Endless(), batch_size=1))
    source.start_epoch(0, None)
    read(source, 1100)
    place = codec.encode(source.position())
    assert len(place) < 30_000
    before = torch.get_rng_state()
    expected = source.next()
    fresh = open_source(plain(Endless(), batch_size=1))
    fresh.seek(codec.decode(place))
    torch.set_rng_state(before)
    assert torch.equal(fresh.next(), expected)


def read(source: BatchSource, batches: int) -> None:
    """Read them beside a model that draws."""
    for _ in range(batches):
        source.position()
        source.next()
        torch.rand(1)


class Endless(Stream):
    """Draws as long as it is asked."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.rand(1)


def test_not_a_loader() -> None:
    with pytest.raises(UsageError, match=r"given a int"):
        open_source(3)


def test_position_of_another_kind() -> None:
    with pytest.raises(UsageError, match=r"is that of a sequence"):
        open_source(None).seek(open_source([1]).position())


def test_position_of_other_data() -> None:
    source = open_source(plain(shuffle=True))
    source.start_epoch(0, source.length)
    source.next()
    with pytest.raises(UsageError, match="has 25 batches where it had 6"):
        open_source(plain(Augmented(100), shuffle=True)).seek(source.position())


def test_iterator_cannot_be_rewound() -> None:
    source = open_source(iter(range(9)))
    source.start_epoch(0, None)
    source.next()
    place = source.position()
    fresh = open_source(iter(range(9)))
    fresh.seek(place)
    assert fresh.next() == source.next() == 1
    with pytest.raises(UsageError, match="cannot be rewound"):
        source.seek(place)


def test_what_is_replayed_says_so() -> None:
    for loader in (other("stream"), other("told"), iter([1]), Stream()):
        source = open_source(loader)
        assert "reads all its batches again" in source.note
    quiet = plain(Augmented(8), num_workers=1)
    for loader in (None, [1], mapped("lazy"), quiet, other("ledger"), other("homemade")):
        assert open_source(loader).note == ""


@pytest.mark.parametrize(("draws", "loader"), [(True, Stream()), (False, iter([1, 2]))])
def test_only_a_dataloader_draws_from_the_process(draws: bool, loader: Any) -> None:
    before = torch.get_rng_state()
    source = open_source(plain(loader) if draws else loader)
    source.start_epoch(0, None)
    source.next()
    assert torch.equal(before, torch.get_rng_state()) != draws


def test_indices_are_counted_and_nobody_has_to_agree_on_each() -> None:
    source = open_source(None)
    assert source.length is not None, "the ranks would vote on every index"
    source.start_epoch(0, source.length)
    assert [source.next() for _ in range(50)] == list(range(50))
    longer = open_source(None)
    longer.seek(source.position())
    assert longer.next() == 50


FRESH = """
import sys
sys.path.append(sys.argv[1])
import torch
from tests.data.loader_kinds import mapped
from outlast.checkpoint.format import codec as tree
from outlast import random_state
from tests.data.source_driver import epoch, open_source
place, states = tree.decode(sys.stdin.buffer.read())
source = open_source(mapped("dice", num_workers=2))
torch.rand(9)
source.seek(tree.decode(place))
random_state.restore(states)
draws = []
epoch(source, draws)
source.close()
print(" ".join(draw.seen for draw in draws))
"""


@pytest.mark.process
def test_another_process_goes_on() -> None:
    source = open_source(mapped("dice", num_workers=2))
    told = train(source, 1, None)
    source.close()
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(Path(__file__).parents[2])],
        input=codec.encode((told[2].position, told[2].random)), capture_output=True, timeout=120,
        check=True,
    )  # fmt: skip
    assert done.stdout.decode().split() == [draw.seen for draw in told[2:]]
    assert len(told) == SIZE // 4 + 2
