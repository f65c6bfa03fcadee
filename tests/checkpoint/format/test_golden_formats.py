"""Golden bytes of formats 2 to 4: read and written unchanged.

To write the files of a new version:
`python -m tests.checkpoint.format.test_golden_formats`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.checkpoint.checkpoint_maker import Array, make

from outlast.checkpoint.format import manifests
from outlast.checkpoint.format.manifests import (
    Commit,
    SavePoint,
    Tensor,
    ValueSample,
    digest_of,
    unseal,
)
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader, ReadTarget
from outlast.checkpoint.stores.catalog import checkpoint_places, newest_checkpoint, verify
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import CorruptionError

GOLDEN = {version: Path(__file__).with_name(f"golden_v{version}") for version in (2, 3, 4)}
PLACES = {
    2: SavePoint(500, 512, "a1g3s17"),
    3: SavePoint(500, 512, "a1g3s17", line=2),
    4: SavePoint(600, 615, "a1g3s18", line=2),
}
FILES = {2: 6, 3: 6, 4: 8}
BASE = "step-000000100-n103-a1g3s4"
SHARED, OWN = b"equal on all ranks", {0: b"of rank 0", 1: bytes(range(256))}
DTYPES = {"norm": "bfloat16"}
SAMPLES = (ValueSample("0" * 32, (0, 1), "1" * 32, "0011223344556677", ("norm", "weight")),)


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


def write(root: Path, version: int) -> None:
    since: dict[str, Any] = {}
    if version >= 3:
        since = {"parent": "step-000000400-n411-l2-a1g3s16", "base": BASE, "samples": SAMPLES}
    if version == 4:
        since |= {"frozen": 4096}
    make(
        root, PLACES[version], tensors(), job="golden", own=OWN, shared=SHARED, dtypes=DTYPES,
        chunk_bytes=4096, time_ns=1_767_225_600_000_000_000, version=version, **since,
    )  # fmt: skip


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.mark.parametrize("version", [2, 3, 4])
def test_the_golden_checkpoint_reads_back_exactly(version: int) -> None:
    found = newest_checkpoint(Folder(GOLDEN[version]), pytest.fail, verify=True)
    assert found and found.place == PLACES[version] and found.job == "golden"
    assert found.commit.base == (BASE if version >= 3 else "")
    assert found.manifests[0].samples == (SAMPLES if version >= 3 else ())
    assert [each.frozen_bytes for each in found.manifests] == [4096 if version == 4 else 0] * 2
    assert verify(found) == []
    assert found.tensors["norm"] == Tensor("bfloat16", (9,))
    wanted = tensors()
    assert found.tensors.keys() == wanted.keys()
    targets = [
        ReadTarget(name, Box.whole(array.shape), np.zeros_like(array))
        for name, array in wanted.items()
    ]
    it = CheckpointReader(found)
    it.read(targets)
    assert all(into.tobytes() == wanted[name].tobytes() for name, _, into in targets)
    assert it.blob(0, "shared") == SHARED
    assert {rank: it.blob(rank, "own") for rank in OWN} == OWN


@pytest.mark.parametrize("version", [2, 3, 4])
def test_the_golden_checkpoint_is_written_the_same(tmp_path: Path, version: int) -> None:
    write(tmp_path, version)
    assert contents(tmp_path) == contents(GOLDEN[version])
    assert len(contents(GOLDEN[version])) == FILES[version]


@pytest.mark.parametrize(("version", "absent"), [(2, ()), (3, ("parent", "base"))])
def test_a_record_has_the_fields_of_its_format(version: int, absent: tuple[str, ...]) -> None:
    """A digest that fits is not enough: what format 2 lacks is no part of it, and 3 has all."""
    path = GOLDEN[3] / PLACES[3].directory / "commit.json"
    whole = unseal(path.read_bytes(), Commit, "commit.json")
    fields = msgspec.to_builtins(whole) | {"format": version, "digest": ""}
    fields = {name: value for name, value in fields.items() if name not in absent}
    fields["digest"] = digest_of(msgspec.json.encode(fields))
    with pytest.raises(CorruptionError, match="do not match its digest"):
        unseal(msgspec.json.encode(fields) + b"\n", Commit, "commit.json")


def test_checkpoints_of_all_formats_in_one_directory(tmp_path: Path) -> None:
    for version in (2, 3, 4):
        write(tmp_path, version)
    assert checkpoint_places(Folder(tmp_path)) == [PLACES[4], PLACES[3], PLACES[2]]


def test_an_outlast_that_knows_no_frozen_regions_refuses_them_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manifests, "FORMATS", (2, 3))
    said: list[str] = []
    assert newest_checkpoint(Folder(GOLDEN[4]), said.append) is None
    assert "commit.json: format 4 where this Outlast reads 2 to 3; use the Outlast that" in said[0]


if __name__ == "__main__":
    write(GOLDEN[4], 4)  # a format that others have written stays as it is
