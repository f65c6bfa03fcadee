"""Training loop that only draws batches and records them."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch

from outlast import random_state
from outlast.checkpoint.format import codec
from outlast.data import batch_source as sources
from outlast.data.batch_source import BatchSource
from outlast.data.counted_source import Codec


class Draw(NamedTuple):
    """One `next`: the position and the generators before it, and the batch."""

    position: bytes
    random: dict[str, Any]
    seen: str  # digest of the batch (or of its absence) and of what the model drew after it


def open_source(loader: Any) -> BatchSource:
    """Return the source that a session opens."""
    return sources.open_source(loader, Codec(codec.encode, codec.decode))


def seen(batch: Any) -> str:
    noise = torch.rand(3), random.random(), np.random.rand()
    return codec.encode((batch, noise))[-16:].hex()


def epoch(source: BatchSource, draws: list[Draw]) -> None:
    """Draw the rest of an epoch, with its end."""
    while True:
        place, states = codec.encode(source.position()), random_state.snapshot()
        try:
            batch = source.next()
        except StopIteration:
            draws.append(Draw(place, states, seen("end")))
            return
        draws.append(Draw(place, states, seen(batch)))


def train(source: BatchSource, epochs: int, length: int | None) -> list[Draw]:
    """Draw whole epochs from the beginning."""
    draws: list[Draw] = []
    for number in range(epochs):
        source.start_epoch(number, source.length if length is None else length)
        epoch(source, draws)
    return draws


def go_on(source: BatchSource, draw: Draw, epochs: int, length: int | None) -> list[Draw]:
    """Seek, restore the generators, and draw to the end, as a joiner does."""
    before = codec.encode(random_state.snapshot())
    source.seek(codec.decode(draw.position))
    assert codec.encode(random_state.snapshot()) == before, "seek moved the process's generators"
    random_state.restore(draw.random)
    draws: list[Draw] = []
    epoch(source, draws)
    for number in range(source.epoch + 1, epochs):
        source.start_epoch(number, source.length if length is None else length)
        epoch(source, draws)
    return draws
