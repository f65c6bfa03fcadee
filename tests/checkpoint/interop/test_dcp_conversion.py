"""Conversion of torch.distributed.checkpoint directories without unpickling."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.checkpoint.checkpoint_maker import make
from tests.checkpoint.interop.dcp_states import same, state
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
)
from torch.distributed.checkpoint.metadata import (
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.format import codec
from outlast.checkpoint.format.manifests import SavePoint, Tensor
from outlast.checkpoint.interop import dcp_conversion
from outlast.checkpoint.interop.dcp_conversion import read_dcp, read_layout, write_dcp
from outlast.checkpoint.interop.dcp_storage import OutlastReader, OutlastWriter
from outlast.checkpoint.interop.foreign_entries import values_of
from outlast.checkpoint.interop.foreign_layouts import TensorNaming
from outlast.checkpoint.interop.safetensors_files import write_safetensors
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader, blocks_of
from outlast.checkpoint.stores.catalog import newest_checkpoint, open_checkpoint, verify
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import CodecError, CorruptionError, StorageError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
PLACE = SavePoint(5, 5, "abc")


def reader_of(root: Path) -> CheckpointReader:
    checkpoint = newest_checkpoint(Folder(root), pytest.fail)
    assert checkpoint
    return CheckpointReader(checkpoint)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_export_is_loaded_by_torch(tmp_path: Path) -> None:
    """What DCP saved through us comes out as DCP itself would have written it."""
    dcp.save(state(1), storage_writer=OutlastWriter(tmp_path / "ours", 1))
    write_dcp(reader_of(tmp_path / "ours"), tmp_path / "theirs", TensorNaming())
    loaded = state(2)
    dcp.load(loaded, checkpoint_id=tmp_path / "theirs")
    assert same(loaded, state(1))
    assert names_in(tmp_path) == ["ours", "theirs"]


def test_import_of_export_is_equal(tmp_path: Path) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path / "theirs")
    found = read_dcp(tmp_path / "theirs", Folder(tmp_path / "a"), TensorNaming(), step=3, job="j")
    assert found.place.step == 3 and found.skipped == {} and "words.name" in found.objects
    one = reader_of(tmp_path / "a")
    assert verify(one.checkpoint) == []
    write_dcp(one, tmp_path / "again", TensorNaming())
    loaded = state(2)
    dcp.load(loaded, checkpoint_id=tmp_path / "again")
    assert same(loaded, state(1))
    read_dcp(tmp_path / "again", Folder(tmp_path / "b"), TensorNaming(), step=3, job="j")
    two = reader_of(tmp_path / "b")
    assert two.checkpoint.tensors == one.checkpoint.tensors
    assert codec.decode(two.blob(0, "shared")) == codec.decode(one.blob(0, "shared"))


def test_large_tensors_are_written_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = np.arange(7 * 5 * 3, dtype=np.float32).reshape(7, 5, 3)
    make(tmp_path / "ours", PLACE, {"w": w})
    assert {block.box.size for block in blocks_of("w", Tensor("float32", w.shape), 128)} == {
        (2, 5, 3),
        (1, 5, 3),
    }
    assert [b.box.size for b in blocks_of("w", Tensor("float32", (2, 3, 4)), 20)] == [
        (1, 1, 4),
    ] * 6
    monkeypatch.setattr(
        dcp_conversion, "blocks_of", lambda name, tensor: blocks_of(name, tensor, 128)
    )
    write_dcp(reader_of(tmp_path / "ours"), tmp_path / "theirs", TensorNaming(add="x."))
    about = FileSystemReader(tmp_path / "theirs").read_metadata().state_dict_metadata["x.w"]
    assert isinstance(about, TensorStorageMetadata) and len(about.chunks) == 4
    into = {"x.w": torch.zeros(7, 5, 3)}
    dcp.load(into, checkpoint_id=tmp_path / "theirs")
    assert torch.equal(into["x.w"], torch.from_numpy(w))


def test_naming(tmp_path: Path) -> None:
    tensors = {name: np.ones(1, np.float32) for name in ("model.a", "model.b.c", "optim.x")}
    make(tmp_path / "ours", PLACE, tensors)
    reader = reader_of(tmp_path / "ours")
    naming = TensorNaming(
        select=("model.",), drop=("model.a",), strip=("model.",), add="n.", rename={"n.b.c": "z"}
    )
    write_dcp(reader, tmp_path / "theirs", naming)
    assert list(FileSystemReader(tmp_path / "theirs").read_metadata().state_dict_metadata) == ["z"]
    with pytest.raises(UsageError, match=r"prefix 'weights\.'; there are model\.a, optim\.x"):
        write_dcp(reader, tmp_path / "none", TensorNaming(select=("weights.",)))
    with pytest.raises(UsageError, match=r"model\.a and optim\.x would both be called 'x'"):
        write_dcp(reader, tmp_path / "none", TensorNaming(rename={"model.a": "x", "optim.x": "x"}))
    with pytest.raises(UsageError, match="exists already; nothing was overwritten"):
        write_dcp(reader, tmp_path / "theirs", TensorNaming())
    with pytest.raises(UsageError, match="make it first"):
        write_dcp(reader, tmp_path / "no" / "where", TensorNaming())
    assert names_in(tmp_path) == ["ours", "theirs"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    make(tmp_path / "ours", PLACE, {"w": np.ones(5000, np.float32)}, world=1)
    shard = tmp_path / "ours" / PLACE.directory / "shard-00000"
    data = bytearray(shard.read_bytes())
    data[9000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptionError, match="shard-00000: chunk 0"):
        write_dcp(reader_of(tmp_path / "ours"), tmp_path / "theirs", TensorNaming())
    assert names_in(tmp_path) == ["ours"]


@pytest.mark.parametrize("write", [write_dcp, write_safetensors])
def test_a_disk_that_takes_no_more_leaves_nothing(
    tmp_path: Path, write: Callable[..., Any]
) -> None:
    make(tmp_path / "ours", PLACE, {"w": np.ones(100_000, np.float32)})
    reader = reader_of(tmp_path / "ours")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="theirs: could not be written: File too large"):
            write(reader, tmp_path / "theirs", TensorNaming())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names_in(tmp_path) == ["ours"]


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    groups = [
        {"params": model[0].parameters(), "lr": 0.1 * seed},
        {"params": model[1].parameters()},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01 * seed)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("flatten", [True, False])
def test_a_run_moves_to_torch_and_back(tmp_path: Path, flatten: bool) -> None:
    """Weights, moments and hyperparameters, in both orders that torch has for the latter: the flat
    one is torchtitan's."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = trained(1)
    weights, moments = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "theirs")
    read_dcp(tmp_path / "theirs", Folder(tmp_path / "ours"), TensorNaming(), step=1, job="j")
    shared = codec.decode(reader_of(tmp_path / "ours").blob(0, "shared"))
    assert shared["kinds"] == {"model": "module", "optimizer": "optimizer"}
    groups = shared["optimizers"]["optimizer"]
    assert groups["parameters"] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    assert [group["lr"] for group in groups["groups"]["value"]] == [0.1, 0.001]

    there, theirs = trained(2)
    with Checkpointer(tmp_path / "ours", complete=False) as saves:
        assert saves.load({"model": there, "optimizer": theirs})
    assert same(there.state_dict(), model.state_dict())
    assert same(theirs.state_dict(), optimizer.state_dict())

    write_dcp(reader_of(tmp_path / "ours"), tmp_path / "back", TensorNaming())
    for other in (True, False):  # whichever way it came
        options = StateDictOptions(flatten_optimizer_state_dict=other)
        there, theirs = trained(2)
        weights, moments = get_state_dict(there, theirs, options=options)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "back")
        set_state_dict(
            there, theirs, model_state_dict=weights, optim_state_dict=moments, options=options
        )
        assert same(there.state_dict(), model.state_dict())
        assert same(theirs.state_dict()["state"], optimizer.state_dict()["state"])
        assert (
            theirs.param_groups[0]["lr"] == 0.1 and theirs.param_groups[1]["weight_decay"] == 0.01
        )


