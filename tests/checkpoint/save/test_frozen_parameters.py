"""Frozen parameters from the model to the disk and back: engines, dying keepers, Checkpointer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.checkpoint.keeper_orders import (
    CHUNK_BYTES,
    Desk,
    directory,
    manifest_of,
    newest,
    order_of,
    place_of,
)
from tests.checkpoint.rank_threads import Exchange, all_ranks
from tests.checkpoint.save.engine_trainer import DEADLINE_S, Trainer, trainer
from torch import nn

from outlast.checkpoint import Checkpointer, CheckpointWarning
from outlast.checkpoint.format.manifests import CHUNK_BYTES as FULL_BYTES
from outlast.checkpoint.format.manifests import FORMAT, FORMAT_FROZEN, Manifest, SavePoint
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_disk import DiskFault
from outlast.checkpoint.keeper.keeper_frames import SaveOrder
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.replicas.group_parity import HeldPart
from outlast.checkpoint.replicas.memory_copies import MemoryCopies
from outlast.checkpoint.save.save_engine import SaveEngine
from outlast.checkpoint.save.save_request import SaveRequest, SaveSettings
from outlast.checkpoint.save.shard_plan import frozen_names
from outlast.checkpoint.stores.catalog import open_checkpoint, verify
from outlast.checkpoint.stores.folder_store import Folder

__all__ = ["trainer"]
pytestmark = pytest.mark.process
WIDTH = 2100  # squared, of float32: a little more than a chunk


def manifests(reader: CheckpointReader) -> tuple[Manifest, ...]:
    return reader.checkpoint.manifests


def inode(reader: CheckpointReader) -> int:
    place = reader.checkpoint.place
    root = Path(reader.checkpoint.store.where)
    return (root / place.directory / "frozen-00000").stat().st_ino


def equal(reader: CheckpointReader, tensors: dict[str, torch.Tensor]) -> bool:
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    SaveEngine.read(reader, found)
    return all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def adapted() -> dict[str, torch.Tensor]:
    return {
        "a.adapter": nn.Parameter(torch.randn(16, WIDTH)),
        "b.base": nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False),
        "c.norm": nn.Parameter(torch.randn(WIDTH), requires_grad=False),
        "d.buffer": torch.randn(WIDTH),
    }


def test_trained_tensors_follow_the_frozen_region(trainer: Trainer) -> None:
    tensors = adapted()
    assert frozen_names(tensors) == {"b.base", "c.norm"}
    saved = []
    for _ in range(3):
        with torch.no_grad():
            tensors["a.adapter"] += 1
        saved.append(trainer.save(tensors))
        assert equal(saved[-1], tensors) and not verify(saved[-1].checkpoint)
    (manifest,) = manifests(saved[2])
    assert (manifest.format, manifest.frozen_bytes) == (FORMAT_FROZEN, FULL_BYTES)
    assert list(manifest.files) == ["frozen-00000", "shard-00000"]
    behind = {piece.name for piece in manifest.pieces if piece.at >= FULL_BYTES}
    assert behind == {"a.adapter", "d.buffer"}
    assert inode(saved[0]) == inode(saved[2]) != inode(saved[1])


class Bytes:
    """A version in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, at: int, into: memoryview) -> None:
        into[:] = self._data[at : at + len(into)]


def test_in_memory_a_part_is_one_piece(trainer: Trainer) -> None:
    tensors = adapted()
    place = trainer.save(tensors).checkpoint.place
    (held,) = trainer.keeper.held_versions()
    assert held.manifest.frozen_bytes == FULL_BYTES
    *_, slot = trainer.engine._slots
    copies = MemoryCopies([HeldPart(held.manifest, Bytes(bytes(slot.arena.view)))])
    found = open_checkpoint(copies, place)
    found.check()
    assert not verify(found) and equal(CheckpointReader(found), tensors)
    found.store.get(place.directory, "shard-00000")
    copies.close()


def test_freezing_changes_the_layout_without_extra_collectives(tmp_path: Path) -> None:
    asked: list[bytes] = []

    def exchange(message: bytes) -> list[bytes]:
        asked.append(message)
        return [message]

    trainer = Trainer(tmp_path, exchange=exchange)
    tensors = adapted()
    formats, asked_by_save = list[int](), list[int]()
    for frozen in (False, True, True, True, False, True):
        tensors["b.base"].requires_grad_(not frozen)
        with torch.no_grad():
            tensors["a.adapter"] += 1
            if not frozen:
                tensors["b.base"] += 1
        saved = trainer.save(tensors)
        formats.append(manifests(saved)[0].format)
        assert equal(saved, tensors) and not verify(saved.checkpoint)
        asked_by_save.append(len(asked))
    trainer.engine.close(DEADLINE_S)
    assert formats == [FORMAT, *[FORMAT_FROZEN] * 3, FORMAT, FORMAT_FROZEN]
    assert asked_by_save[0] == len(asked) and len(list(tmp_path.glob("step-*/commit.json"))) == 6


