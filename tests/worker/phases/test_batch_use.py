"""Phases that work on the newest batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from outlast.worker.phases.batch_use import BatchUse

index, x = torch.arange(3), torch.ones(3)
device_copy = x.clone()
batch: Any = {"x": x, "pair": [index, ["a", "b"]], "size": 3}
weights = torch.zeros(3)


def gets(*_: Any) -> None:
    """Read nothing."""


def reads() -> Any:
    return batch["x"]


def reads_copy() -> Any:
    return device_copy


def reads_others() -> Any:
    return weights, len("size")


class Trainer:
    """An object that keeps a batch."""

    def __init__(self, newest: Any) -> None:
        self.newest = newest

    def reads(self) -> Any:
        """Read the batch."""
        return self.newest


def _in_a_cell(value: Any) -> Any:
    return lambda: value


@pytest.mark.parametrize(
    ("call", "is_use"),
    [
        (partial(gets, batch), True),
        (partial(gets, index), True),
        (partial(gets, [(x, 1)]), True),
        (partial(gets, device_copy), True),
        (partial(gets, weights, 3, "a", None), False),
        (partial(reads), True),
        (partial(reads_copy), True),
        (partial(reads_others), False),
        (partial(partial(reads)), True),
        (partial(Trainer(batch).reads), True),
        (partial(Trainer(weights).reads), False),
        (partial(_in_a_cell(x)), True),
        (partial(_in_a_cell(weights)), False),
        (partial(len, "abc"), False),
    ],
)
def test_a_phase_gets_or_reads_the_batch(call: Any, is_use: bool) -> None:
    use = BatchUse()
    use.draw(batch)
    use.step(partial(gets, device_copy, 3))
    assert use.holds(call) is is_use
    use.draw(torch.zeros(1))
    assert not use.holds(call), "it is of the batch before"
