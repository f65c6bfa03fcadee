"""What two checkpoints hold beside tensors, held against each other."""

from __future__ import annotations

from typing import Any

from outlast.checkpoint import tree
from outlast.checkpoint.differing import differences
from outlast.checkpoint.reader import Reader
from outlast.checkpoint.record import digest_of
from outlast.checkpoint.schema import BLOB_MAGIC
from outlast.cli.verdict import Odd
from outlast.errors import MismatchError
from outlast.worker.rank_part import SEAT_MAGIC, part_summary


def values(a: Reader, b: Reader) -> list[Odd]:
    """What all ranks share, then, where there are as many ranks, what each one has of its own.

    Raises CorruptionError or StorageError as reading does.
    """
    worlds = a.checkpoint.commit.world, b.checkpoint.commit.world
    wanted = [(-1, 0, "shared")]
    if worlds[0] == worlds[1]:
        wanted += [(rank, rank, "own") for rank in range(worlds[0])]
    found: list[Odd] = []
    for rank, holder, name in wanted:
        one, two = _blob(a, holder, name), _blob(b, holder, name)
        if one != two:
            pair = _decoded(a, holder, one), _decoded(b, holder, two)
            found += [Odd(rank, each.path, each.a, each.b) for each in differences(*pair)]
    return found


def _blob(reader: Reader, rank: int, name: str) -> bytes:
    try:
        return reader.blob(rank, name)
    except MismatchError:  # it has none
        return b""


def _decoded(reader: Reader, rank: int, data: bytes) -> Any:
    """Whatever it was that was kept; bytes that are no value of ours by their digest."""
    if data.startswith(SEAT_MAGIC):
        return part_summary(data, f"{reader.checkpoint.where}, rank {rank}")
    if data.startswith(BLOB_MAGIC):
        return tree.decode(data)
    return {"digest": digest_of(data)} if data else {}