def test_changes_of_untrained_parameters_are_saved(trainer: Trainer) -> None:
    tensors = adapted()
    for _ in range(4):
        tensors["b.base"].data.view(-1)[0] += 1
        saved = trainer.save(tensors)
        assert equal(saved, tensors)
        path = Path(saved.checkpoint.where) / "frozen-00000"
        assert path.stat().st_nlink == 1


def test_an_average_does_not_spoil_what_is_frozen_beside_it(trainer: Trainer) -> None:
    """It changes in place at each save, and what is loaded or set once does not count."""
    tensors = adapted()
    average = tensors["e.average"] = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
    inodes = []
    for number in range(8):
        with torch.no_grad():
            average.lerp_(tensors["a.adapter"][0], 0.5)
            if number == 6:
                tensors["b.base"].copy_(tensors["b.base"].clone())
        if number == 7:
            tensors["b.base"].data.copy_(tensors["b.base"].clone())
            trainer.engine.read_back_next()
        saved = trainer.save(tensors)
        assert equal(saved, tensors)
        inodes.append(inode(saved))
    assert len(set(inodes[:4])) == 4, "the average counts as what it is from the third save on"
    assert inodes[4] == inodes[2] == inodes[6] and inodes[5] == inodes[3] == inodes[7]


def test_little_that_is_frozen_is_saved_as_ever(trainer: Trainer) -> None:
    tensors = {"w": nn.Parameter(torch.randn(WIDTH), requires_grad=False)}
    saved = trainer.save(tensors)
    assert manifests(saved)[0].format == saved.checkpoint.commit.format == FORMAT
    assert sorted(path.name for path in Path(saved.checkpoint.where).iterdir()) == [
        "commit.json", "rank-00000.json", "shard-00000",
    ]  # fmt: skip


def test_two_ranks_share_the_frozen_bytes_and_link_their_own(tmp_path: Path) -> None:
    """Replicas: each has half. Then one of them alone has nothing frozen any more."""
    whole = torch.randn(3 * FULL_BYTES // 4)
    adapter = torch.randn(100)

    def one(rank: int, exchange: Exchange) -> list[SavePoint]:
        keeper = KeeperClient.start(f"rank {rank}")
        settings = SaveSettings(root=tmp_path, rank=rank, world=2, job="job")
        engine = SaveEngine(settings, exchange, keeper)
        base = nn.Parameter(whole.clone(), requires_grad=False)
        places = [SavePoint(step, step, "a") for step in range(1, 6)]
        for place in places:
            if place.step == 5 and rank == 1:
                base.requires_grad_()
            tensors = {"base": base, "adapter": nn.Parameter(adapter * place.step)}
            number = engine.save(SaveRequest(place, tensors, shared=b"s", own=b"o"))
            exchange(b"")
            assert engine.wait(number, DEADLINE_S).kind == ("written" if rank else "committed")
            exchange(b"")
        engine.close(DEADLINE_S)
        return places

    first, second = all_ranks(2, one)
    assert first == second and isinstance(first, list)
    for place in first:
        found = open_checkpoint(Folder(tmp_path), place)
        assert not verify(found) and found.commit.format == FORMAT_FROZEN
        assert equal(CheckpointReader(found), {"base": whole, "adapter": adapter * place.step})
    names = [f"frozen-0000{rank}" for rank in range(2)]
    inodes = [
        [(tmp_path / place.directory / name).stat().st_ino for place in first[:4]] for name in names
    ]
    assert all(one[0] == one[2] != one[1] == one[3] for one in inodes)
    assert not (tmp_path / first[4].directory / names[1]).exists()
    assert (tmp_path / first[4].directory / names[0]).stat().st_ino == inodes[0][0]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "root")
    yield desk
    desk.close()


def frozen_manifest(step: int) -> Manifest:
    frozen = 3 * CHUNK_BYTES
    return msgspec.structs.replace(manifest_of(step), format=FORMAT_FROZEN, frozen=frozen)


