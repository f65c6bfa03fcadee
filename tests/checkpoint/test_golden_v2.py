"""Bytes of the second format: what is read today is read for ever, and written the same.

To write them anew on purpose (a new version!): `python tests/checkpoint/test_golden_v2.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from making import Array, make

from outlast.checkpoint.boxes import Box
from outlast.checkpoint.catalog import newest, verify
from outlast.checkpoint.folder import Folder
from outlast.checkpoint.reader import Reader, Target
from outlast.checkpoint.record import Place, Tensor

GOLDEN = Path(__file__).with_name("golden_v2")
PLACE = Place(500, 512, "a1g3s17")
SHARED, OWN = b"equal on all ranks", {0: b"of rank 0", 1: bytes(range(256))}
DTYPES = {"norm": "bfloat16"}


def tensors() -> dict[str, Array]:
    counted = np.arange(2200, dtype=np.float32)
    return {
        "weight": (counted / 7 - 100).reshape(44, 50),
        "norm": np.arange(0x3F80, 0x3F80 + 9, dtype=np.uint16),
        "mask": np.arange(11) % 3 == 0,
        "step": np.array(500),
        "empty": np.zeros((0, 4), np.float16),
        "turn": np.array([[1 + 2j, -0.0 - 1j]], np.complex64),
    }


def write(root: Path) -> None:
    make(
        root, PLACE, tensors(), job="golden", own=OWN, shared=SHARED, dtypes=DTYPES,
        chunk_bytes=4096, time_ns=1_767_225_600_000_000_000,
    )  # fmt: skip


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_the_golden_checkpoint_reads_back_exactly() -> None:
    found = newest(Folder(GOLDEN), pytest.fail, verify=True)
    assert found and found.place == PLACE and found.job == "golden"
    assert verify(found) == []
    assert found.tensors["norm"] == Tensor("bfloat16", (9,))
    wanted = tensors()
    assert found.tensors.keys() == wanted.keys()
    targets = [
        Target(name, Box.whole(array.shape), np.zeros_like(array)) for name, array in wanted.items()
    ]
    it = Reader(found)
    it.read(targets)
    assert all(into.tobytes() == wanted[name].tobytes() for name, _, into in targets)
    assert it.blob(0, "shared") == SHARED
    assert {rank: it.blob(rank, "own") for rank in OWN} == OWN


def test_the_golden_checkpoint_is_written_the_same(tmp_path: Path) -> None:
    write(tmp_path)
    assert contents(tmp_path) == contents(GOLDEN)
    assert len(contents(GOLDEN)) == 6


if __name__ == "__main__":
    shutil.rmtree(GOLDEN)
    write(GOLDEN)
