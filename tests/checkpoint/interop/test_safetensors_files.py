"""Safetensors files, against the library itself."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.checkpoint.checkpoint_maker import make
from tests.checkpoint.interop.dcp_states import bits, same

from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.format.manifests import ITEM_BYTES, SavePoint
from outlast.checkpoint.interop.foreign_layouts import TensorNaming
from outlast.checkpoint.interop.safetensors_files import (
    KINDS,
    find_safetensors,
    read_safetensors,
    write_safetensors,
)
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.load.tensor_fill import fill_tensors
from outlast.checkpoint.stores.catalog import newest_checkpoint, verify
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import CodecError, CorruptionError, StorageError, UsageError

PLACE = SavePoint(5, 5, "abc")
MODEL = TensorNaming(select=("model.",), strip=("model.",))


def reader_of(root: Path) -> CheckpointReader:
    checkpoint = newest_checkpoint(Folder(root), pytest.fail)
    assert checkpoint
    return CheckpointReader(checkpoint)


def of_every_type() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    raw = torch.randint(0, 255, (2, 3, 16), dtype=torch.uint8)
    tensors = {
        name: raw.clone().view(getattr(torch, name)) if name != "bool" else raw > 100
        for name in KINDS
    }
    return tensors | {"none": torch.zeros(0, 4), "one": torch.tensor(2.5)}


def imported(
    tmp_path: Path, tensors: dict[str, torch.Tensor], add: str = "model."
) -> CheckpointReader:
    save_file(tensors, tmp_path / "in.safetensors")
    root = tmp_path / "ours"
    read_safetensors(
        tmp_path / "in.safetensors", Folder(root), TensorNaming(add=add), step=7, job="j"
    )
    return reader_of(root)


def test_every_type_goes_in_and_out(tmp_path: Path) -> None:
    tensors = of_every_type()
    reader = imported(tmp_path, tensors)
    assert verify(reader.checkpoint) == [] and reader.checkpoint.place.step == 7
    into = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    fill_tensors(reader, into)
    assert all(bits(into[f"model.{name}"]) == bits(tensor) for name, tensor in tensors.items())
    assert write_safetensors(reader, tmp_path / "out", MODEL) == ("model.safetensors",)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    for found in find_safetensors(tmp_path / "out").values():
        assert found.at % ITEM_BYTES[found.tensor.dtype] == 0, "no tensor of it could be mapped"
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_large_models_are_divided_as_transformers_does(tmp_path: Path) -> None:
    tensors = {f"layer.{index}": torch.full((100,), float(index)) for index in range(5)}
    reader = imported(tmp_path, tensors)
    files = write_safetensors(reader, tmp_path / "out", MODEL, shard_bytes=1000)
    assert files == (
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    )
    index = json.loads((tmp_path / "out" / files[-1]).read_text())
    assert (
        index["metadata"] == {"total_size": 2000} and index["weight_map"].keys() == tensors.keys()
    )
    found: dict[str, torch.Tensor] = {}
    for title in files[:-1]:
        held = load_file(tmp_path / "out" / title)
        assert all(index["weight_map"][name] == title for name in held)
        assert sum(tensor.nbytes for tensor in held.values()) <= 1000
        found |= held
    assert same(found, tensors)

    read_safetensors(
        tmp_path / "out", Folder(tmp_path / "b"), TensorNaming(add="model."), step=1, job="j"
    )
    again = reader_of(tmp_path / "b")
    assert again.checkpoint.tensors == reader.checkpoint.tensors
    write_safetensors(again, tmp_path / "again", MODEL)
    assert same(load_file(tmp_path / "again" / "model.safetensors"), tensors)


def test_tied_weights_are_written_once_if_they_are(tmp_path: Path) -> None:
    tensors = {"emb": torch.ones(9), "head": torch.ones(9), "other": torch.zeros(9)}
    reader = imported(tmp_path, tensors)
    write_safetensors(reader, tmp_path / "out", MODEL, tied={"model.head": "model.emb"})
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"emb", "other"}
    with pytest.raises(UsageError, match=r"tied to model\.other, and has other values"):
        write_safetensors(reader, tmp_path / "no", MODEL, tied={"model.head": "model.other"})
    with pytest.raises(UsageError, match=r"model\.x is given as tied, and is not selected"):
        write_safetensors(reader, tmp_path / "no", MODEL, tied={"model.x": "model.emb"})
    assert not (tmp_path / "no").exists()


def test_unwritable_tensors_are_refused_before_the_first_file(tmp_path: Path) -> None:
    make(tmp_path / "ours", PLACE, {"w": np.ones(3, np.complex128), "v": np.ones(3)})
    reader = reader_of(tmp_path / "ours")
    with pytest.raises(CodecError, match=r"w \(complex128\)"):
        write_safetensors(reader, tmp_path / "out", TensorNaming())
    assert not (tmp_path / "out").exists()
    write_safetensors(reader, tmp_path / "out", TensorNaming(drop=("w",)))
    with pytest.raises(UsageError, match="exists already"):
        write_safetensors(reader, tmp_path / "out", TensorNaming(drop=("w",)))


def test_weights_are_loaded_by_a_checkpointer(tmp_path: Path) -> None:
    """Weights alone: generators and the optimizer stay as they are."""
    torch.manual_seed(1)
    model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    imported(tmp_path, dict(model.state_dict()))
    before = torch.get_rng_state()
    with Checkpointer(tmp_path / "ours", complete=False) as saves:
        restored = saves.load({"model": other})
    assert restored and restored.step == 7
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert torch.equal(torch.get_rng_state(), before)


def header(entries: dict[str, Any], data: bytes = bytes(16)) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


WRONG = {
    "nothing": b"",
    "a short length": b"\x01\x00",
    "a header larger than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "no JSON": struct.pack("<Q", 2) + b"{]",
    "no object": struct.pack("<Q", 2) + b"[]",
    "a gap": header({"w": entry(offsets=(0, 8), shape=(2,))}),
    "a hole in between": header({"w": entry(shape=(1,), offsets=(0, 4)),
                                 "v": entry(shape=(2,), offsets=(8, 16))}),
    "an overlap": header({"w": entry(), "v": entry(shape=(2,), offsets=(8, 16))}),
    "the same twice": header({"w": entry(), "v": entry()}),
    "outside": header({"w": entry(shape=(8,), offsets=(0, 32))}),
    "backwards": header({"w": entry(offsets=(16, 0))}),
    "another size": header({"w": entry(shape=(3,))}),
    "a negative shape": header({"w": entry(shape=(-2, -2))}),
    "dimensions without end": header({"w": entry(shape=(1 << 62,) * 65, offsets=(0, 0))}, b""),
    "a size beyond any": header({"w": entry(shape=(0, 1 << 63), offsets=(0, 0))}, b""),
    "lists in lists": struct.pack("<Q", 100_005) + b'{"w":' + b"[" * 100_000,
    "a shape of text": header({"w": entry(shape="ab")}),
    "an unknown field": header({"w": {**entry(), "more": 1}}),
    "metadata of numbers": header({"w": entry(), "__metadata__": {"a": 1}}),
    "cut short": header({"w": entry()})[:-1],
    "too long": header({"w": entry()}) + b"x",
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_files_that_contradict_themselves_are_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(WRONG[what])
    with pytest.raises(CorruptionError, match=r"x\.safetensors.*nothing was read"):
        read_safetensors(path, Folder(tmp_path / "ours"), TensorNaming(), step=1, job="j")
    assert not (tmp_path / "ours").exists()


def test_unsupported_safetensors_content_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(header({"w": entry(dtype="F4")}))
    with pytest.raises(CodecError, match="w is of type F4"):
        find_safetensors(path)
    path.write_bytes(header({"w": entry(), "__metadata__": {"DCP_SHARDING_INFO": "{}"}}))
    with pytest.raises(CodecError, match="parts of tensors"):
        find_safetensors(path)


def test_indexes_are_checked(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"v": torch.ones(2)}, tmp_path / "b.safetensors")
    with pytest.raises(UsageError, match="has 2 files of safetensors and no"):
        find_safetensors(tmp_path)
    for placed, said in (
        ({"w": "b.safetensors"}, "w is not in b.safetensors"),
        ({"w": "../a.safetensors"}, "leads out of its directory"),
        ({"w": "c.safetensors"}, "c.safetensors is missing"),
        ({"w": 1}, "index.json"),
        ({"w": "a\0b"}, "leads out of its directory"),
    ):
        index = json.dumps({"metadata": {}, "weight_map": placed})
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(CorruptionError, match=said):
            find_safetensors(tmp_path)
    with pytest.raises(CorruptionError, match="is missing"):
        find_safetensors(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="could not be read"):
        find_safetensors(tmp_path / "a.safetensors" / "x")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CorruptionError, match="no regular file"):
        find_safetensors(tmp_path)


@pytest.mark.parametrize("step", [-1, 10**18])
def test_invalid_step_numbers_are_refused(tmp_path: Path, step: int) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    root = tmp_path / "ours"
    with pytest.raises(UsageError, match="nothing was saved"):
        read_safetensors(
            tmp_path / "a.safetensors", Folder(root), TensorNaming(), step=step, job="j"
        )
    assert not root.exists()


def test_a_tensor_with_the_name_of_a_dcp_object_is_refused(tmp_path: Path) -> None:
    """Else what came as safetensors would be unpickled by DCP's planner."""
    with pytest.raises(CodecError, match=r"dcp\.object/step .*nothing was written"):
        imported(tmp_path, {"step": torch.zeros(4, dtype=torch.uint8)}, add="dcp.object/")
    assert not (tmp_path / "ours").exists()


def test_a_file_that_shrinks_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(100)}, path)
    whole = path.read_bytes()
    naming = TensorNaming()

    class Shrinking(TensorNaming):
        """Between the header and the bytes there is time."""

        def apply(self, names: Any) -> dict[str, str]:
            path.write_bytes(whole[:-1])
            return naming.apply(names)

    with pytest.raises(CorruptionError, match="ends at byte"):
        read_safetensors(path, Folder(tmp_path / "ours"), Shrinking(), step=1, job="j")
    assert list((tmp_path / "ours").iterdir()) == []


@pytest.mark.process
def test_export_does_not_import_torch() -> None:
    """A machine that only serves a model may have none."""
    code = "import sys, outlast.checkpoint.interop.safetensors_files; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
