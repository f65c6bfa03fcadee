"""Groups of batches, one for each step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from outlast.checkpoint.format import codec
from outlast.data.batch_groups import BatchGroups, open_grouped
from outlast.data.batch_source import BatchSource
from outlast.data.counted_source import Codec
from outlast.errors import UsageError

CODEC = Codec(codec.encode, codec.decode)


class Numbers(Dataset[int]):
    def __init__(self, *, draws: bool = False) -> None:
        self._draws = draws

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index + (random.randrange(1) if self._draws else 0)


def opened(size: int, *, draws: bool = False, drawn: bool = False, **options: Any) -> BatchSource:
    loader = DataLoader(Numbers(draws=drawn), batch_size=1, **options)
    return open_grouped(BatchGroups(loader, size, draws=draws), CODEC)


def rest_of(source: BatchSource) -> list[list[int]]:
    found = []
    while True:
        try:
            found.append([int(batch) for batch in source.next()])
        except StopIteration:
            return found


def test_the_last_group_of_an_epoch_is_shorter() -> None:
    source = opened(4)
    assert source.length == 3
    for epoch in range(2):
        source.start_epoch(epoch, source.length)
        assert rest_of(source) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_an_agreed_length_cuts_whole_groups() -> None:
    source = opened(4)
    source.start_epoch(0, None)
    source.set_length(2)
    assert rest_of(source) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("done", range(4))
def test_another_source_continues_at_a_position(done: int) -> None:
    def begun() -> BatchSource:
        torch.manual_seed(3)
        source = opened(4, shuffle=True)
        source.start_epoch(1, 3)
        return source

    source = begun()
    for _ in range(done):
        source.next()
    position, states = source.position(), torch.get_rng_state()
    expected = rest_of(source)
    other = begun()
    torch.manual_seed(99)
    other.seek(codec.decode(codec.encode(position)))
    torch.set_rng_state(states)
    assert rest_of(other) == expected


def test_a_position_between_other_groups_is_refused() -> None:
    position = opened(4).position()
    with pytest.raises(UsageError, match="with 4 batches a step, and the loop has 2"):
        opened(2).seek(position)
    plain = open_grouped(DataLoader(Numbers()), CODEC).position()
    with pytest.raises(UsageError, match="with 1 batches a step, and the loop has 2"):
        opened(2).seek(plain)


def test_draws_from_generators_of_the_process_are_refused() -> None:
    source = opened(4, drawn=True)
    source.start_epoch(0, 3)
    with pytest.raises(UsageError, match="draw from generators of the process \\(python\\)"):
        source.next()
    allowed = opened(4, drawn=True, draws=True)
    allowed.start_epoch(0, 3)
    assert len(rest_of(allowed)) == 3
