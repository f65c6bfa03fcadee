"""A small sample checkpoint, and damage to its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.checkpoint.checkpoint_maker import make

from outlast.checkpoint.format.manifests import SavePoint


def place(step: int) -> SavePoint:
    return SavePoint(step, step, "a1")


def checkpoint(
    root: Path, step: int = 1, size: int = 100_000, chunk: int = 4096, world: int = 4
) -> Path:
    """Write a checkpoint of a few chunks a rank, with different bytes at each step."""
    tensor = np.random.default_rng(step).integers(0, 255, size, np.uint8)
    return make(
        root, place(step), {"weight": tensor}, world, chunk_bytes=chunk, shared=b"s", time_ns=step
    )


def flip(path: Path, at: int) -> None:
    """Flip one bit of the byte `at`."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
