"""dcp.save and dcp.load with Outlast's format as storage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.checkpoint.interop.dcp_states import same, state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from outlast.checkpoint.format.manifests import Tensor
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.interop import stream_writer
from outlast.checkpoint.interop.dcp_storage import OutlastReader, OutlastWriter
from outlast.checkpoint.stores.catalog import (
    checkpoint_places,
    newest_checkpoint,
    open_checkpoint,
    verify,
)
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import CorruptionError, UnsupportedError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def test_a_saved_state_loads_equal(tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=OutlastWriter(tmp_path, 1))
    loaded = state(2)
    assert not same(loaded, state(1))
    dcp.load(loaded, storage_reader=OutlastReader(tmp_path))
    assert same(loaded, state(1))
    found = newest_checkpoint(Folder(tmp_path), pytest.fail, verify=True)
    assert found and found.place.step == 1 and verify(found) == []


def test_each_save_has_a_directory_and_each_step_can_be_loaded(tmp_path: Path) -> None:
    writer = OutlastWriter(tmp_path, 1)
    for step in (1, 2, 2):
        dcp.save(state(step), storage_writer=writer, checkpoint_id=str(step))
    assert [place.step for place in checkpoint_places(Folder(tmp_path))] == [2, 2, 1]
    for step in (1, 2):
        loaded = state(3)
        dcp.load(loaded, storage_reader=OutlastReader(tmp_path, step=step))
        assert same(loaded, state(step))


def test_async_saves(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        root = tmp_path / "checkpoints"
        saved = dcp.async_save(state(1), storage_writer=OutlastWriter(root, 1))
        saved.result(timeout=60)  # type: ignore[union-attr]
        loaded = state(2)
        dcp.load(loaded, storage_reader=OutlastReader(root))
    finally:
        torch.distributed.destroy_process_group()
    assert same(loaded, state(1))


def test_another_type_is_converted_as_dcp_does(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(6.0).view(2, 3)}, storage_writer=OutlastWriter(tmp_path, 1))
    into = {"w": torch.zeros(2, 3, dtype=torch.float64)}
    dcp.load(into, storage_reader=OutlastReader(tmp_path))
    assert torch.equal(into["w"], torch.arange(6.0, dtype=torch.float64).view(2, 3))


def test_a_nested_dict_is_built_from_nothing(tmp_path: Path) -> None:
    """As torch's converter to torch.save does."""
    dcp.save({"a": {"b": torch.ones(2), "c": 3}}, storage_writer=OutlastWriter(tmp_path, 1))
    found = _load_state_dict_from_keys(storage_reader=OutlastReader(tmp_path))
    assert torch.equal(found["a"]["b"], torch.ones(2)) and found["a"]["c"] == 3


def test_a_flipped_bit_is_an_error_that_names_tensors(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(1000), "s": 1}, storage_writer=OutlastWriter(tmp_path, 1))
    (place,) = checkpoint_places(Folder(tmp_path))
    shard = tmp_path / place.directory / "shard-00000"
    data = bytearray(shard.read_bytes())
    data[10] ^= 4
    shard.write_bytes(data)
    with pytest.raises(CheckpointException, match=r"shard-00000: chunk 0 .*w"):
        dcp.load({"w": torch.zeros(1000)}, storage_reader=OutlastReader(tmp_path))


