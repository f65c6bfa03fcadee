"""Tensors of a checkpoint in blocks that fit into memory, verified, in the order asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from outlast.checkpoint.boxes import Box
from outlast.checkpoint.dtypes import ITEM_BYTES
from outlast.checkpoint.reader import Reader, Target
from outlast.checkpoint.record import Tensor

BLOCK_BYTES = 64 << 20
# What NumPy copies by width alone, whatever the bytes mean.
_WIDTHS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Block(NamedTuple):
    """A box of a tensor that is asked for."""

    name: str
    tensor: Tensor
    box: Box

    @property
    def size_bytes(self) -> int:
        return self.box.elements * ITEM_BYTES[self.tensor.dtype]


def blocks_of(name: str, tensor: Tensor, limit_bytes: int = BLOCK_BYTES) -> list[Block]:
    """The whole tensor as boxes of at most `limit_bytes`, which in their order are its elements in
    C order; an empty tensor is one empty box."""
    elements = max(1, limit_bytes // ITEM_BYTES[tensor.dtype])
    return [Block(name, tensor, box) for box in _boxes(tensor.shape, elements)]


def read_blocks(reader: Reader, blocks: Iterable[Block]) -> Iterator[tuple[Block, memoryview]]:
    """Each block with its bytes in C order, which last until the next one is taken.

    Small ones are read together, since each costs at least a chunk. Raises as `Reader.read` does.
    """
    batch: list[Block] = []
    size_bytes = 0
    for block in blocks:
        if batch and size_bytes + block.size_bytes > BLOCK_BYTES:
            yield from _read(reader, batch)
            batch, size_bytes = [], 0
        batch.append(block)
        size_bytes += block.size_bytes
    yield from _read(reader, batch)


def _read(reader: Reader, batch: list[Block]) -> Iterator[tuple[Block, memoryview]]:
    held: list[np.ndarray] = []
    for block in batch:
        width = _WIDTHS[ITEM_BYTES[block.tensor.dtype]]
        held.append(np.empty(block.box.size, width))
    reader.read([Target(b.name, b.box, a) for b, a in zip(batch, held, strict=True) if a.size])
    for block, array in zip(batch, held, strict=True):
        yield block, array.reshape(-1).view(np.uint8).data


def _boxes(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    if math.prod(shape) <= limit:
        yield Box.whole(shape)
        return
    row = math.prod(shape[1:])
    if row > limit:
        for index in range(shape[0]):
            for box in _boxes(shape[1:], limit):
                yield Box((index, *box.start), (1, *box.size))
        return
    for start in range(0, shape[0], limit // row):
        size = min(limit // row, shape[0] - start)
        yield Box((start, *(0,) * len(shape[1:])), (size, *shape[1:]))
