"""Draws of every loader against plain torch, also after a resume in another process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.foreign_loaders import STRANGERS
from tests.data.source_driver import Draw, go_on, open_source, seen, train

from outlast.data.counted_source import set_epoch

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
EPOCHS = 3


def script(name: str, number: int = 1) -> Any:
    """The loader, built under the script's seeds; then the script's generators go their way."""
    seed(0)
    loader = STRANGERS[name]()
    seed(number)
    return loader


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def plainly(name: str) -> list[str]:
    """What the script sees without us."""
    loader = script(name)
    told: list[str] = []
    for epoch in range(EPOCHS):
        set_epoch(epoch, loader, getattr(loader, "dataset", None))
        told += [seen(batch) for batch in loader]
        told.append(seen("end"))
    return told


QUICK = {"counting-persistent"}
EXTENDED = {"lazy-dice-workers", "stream-workers", "bookmarked-workers", "drawn-again"}


def _cases() -> list[object]:
    return [pytest.param(name, marks=_marks(name)) for name in STRANGERS]


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if name in EXTENDED:
        return [pytest.mark.extended]
    return [pytest.mark.long] if _has_processes(name) and name not in QUICK else []


def _has_processes(name: str) -> bool:
    words = ("workers", "persistent", "old-idiom", "hooked", "multi-epochs", "each-epoch")
    return name == "torchdata" or any(word in name for word in words)


@pytest.mark.parametrize("name", _cases())
def test_equal_to_torch(name: str) -> None:
    expected = plainly(name)
    source = open_source(script(name))
    draws = train(source, EPOCHS, None)
    source.close()
    assert [draw.seen for draw in draws] == expected
    stride = 16 if "spawned" in name else 7 if _has_processes(name) else 5
    for at in range(1, len(draws), stride):
        went = _goes_on(name, draws, at, 1000)
        if at < len(draws) - 3:  # who takes over from there in turn goes on with the same
            _goes_on(name, went, 2, 2000)


def _goes_on(name: str, draws: list[Draw], at: int, number: int) -> list[Draw]:
    fresh = open_source(script(name, number + at))
    went = go_on(fresh, draws[at], EPOCHS, None)
    fresh.close()
    assert [d.seen for d in went] == [d.seen for d in draws[at:]], f"from draw {at}"
    return went