@pytest.mark.process
def test_a_checkpointers_run_goes_on_under_torchtitan(tmp_path: Path) -> None:
    """Whose model has its weights at the top level, and its optimizer by parameter."""
    model, optimizer = trained(1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    with Checkpointer(tmp_path / "ours") as saves:
        saves.save(1, {"model": model, "optimizer": optimizer, "schedule": schedule, "seen": 5})
    write_dcp(reader_of(tmp_path / "ours"), tmp_path / "theirs", TensorNaming(strip=("model.",)))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    there, theirs = trained(2)
    torch.optim.lr_scheduler.LinearLR(theirs)  # which gives each group a hyperparameter more
    weights, moments = get_state_dict(there, theirs, options=options)
    into = {**weights, "optimizer": moments, "seen": 0, "schedule": {"last_epoch": -1}}
    dcp.load(into, checkpoint_id=tmp_path / "theirs")
    set_state_dict(
        there, theirs, model_state_dict=weights, optim_state_dict=moments, options=options
    )
    assert same(there.state_dict(), model.state_dict())
    assert same(theirs.state_dict(), optimizer.state_dict())
    assert into["seen"] == 5 and into["schedule"]["last_epoch"] == 0


def test_a_hyperparameter_that_is_a_tensor_stays_one() -> None:
    groups: list[dict[str, Any]] = [{"lr": None, "eps": 1.0}, {"lr": 0.5}]
    holes = {"o.param_groups.0.lr": ((0, "lr"), "cpu")}
    optimizer = {"groups": {"value": groups, "holes": holes}, "parameters": [["a"], ["b"]]}
    shared = {"objects": {}, "values": {}, "optimizers": {"o": optimizer}}
    assert values_of(shared)["o"] == {
        "param_groups": [{"eps": 1.0, "params": ["a"]}, {"lr": 0.5, "params": ["b"]}],
        "param_groups.a.eps": 1.0,
        "param_groups.b.lr": 0.5,
    }


def test_a_flipped_bit_in_a_tensor_is_found(tmp_path: Path) -> None:
    """torch writes checksums and does not look at them."""
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "theirs")
    path = tmp_path / "theirs" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(8).numpy().tobytes()) + 6] ^= 1
    path.write_bytes(data)
    into = {"w": torch.zeros(1000)}
    dcp.load(into, checkpoint_id=tmp_path / "theirs")
    assert not torch.equal(into["w"], torch.ones(1000)), "torch would have noticed"
    with pytest.raises(CorruptionError, match=r"__0_0\.distcp \(w\).*CRC"):
        read_dcp(tmp_path / "theirs", Folder(tmp_path / "ours"), TensorNaming(), step=1, job="j")
    assert names_in(tmp_path / "ours") == []


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    dcp.save(
        {"w": torch.ones(3), "v": torch.arange(4).view(2, 2).t()}, checkpoint_id=tmp_path / "t"
    )
    for name in (".metadata", "__0_0.distcp"):
        path = tmp_path / "t" / name
        whole = path.read_bytes()
        for size in [*range(0, len(whole), 61), len(whole) - 1]:
            path.write_bytes(whole[:size])
            with pytest.raises(CorruptionError, match=name):
                read_dcp(tmp_path / "t", Folder(tmp_path / "ours"), TensorNaming(), step=1, job="j")
        path.unlink()
        with pytest.raises(CorruptionError, match="missing"):
            read_layout(tmp_path / "t")
        path.write_bytes(whole)
    read_dcp(tmp_path / "t", Folder(tmp_path / "ours"), TensorNaming(), step=1, job="j")


def test_no_flipped_bit_of_metadata_runs_or_breaks_anything(tmp_path: Path) -> None:
    """Metadata have no digest, so that some flips only rename a tensor. What is read is whole, or
    refused in our words."""
    dcp.save({"w": torch.ones(3), "n": 1}, checkpoint_id=tmp_path / "t")
    path = tmp_path / "t" / ".metadata"
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        try:
            layout = read_layout(tmp_path / "t")
        except (CodecError, CorruptionError, StorageError):
            continue
        for tensor, sections in layout.tensors.values():
            assert sum(section.box.elements for section in sections) >= np.prod(tensor.shape)


def test_places_are_of_their_own(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "t")
    folder = Folder(tmp_path / "ours")
    places = [
        read_dcp(tmp_path / "t", folder, TensorNaming(), step=1, job="j").place for _ in range(2)
    ]
    assert places[0] != places[1]
    assert all(verify(open_checkpoint(folder, place)) == [] for place in places)
    into = {"w": torch.zeros(3)}
    dcp.load(into, storage_reader=OutlastReader(folder))
    assert torch.equal(into["w"], torch.ones(3))
