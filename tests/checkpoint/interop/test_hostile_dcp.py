"""Hostile torch.distributed.checkpoint directories: refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from outlast.checkpoint.interop import dcp_conversion
from outlast.checkpoint.interop.dcp_conversion import read_dcp, read_layout
from outlast.checkpoint.interop.foreign_layouts import TensorNaming
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import CodecError, CorruptionError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


class Hostile:
    """Its pickle asks for a command to be run."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.canary}",)


def test_a_hostile_object_is_skipped_by_name(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    dcp.save({"w": torch.ones(2), "evil": Hostile(canary)}, checkpoint_id=tmp_path / "theirs")
    found = read_dcp(
        tmp_path / "theirs", Folder(tmp_path / "ours"), TensorNaming(), step=1, job="j"
    )
    assert found.tensors == ("w",) and "posix.system" in found.skipped["evil"]
    assert not canary.exists()


def test_hostile_metadata_are_refused_by_name(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "theirs").mkdir()
    bare: Any = Metadata({}, storage_data={}, planner_data=Hostile(canary))
    FileSystemWriter(tmp_path / "theirs").finish(bare, [])
    with pytest.raises(CodecError, match=r"posix\.system.*nothing was run"):
        read_dcp(tmp_path / "theirs", Folder(tmp_path / "ours"), TensorNaming(), step=1, job="j")
    assert not canary.exists() and not (tmp_path / "ours").exists()


def of_one(**wrong: Any) -> tuple[Metadata, list[WriteResult]]:
    """Metadata of the tensor w of four elements in two chunks, with something wrong."""
    about = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), [])
    results: list[WriteResult] = []
    for start, size in wrong.get("chunks", [(0, 2), (2, 2)]):
        about.chunks.append(ChunkStorageMetadata(torch.Size([start]), torch.Size([size])))
        info = _StorageInfo(**{"relative_path": "f", "offset": 0, "length": 9} | wrong.get("i", {}))
        results.append(WriteResult(MetadataIndex("w", [start]), 9, info))
    return Metadata({"w": about, **wrong.get("more", {})}), results


def shaped(shape: list[int], times: int) -> TensorStorageMetadata:
    """A tensor with one chunk, named so many times."""
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    size = torch.Size(shape)
    return TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk] * times)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "a chunk too few": (r"has no chunk for Box\(start=\(2,\)", {"chunks": [(0, 2)]}),
    "a chunk outside": ("outside", {"chunks": [(0, 2), (2, 3)]}),
    "a file outside": ("'../f' is missing from its directory", {"i": {"relative_path": "../f"}}),
    "no such file": ("'g' is missing", {"i": {"relative_path": "g"}}),
    "bytes behind the end": ("f has 10 bytes, where bytes 2 to 11", {"i": {"offset": 2}}),
    "bytes before the start": ("where bytes -1 to", {"i": {"offset": -1}}),
    "half a byte": ("an unknown form", {"i": {"offset": 0.5}}),
    "a number as a name": ("an unknown form", {"more": {5: BytesStorageMetadata()}}),
    "dimensions without end": ("65 dimensions", {"more": {"x": shaped([1] * 65, 0)}}),
    "chunks named again and again": (
        "chunks in [0-9]+ bytes",
        {"more": {"x": shaped([1], 5000)}},
    ),
    "no place": ("an unknown form", {"more": {"x": BytesStorageMetadata()}}),
    "not torch.save": (r"f \(w\): File is not a zip file", {}),
}


@pytest.mark.parametrize("what", WRONG)
def test_metadata_that_contradict_the_files_are_refused(tmp_path: Path, what: str) -> None:
    said, wrong = WRONG[what]
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "f").write_bytes(bytes(10))
    (tmp_path / "f").write_bytes(bytes(10))
    metadata, results = of_one(**wrong)
    FileSystemWriter(tmp_path / "t").finish(metadata, [results])
    with pytest.raises(CorruptionError, match=said):
        read_dcp(tmp_path / "t", Folder(tmp_path / "ours"), TensorNaming(), step=1, job="j")


def test_names_of_tuples_in_tuples_do_not_end_the_process(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(10))
    metadata, results = of_one(i={"relative_path": "somewhere"})
    FileSystemWriter(tmp_path).finish(metadata, [results])
    path = tmp_path / ".metadata"
    deep = b")" + b"\x85" * 100_000
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\x8c\x09somewhere", deep) + bytes(len(data)))
    assert path.stat().st_size > len(deep)
    with pytest.raises(CorruptionError, match="a tuple as a name"):
        read_layout(tmp_path)


def test_objects_have_a_limit_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_conversion, "_OBJECTS_BYTES_MAX", 1000)
    dcp.save({"w": torch.ones(2), "a": "x" * 600, "b": "y" * 600}, checkpoint_id=tmp_path / "t")
    found = read_dcp(tmp_path / "t", Folder(tmp_path / "ours"), TensorNaming(), step=1, job="j")
    assert found.objects == ("a",) and "more bytes" in found.skipped["b"]


def test_compressed_entries_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "f").write_bytes(bytes(10))
    metadata, results = of_one(i={"transform_descriptors": ["stream.zstd/1"]})
    FileSystemWriter(tmp_path / "t").finish(metadata, [results])
    with pytest.raises(CodecError, match="w is compressed or encrypted"):
        read_layout(tmp_path / "t")


def test_a_tensor_that_contradicts_the_metadata_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4), "v": torch.ones(2, 2)}, checkpoint_id=tmp_path / "t")
    metadata = FileSystemReader(tmp_path / "t").read_metadata()
    index = {key.fqn: key for key in metadata.storage_data}
    swapped = [
        WriteResult(index["w"], 1, metadata.storage_data[index["v"]]),
        WriteResult(index["v"], 1, metadata.storage_data[index["w"]]),
    ]
    FileSystemWriter(tmp_path / "t").finish(metadata, [swapped])
    with pytest.raises(CorruptionError, match=r"w is not the float32 \(4,\)"):
        read_dcp(tmp_path / "t", Folder(tmp_path / "ours"), TensorNaming(), step=1, job="j")
