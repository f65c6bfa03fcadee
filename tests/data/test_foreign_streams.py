"""Streams that a new process cannot repeat."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tests.data.dealt_kinds import Numbers
from tests.data.source_driver import open_source
from torch.utils.data import DataLoader, IterableDataset

from outlast.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Unseeded(IterableDataset[int]):
    """Stream that each process shuffles by a generator of its own."""

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(random.SystemRandom().random()).sample(range(99), 99)


@pytest.mark.parametrize("workers", [0, 1])
def test_another_order_is_refused(workers: int) -> None:
    source = open_source(DataLoader(Unseeded(), batch_size=5, num_workers=workers))
    source.start_epoch(0, None)
    before = source.position()
    source.next()
    open_source(DataLoader(Unseeded(), batch_size=5)).seek(before)
    with pytest.raises(UsageError, match="begins epoch 0 with another batch when it is read again"):
        open_source(DataLoader(Unseeded(), batch_size=5)).seek(source.position())
    source.close()


def test_processes_that_keep_an_epoch_are_refused() -> None:
    with pytest.raises(UsageError, match="leave persistent_workers out"):
        open_source(DataLoader(Numbers(9, 2, 0), num_workers=1, persistent_workers=True))
