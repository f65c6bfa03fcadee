"""Resume of a loader before every batch of two epochs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.loader_kinds import MAPPED, OTHERS, mapped, other
from tests.data.source_driver import Draw, go_on, open_source, train
from torch.utils.data import DataLoader, Sampler, TensorDataset

from outlast.data.mapped_source import MappedSource
from outlast.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def script(build: Callable[[], Any], seed: int) -> Any:
    """The loader as a script builds it, and generators that then go their own way."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    loader = build()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return loader


def check(build: Callable[[], Any], length: int | None = None, stride: int = 1) -> list[Draw]:
    source = open_source(script(build, 1))
    told = train(source, 2, length)
    source.close()
    for at in range(0, len(told), stride):
        fresh = open_source(script(build, 1000 + at))
        went = go_on(fresh, told[at], 2, length)
        fresh.close()
        assert [d.seen for d in went] == [d.seen for d in told[at:]], f"from draw {at}"
        if isinstance(source, MappedSource):
            assert [d.position for d in went] == [d.position for d in told[at:]]
    return told


@pytest.mark.parametrize("name", MAPPED)
def test_map_style(name: str) -> None:
    told = check(lambda: mapped(name))
    assert len({d.seen for d in told}) == len(told), "every batch has draws of its own"


QUICK = {"shuffled", "lazy", "dice", "torchdata"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in MAPPED]
)
def test_map_style_with_workers(name: str) -> None:
    check(lambda: mapped(name, num_workers=2), stride=5)


@pytest.mark.parametrize("name", ["shuffled", "lazy", "dice"])
def test_persistent_workers(name: str) -> None:
    check(lambda: mapped(name, num_workers=2, persistent_workers=True), stride=4)


@pytest.mark.parametrize("name", ["shuffled", "generator", "lazy", "replacement", "uneven"])
@pytest.mark.parametrize("workers", [0, 2])
def test_agreed_minimum(name: str, workers: int) -> None:
    told = check(lambda: mapped(name, num_workers=workers), length=3, stride=1 + 2 * workers)
    assert len(told) == 8, "three batches and an end, twice"


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    stride = 5 if "workers" in name else 1
    check(lambda: other(name), length=5 if name == "none" else None, stride=stride)


@pytest.mark.parametrize("name", OTHERS)
def test_others_cut_short(name: str) -> None:
    told = check(lambda: other(name), length=3, stride=4 if "workers" in name else 1)
    assert len(told) == 8


class Leveled(Sampler[int]):
    """Indices whose order the training loop decides, as in a curriculum."""

    level = 0

    def __iter__(self) -> Iterator[int]:
        yield from ((index * 7 + self.level) % 24 for index in range(24))

    def __len__(self) -> int:
        return 24


def leveled(workers: int = 0) -> tuple[Leveled, DataLoader[Any]]:
    sampler = Leveled()
    numbers = TensorDataset(torch.arange(24))
    return sampler, DataLoader(numbers, 4, sampler=sampler, num_workers=workers)


def test_a_sampler_that_the_loop_changes_in_the_middle_of_an_epoch_goes_on() -> None:
    sampler, loader = leveled()
    source = open_source(loader)
    source.start_epoch(0, None)
    source.next()
    sampler.level = 3
    source.next()
    fresh = open_source(leveled()[1])
    fresh.seek(source.position())
    assert torch.equal(fresh.next()[0], source.next()[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_changes_of_a_sampler_that_cannot_be_repeated_are_refused(workers: int) -> None:
    """Another batch size takes other indices from the sampler. Loader processes had fetched lists
    before the change."""
    sampler, loader = leveled(workers)
    source = open_source(loader)
    source.start_epoch(0, None)
    source.next()
    batches: Any = loader.batch_sampler
    if workers:
        sampler.level = 3
    else:
        batches.batch_size = 2
    source.next()
    fresh = open_source(leveled(workers)[1])
    with pytest.raises(UsageError, match="BatchSampler gives other batches than the run has taken"):
        fresh.seek(source.position())
    source.close()


def test_settings_of_a_sampler_that_the_loop_changes_between_epochs_are_kept() -> None:
    sampler, loader = leveled()
    source = open_source(loader)
    source.start_epoch(0, 1)
    source.next()
    batches: Any = loader.batch_sampler
    sampler.level, batches.batch_size = 3, 6
    source.start_epoch(1, None)
    source.next()
    fresh = open_source(leveled()[1])
    fresh.seek(source.position())
    assert torch.equal(fresh.next()[0], source.next()[0])
    assert len(source.next()[0]) == len(fresh.next()[0]) == 6