def test_a_mirror_repairs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dcp.save({"w": torch.ones(1000)}, storage_writer=OutlastWriter(tmp_path / "a", 1))
    (place,) = checkpoint_places(Folder(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    shard = tmp_path / "a" / place.directory / "shard-00000"
    (tmp_path / "b" / place.directory).mkdir()
    (tmp_path / "b" / place.directory / "shard-00000").write_bytes(shard.read_bytes())
    shard.write_bytes(bytes(len(shard.read_bytes())))
    into = {"w": torch.zeros(1000)}
    dcp.load(into, storage_reader=OutlastReader(tmp_path / "a", mirrors=[Folder(tmp_path / "b")]))
    assert torch.equal(into["w"], torch.ones(1000)) and str(tmp_path / "b") in caplog.text


def test_damaged_records_are_found_before_dcp_starts(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"w": torch.ones(2) * step}, storage_writer=OutlastWriter(tmp_path, step))
    place = checkpoint_places(Folder(tmp_path))[0]
    (tmp_path / place.directory / "rank-00000.json").unlink()
    with pytest.raises(CorruptionError, match=r"rank-00000.json: is missing"):
        OutlastReader(tmp_path, step=2)
    into = {"w": torch.zeros(2)}
    dcp.load(into, storage_reader=OutlastReader(tmp_path))
    assert torch.equal(into["w"], torch.ones(2))
    with pytest.raises(UsageError, match="no whole checkpoint of step 3"):
        OutlastReader(tmp_path, step=3)


class Halving(DefaultSavePlanner):
    """Gives something else than what it planned."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's
        return super().transform_object(write_item, object).half()


def test_a_planner_that_changes_its_mind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"w was planned as torch\.float32 \(2,\) and is"):
        dcp.save({"w": torch.ones(2)}, storage_writer=OutlastWriter(tmp_path, 1), planner=Halving())
    assert checkpoint_places(Folder(tmp_path)) == []


def test_shards_of_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_writer, "CHUNK_BYTES", 8192)
    tensors = {str(n): torch.randn(n) for n in (1, 1000, 2048, 3001, 5000)}
    dcp.save(tensors, storage_writer=OutlastWriter(tmp_path, 1))
    found = newest_checkpoint(Folder(tmp_path), pytest.fail, verify=True)
    assert found and len(found.manifests[0].chunks) > 5
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(into, storage_reader=OutlastReader(tmp_path))
    assert same(into, tensors)


@pytest.mark.parametrize("size_bytes", [0, 7, 9])
def test_an_item_of_another_length_is_not_kept(tmp_path: Path, size_bytes: int) -> None:
    def item(name: str, size: int) -> stream_writer.StreamItem:
        return stream_writer.StreamItem(
            name, Tensor("uint8", (8,)), Box((0,), (8,)), lambda: [bytes(size)]
        )

    save = stream_writer.new_save(Folder(tmp_path), "j", 1, 1, "")
    items = [item("w", size_bytes), item("v", 16 - size_bytes)]
    with pytest.raises(CorruptionError, match=r"w has -?[0-9] bytes too many"):
        stream_writer.write_part(Folder(tmp_path), save, 0, items, {})
    assert list((tmp_path / save.place.directory).iterdir()) == []


def test_ranks_with_different_newest_checkpoints_stop(tmp_path: Path) -> None:
    """As over NFS, where one host sees a new directory later than another."""
    for step in (1, 2):
        dcp.save({"w": torch.ones(2)}, storage_writer=OutlastWriter(tmp_path, step))
    one, two = OutlastReader(tmp_path, step=1), OutlastReader(tmp_path)
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in (one, two)]
    with pytest.raises(CorruptionError, match=r"rank 0 found step-000000001.*rank 1 found step-"):
        one.prepare_global_plan(plans)


def test_unsupported_planners_and_storages_are_refused(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    writer = OutlastWriter(tmp_path, 1)
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=planner)
    with pytest.raises(CheckpointException, match="enable_plan_caching"):
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=planner)
    (place,) = checkpoint_places(Folder(tmp_path))
    assert verify(open_checkpoint(Folder(tmp_path), place)) == []
    with pytest.raises(UnsupportedError, match="use_collectives"):
        dcp.save(
            {"w": torch.ones(2)},
            storage_writer=OutlastWriter(tmp_path, 2),
            use_collectives=False,
        )
    with pytest.raises(UsageError, match="a step is wanted"):
        dcp.save({}, storage_writer=OutlastWriter(tmp_path, 2), checkpoint_id="x/step-2")
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(CheckpointException, match=r"w is a Tensor .* no plain bytes"):
        dcp.save({"w": sparse}, storage_writer=OutlastWriter(tmp_path, 2))
    assert [place.step for place in checkpoint_places(Folder(tmp_path))] == [1]


@pytest.mark.process
def test_two_ranks_of_fsdp_load_what_they_saved(tmp_path: Path) -> None:
    """And one process loads it, too."""
    script = str(Path(__file__).parent / "fsdp_rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(tmp_path), str(rank)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    root = tmp_path / "checkpoints"
    found = newest_checkpoint(Folder(root), pytest.fail, verify=True)
    assert found and found.commit.world == 2
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in whole.items()}}
    dcp.load(into, storage_reader=OutlastReader(root))
    assert same(into["model"], whole)
