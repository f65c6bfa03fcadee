"""Chunk reader: few threads, a buffer for each, and the first error ends the pass."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoint.checkpoint_maker import make

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.stores.catalog import open_checkpoint
from outlast.checkpoint.stores.chunk_reader import THREADS, Chunk, chunks_of, walk
from outlast.checkpoint.stores.folder_store import Folder


@pytest.fixture
def chunks(tmp_path: Path) -> list[Chunk]:
    tensors = {f"t{k:03d}": np.zeros(7, np.uint8) for k in range(2000)}
    make(tmp_path, SavePoint(1, 1, "a"), tensors, chunk_bytes=4096, own={0: b"x"})
    manifests = open_checkpoint(Folder(tmp_path), SavePoint(1, 1, "a")).manifests
    return [chunk for manifest in manifests for chunk in chunks_of(manifest)] * 20


def test_each_is_visited_once_with_aligned_memory(chunks: list[Chunk]) -> None:
    seen: list[tuple[int, int]] = []
    addresses: set[int] = set()
    apart = threading.Barrier(THREADS, timeout=30)

    def do(chunk: Chunk, buffer: memoryview) -> None:
        if len(seen) < THREADS and threading.get_ident() not in addresses:
            addresses.add(threading.get_ident())
            apart.wait()  # all of them are at work at the same time
        assert len(buffer) == chunk.size_bytes == 4096
        assert ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % 4096 == 0
        seen.append((chunk.manifest.rank, chunk.number))

    walk(chunks, do)
    assert sorted(seen) == sorted((chunk.manifest.rank, chunk.number) for chunk in chunks)
    walk([], do)
    assert len(seen) == len(chunks)


def test_the_first_error_ends_it(chunks: list[Chunk]) -> None:
    visited: list[Chunk] = []
    before = threading.active_count()

    def do(chunk: Chunk, buffer: memoryview) -> None:
        visited.append(chunk)
        if len(visited) == 10:
            raise ValueError("the tenth")

    with pytest.raises(ValueError, match="the tenth"):
        walk(chunks * 5000, do)
    assert len(visited) < len(chunks) * 5000
    assert threading.active_count() == before


def test_a_title_names_what_lies_there(chunks: list[Chunk]) -> None:
    first, last = chunks[0], chunks[1]
    assert first.title == (
        "chunk 0 (bytes 0 to 4096; holds t000, t001, t002, t003, t004, t005, t006, t007"
        " and 578 more)"
    )
    assert last.tensors[0] == "t585" and last.tensors[-1] == "(own)"
