"""Layout of a rank's part in its arena, and the copies into it.

A layout is computed once a plan, its views into an arena once an arena. A save runs one flat list
of copies.

An arena that holds a save (`frozen_bytes` and `size_bytes`: of its ArenaLayout):

    0                frozen_bytes      size_bytes             end of the shard   arena.size_bytes
    | frozen tensors | other tensors   | blobs: own, shared   | slack            | stamp    |
    | whole chunks   | large ones at   | each at a block of   | see arena_bytes  | one page |
    |                | blocks of 4 KiB | 4 KiB                |                  |          |
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from outlast.checkpoint.format.manifests import CHUNK_BYTES, Blob, Tensor, TensorPiece
from outlast.checkpoint.format.tensor_boxes import Box, runs
from outlast.checkpoint.save.shard_plan import WHOLE_BYTES, LocalTensor, ShardShare

BLOCK_BYTES = 4096
_PADDING_SHARE = 8  # of a frozen region at most one part in so many is padding
_MOVE_BYTES = 4 << 20
_MOVES_ALONE = 4  # so few copies are not worth the start of a thread
_SMALL_BYTES = 64 << 10  # below, releasing the interpreter's lock costs more than the copy
_move_at_once = ctypes.PyDLL(None).memmove  # keeps the lock
_move_at_once.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_at_once.restype = None


class LaidShare(NamedTuple):
    """A share, and its first byte in the shard."""

    share: ShardShare
    at: int


class ArenaLayout(NamedTuple):
    """The tensors of a rank's shard.

    `size_bytes`: a multiple of the block size; `frozen_bytes`, of its beginning: a multiple of the
    chunk size.
    """

    laid: tuple[LaidShare, ...]
    pieces: tuple[TensorPiece, ...]
    tensors: dict[str, Tensor]
    size_bytes: int
    frozen_bytes: int


def lay_out(
    known: Mapping[str, Tensor], shares: Sequence[ShardShare], frozen: Collection[str] = ()
) -> ArenaLayout:
    """Return a layout: shares aligned to their elements' size, large ones to blocks.

    `held`: all tensors that this rank knows; manifests name only those that it writes, or that are
    empty. `frozen`: names of tensors in front of all others, where they fill a region of complete
    chunks.
    """
    first = _in_a_row([share for share in shares if share.held_box.name in frozen], 0)
    frozen_bytes = _region(first.end)
    if frozen_bytes:
        others = [share for share in shares if share.held_box.name not in frozen]
        rest = _in_a_row(others, max(first.end, frozen_bytes))
    else:
        first, rest = _Row([], [], 0), _in_a_row(shares, 0)
    written = {share.held_box.name for share in shares}
    tensors = {
        name: tensor
        for name, tensor in known.items()
        if name in written or not Box.whole(tensor.shape).elements
    }
    return ArenaLayout(
        (*first.laid, *rest.laid),
        (*first.pieces, *rest.pieces),
        tensors,
        aligned(rest.end, BLOCK_BYTES),
        frozen_bytes,
    )


class _Row(NamedTuple):
    laid: list[LaidShare]
    pieces: list[TensorPiece]
    end: int


def _region(size_bytes: int) -> int:
    """Return the size of the frozen region in complete chunks.

    Rounded up where padding is small in proportion, else rounded down: the rest is then written
    like trained tensors.
    """
    whole = aligned(size_bytes, CHUNK_BYTES)
    return whole if (whole - size_bytes) * _PADDING_SHARE <= size_bytes else whole - CHUNK_BYTES


def _in_a_row(shares: Iterable[ShardShare], at: int) -> _Row:
    """Lay out shares one behind the other, from byte `at` on."""
    laid: list[LaidShare] = []
    pieces: list[TensorPiece] = []
    for share in shares:
        itemsize = share.held_box.dtype.itemsize
        at = aligned(at, BLOCK_BYTES if share.size_bytes >= WHOLE_BYTES else itemsize)
        laid.append(LaidShare(share, at))
        for box in _boxes(share):
            whole = box.moved(by=share.held_box.box.start)
            pieces.append(TensorPiece(share.held_box.name, whole.start, whole.size, at))
            at += box.elements * itemsize
    return _Row(laid, pieces, at)


def lay_blobs(after: int, sizes: Mapping[str, int]) -> tuple[tuple[Blob, ...], int]:
    """Return blobs of these sizes, each at a block, from byte `after` on; and their end."""
    blobs: list[Blob] = []
    for name, size in sizes.items():
        blobs.append(Blob(name, after, size))
        after = aligned(after + size, BLOCK_BYTES)
    return tuple(blobs), after


def aligned(at: int, to: int) -> int:
    """Return `at` rounded up to a multiple of `to`."""
    return -(-at // to) * to


class _Copy(NamedTuple):
    """One copy from the tensor `name`.

    Of a flat one the elements from `first` on, as many as `into` has (all of them where it is
    `whole`); of any other one a region.
    """

    name: str
    into: torch.Tensor
    first: int
    whole: bool
    region: tuple[slice, ...] | None

    def take(self, source: torch.Tensor, waiting: bool) -> None:
        if self.region is not None:
            source = source[self.region]
        elif not self.whole:
            source = source.view(-1).narrow(0, self.first, self.into.numel())
        self.into.copy_(source, non_blocking=not waiting)


class _Move(NamedTuple):
    """A copy from a flat tensor in this process's memory: `size_bytes` from its byte `first` on,
    to the address `into`."""

    name: str
    into: int
    first: int
    size_bytes: int

    def pieces(self, source: torch.Tensor) -> Iterator[tuple[int, int, int]]:
        """Yield destination address, source address and size of each piece."""
        begin = source.data_ptr() + self.first
        for at in range(0, self.size_bytes, _MOVE_BYTES):
            yield self.into + at, begin + at, min(_MOVE_BYTES, self.size_bytes - at)


class StagingCopies:
    """The copies of one layout into one arena. It must not outlive the arena's memory."""

    def __init__(
        self, memory: torch.Tensor, layout: ArenaLayout, table: Mapping[str, LocalTensor]
    ) -> None:
        """Prepare the copies. `memory`: the arena's bytes."""
        self._small: list[_Move] = []
        self._large: list[_Move] = []
        self._others: list[_Copy] = []
        begin = memory.data_ptr()
        for share, at in layout.laid:
            name, local = share.held_box.name, table[share.held_box.name]
            if local.flat and local.device.type == "cpu":
                first, size_bytes = share.first * share.held_box.dtype.itemsize, share.size_bytes
                moves = self._small if size_bytes < _SMALL_BYTES else self._large
                moves.append(_Move(name, begin + at, first, size_bytes))
                continue
            into = memory[at : at + share.size_bytes].view(share.held_box.dtype)
            if local.flat:
                whole = share.last - share.first == share.held_box.box.elements
                into = into.view(share.held_box.box.size) if whole else into
                self._others.append(_Copy(name, into, share.first, whole, None))
            else:
                self._others += _by_region(into, share)

    @torch.no_grad()
    def run(self, sources: Mapping[str, torch.Tensor], waiting: bool) -> None:
        """Copy everything; unless `waiting`, a device's copies may continue after this.

        `sources` match the table of the constructor.
        """
        for name, into, first, size_bytes in self._small:
            _move_at_once(into, sources[name].data_ptr() + first, size_bytes)
        _move(piece for move in self._large for piece in move.pieces(sources[move.name]))
        for copy in self._others:
            copy.take(sources[copy.name], waiting)


def _move(moves: Iterable[tuple[int, int, int]]) -> None:
    """Copy with two threads that take from one list.

    That saturates the memory's bandwidth, and on a busy machine neither waits for the other longer
    than one small copy takes. (torch's own threads wait for each other at barriers: 20 times slower
    there.)
    """
    pending = deque(moves)

    def work() -> None:
        with suppress(IndexError):
            while True:
                ctypes.memmove(*pending.popleft())

    other = threading.Thread(target=work, name="outlast-copies")
    helped = len(pending) > _MOVES_ALONE
    if helped:
        other.start()
    try:
        work()
    finally:  # after an interruption no thread may write into the arena
        pending.clear()
        if helped:
            other.join()


def _by_region(into: torch.Tensor, share: ShardShare) -> Iterator[_Copy]:
    done = 0
    for box in _boxes(share):
        part = into[done : done + box.elements].view(box.size)
        yield _Copy(share.held_box.name, part, 0, False, box.slices)
        done += box.elements


def _boxes(share: ShardShare) -> list[Box]:
    return list(runs(share.held_box.box.size, share.first, share.last))