@pytest.mark.parametrize(
    ("step", "name", "nth"),
    [
        pytest.param("read", "frozen", 2, marks=pytest.mark.long),
        pytest.param("link", "frozen", 1, marks=pytest.mark.long),
        ("write", "shard", 1),
        pytest.param("link", "commit", 1, marks=pytest.mark.long),
    ],
)
def test_a_keeper_that_dies_while_it_links(desk: Desk, step: str, name: str, nth: int) -> None:
    keeper = desk.keeper()
    for number in (1, 2):
        desk.save(keeper, number, manifest=frozen_manifest(number))
    fault = DiskFault("kill", step, name, nth)
    outcome = desk.save(keeper, 3, fault, manifest=frozen_manifest(3))
    assert outcome.kind == "committed" and newest(desk.root) == 3
    names = sorted(path.name for path in directory(desk.root, 3).iterdir())
    assert names == ["commit.json", "frozen-00000", "rank-00000.json", "shard-00000"]
    one, two, three = (
        (directory(desk.root, number) / "frozen-00000").stat().st_ino for number in (1, 2, 3)
    )
    assert one == three != two


def test_after_a_load_what_is_linked_is_read_whole(
    desk: Desk, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that rot with the time unchanged, in the chunk that is read back last."""
    keeper = desk.keeper()
    for step in (1, 2, 3):
        desk.save(keeper, step, manifest=frozen_manifest(step))
    path = directory(desk.root, 2) / "frozen-00000"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(2 * CHUNK_BYTES)
        file.write(os.urandom(16))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    order = order_of(4, desk.root, manifest=frozen_manifest(4))
    keeper.order(msgspec.structs.replace(order, read_back=True))
    assert keeper.wait(4, DEADLINE_S).kind == "committed"
    assert not verify(open_checkpoint(Folder(desk.root), place_of(4)))
    asked: list[bool] = []

    def ordered(order: SaveOrder) -> None:
        asked.append(order.read_back)
        KeeperClient.order(trainer.keeper, order)

    monkeypatch.setattr(trainer.keeper, "order", ordered)
    for loads in (False, False, True, False):
        if loads:
            trainer.engine.read_back_next()
        trainer.save({"w": torch.zeros(10)})
    assert asked == [True, False, True, False]


def test_a_keeper_that_dies_while_it_writes_one(desk: Desk) -> None:
    """What other checkpoints have is never what the next keeper removes."""
    keeper = desk.keeper()
    desk.save(keeper, 1, manifest=frozen_manifest(1))
    for step, fault in (
        (2, DiskFault("kill", "write", "frozen", 2)),
        (3, DiskFault("kill", "rename")),
    ):
        assert desk.save(keeper, step, fault, manifest=frozen_manifest(step)).kind == "committed"
    assert newest(desk.root) == 3
    assert not verify(open_checkpoint(Folder(desk.root), place_of(1)))


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(FULL_BYTES // 2)
        file.write(os.urandom(16))


class Adapted(nn.Module):
    """A base that is not trained, and an adapter that is."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def make(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Adapted()
    # The base is the optimizer's from the start, for the day when it is trained.
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def train(state: dict[str, Any], steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        loss = state["model"](torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


def test_fine_tuning_resumes_to_the_bit_and_writes_the_base_twice(tmp_path: Path) -> None:
    """Over two runs, pruned to two, unfrozen in the middle; and a damaged base is passed over."""
    state = make(0)
    with Checkpointer(tmp_path, keep="last=3") as saves:
        assert saves.load(state) is None
        for step in range(1, 5):
            train(state, 1)
            saves.save(step, state)
        expected = train(state, 2)
    steps = sorted(tmp_path.glob("step-*"))
    inodes = [(path / "frozen-00000").stat().st_ino for path in steps]
    assert len(steps) == 3 and inodes[0] == inodes[2] != inodes[1]
    flip(steps[1] / "frozen-00000")
    resumed = make(1)
    with Checkpointer(tmp_path) as saves:
        assert saves.load(resumed)
        saves.save(5, resumed)
        with pytest.warns(CheckpointWarning, match="do not match their digest; it was not linked"):
            saves.wait()
        saves.save(5, resumed)
        assert train(resumed, 2) == expected
        resumed["model"].base.requires_grad_()
        saves.save(6, resumed)
        after = train(resumed, 2)
        resumed["model"].base.requires_grad_(False)
        saves.save(8, resumed)
    again = make(2)
    again["model"].base.requires_grad_()
    with Checkpointer(tmp_path) as saves:
        restored = saves.load(again, step=6)
        assert restored and train(again, 2) == after
        file = next(tmp_path.glob("step-000000008-*/frozen-00000"))
        flip(file)
        fallen = saves.load(again)
        assert fallen and fallen.step == 6
        assert "frozen-00000" in fallen.notes[0] and "model.base.weight" in fallen.notes[0]
