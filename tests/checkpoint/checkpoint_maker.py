"""Checkpoints of formats 2 to 4, written without the keeper.

`make` divides tensors among ranks as the engine does, and writes them through Folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outlast.checkpoint.format.manifests import (
    CHUNK_BYTES,
    COMMIT,
    FORMAT,
    Blob,
    Commit,
    Manifest,
    ManifestEntry,
    SavePoint,
    Tensor,
    TensorPiece,
    ValueSample,
    digest_of,
    frozen_name,
    manifest_name,
    seal,
    shard_name,
)
from outlast.checkpoint.format.tensor_boxes import Box, runs, shares
from outlast.checkpoint.stores.folder_store import Folder

Array = np.ndarray[Any, Any]
Division = Sequence[Sequence[tuple[str, Box]]]  # for each rank, boxes of tensors
PAGE_BYTES = 4096


def evenly(tensors: Mapping[str, Array], world: int) -> list[list[tuple[str, Box]]]:
    """Divide each tensor's elements among all ranks, as for replicas."""
    names = list(tensors)
    shapes = [tensors[name].shape for name in names]
    return [
        [(names[i], box) for i, first, last in share for box in runs(shapes[i], first, last)]
        for share in shares([math.prod(shape) for shape in shapes], world)
    ]


def make(
    root: Path,
    place: SavePoint,
    tensors: Mapping[str, Array],
    world: int = 2,
    job: str = "job",
    own: Mapping[int, bytes] | None = None,
    shared: bytes = b"",
    *,
    dtypes: Mapping[str, str] | None = None,
    division: Division | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    time_ns: int = 1_700_000_000_000_000_000,
    commit: bool = True,
    version: int = FORMAT,
    parent: str = "",
    base: str = "",
    samples: tuple[ValueSample, ...] = (),
    frozen: int = 0,
) -> Path:
    """Write a checkpoint and return its directory.

    `dtypes` names those that NumPy has not (an array of uint16 may be a bfloat16). `division`:
    which boxes each rank writes, where not evenly. `commit=False` leaves out the commit record.
    `frozen`: so many bytes of each rank's part are its frozen region (version 4).
    """
    whole = {
        name: Tensor((dtypes or {}).get(name, array.dtype.name), array.shape)
        for name, array in tensors.items()
    }
    empty = {name for name, array in tensors.items() if array.size == 0}  # no piece names them
    parts = division or evenly(tensors, world)
    folder, entries, size_bytes = Folder(root), list[ManifestEntry](), 0
    for rank in range(world):
        data, pieces = _pieces(tensors, parts[rank])
        named = [("shared", shared)] if rank == 0 and shared else []
        named += [("own", own[rank])] if own and rank in own else []
        blobs: list[Blob] = []
        for name, blob in named:
            blobs.append(Blob(name, len(data), len(blob)))
            data += blob
        data += bytes(-len(data) % PAGE_BYTES)
        starts = range(0, len(data), chunk_bytes)
        manifest = seal(
            Manifest(
                format=version, job=job, place=place, rank=rank, world=world,
                shard=shard_name(rank), size_bytes=len(data), chunk_bytes=chunk_bytes,
                chunks=tuple(digest_of(data[at : at + chunk_bytes]) for at in starts),
                plan="0" * 32, pieces=tuple(pieces), blobs=tuple(blobs), samples=samples,
                frozen=frozen or msgspec.UNSET,
                tensors={name: whole[name] for name in sorted({p.name for p in pieces} | empty)},
            )
        )  # fmt: skip
        if frozen:
            folder.put(place.directory, frozen_name(rank), [data[:frozen]], frozen)
        folder.put(place.directory, shard_name(rank), [data[frozen:]], len(data) - frozen)
        folder.put(place.directory, manifest_name(rank), [manifest], len(manifest))
        entries.append(ManifestEntry(rank, manifest_name(rank), len(manifest), digest_of(manifest)))
        size_bytes += len(data)
    record = Commit(
        format=version, job=job, place=place, world=world, time_ns=time_ns, plan="0" * 32,
        size_bytes=size_bytes, manifests=tuple(entries), origin={"outlast": "test"},
        parent=parent, base=base,
    )  # fmt: skip
    if commit:
        assert folder.create(place.directory, COMMIT, seal(record))
        folder.point(place.directory)
    return root / place.directory


def _pieces(
    tensors: Mapping[str, Array], boxes: Sequence[tuple[str, Box]]
) -> tuple[bytearray, list[TensorPiece]]:
    data, pieces = bytearray(), list[TensorPiece]()
    for name, box in boxes:
        part = np.ascontiguousarray(tensors[name][(*box.slices, ...)])
        unit = PAGE_BYTES if part.nbytes >= PAGE_BYTES else part.itemsize
        data += bytes(-len(data) % unit)
        pieces.append(TensorPiece(name, box.start, box.size, len(data)))
        data += part.tobytes()
    return data, pieces
