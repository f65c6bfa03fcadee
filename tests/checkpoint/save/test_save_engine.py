"""Saves in one process and between ranks: copies, failures and refusals."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from tests.checkpoint.rank_threads import Exchange, all_ranks
from tests.checkpoint.save.engine_trainer import DEADLINE_S, Trainer, steps, trainer

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_frames import KeeperSetup, Outcome
from outlast.checkpoint.keeper.keeper_launch import ServedKeeper
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.save.arena_slots import only_device
from outlast.checkpoint.save.save_engine import SaveEngine
from outlast.checkpoint.save.save_request import SaveRequest
from outlast.checkpoint.stores.catalog import open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import CodecError, OutlastError, StorageError, UsageError

__all__ = ["trainer"]
pytestmark = pytest.mark.process


def test_changes_after_a_save_are_not_in_it(trainer: Trainer) -> None:
    """Three in a row, over two arenas, which the third one has to wait for."""
    weight = torch.zeros(1 << 20)
    places = []
    for value in (1.0, 2.0, 3.0):
        weight.fill_(value)
        places.append((value, *trainer.order({"w": weight})))
        weight.fill_(-1.0)
    for value, number, place in places:
        assert trainer.engine.wait(number, DEADLINE_S).kind == "committed"
        found = torch.zeros_like(weight)
        SaveEngine.read(trainer.read(place), {"w": found})
        assert (found == value).all()
    kinds = [outcome.kind for outcome in trainer.engine.outcomes()]
    assert kinds.count("committed") == 3 and trainer.engine.outcomes() == []


def test_the_last_two_versions_stay_in_memory(trainer: Trainer) -> None:
    saved = [trainer.save({"a": torch.arange(10)}).checkpoint.place for _ in range(3)]
    held = [each.manifest.place for each in trainer.keeper.held_versions()]
    assert sorted(held, key=lambda place: place.position) == saved[1:]


def test_a_trainer_after_another_takes_no_more_memory(tmp_path: Path) -> None:
    """It has one arena until the version that it began from is behind a whole one of its own."""
    address = f"@outlast-test-{os.getpid()}-engine"
    served = ServedKeeper(address, "the test", KeeperSetup(token="token"))
    saved: list[SavePoint] = []
    for _ in range(3):
        trainer = Trainer(tmp_path, keeper=KeeperClient.connect(address, "token"))
        trainer.keeper.forget(lambda place: place in saved[-1:])
        for _ in range(2):
            saved.append(trainer.save({"a": torch.arange(10)}).checkpoint.place)
            lying = trainer.keeper.contents()
            held = [each.manifest.place for each in lying.versions]
            assert sorted(held, key=lambda place: place.position) == saved[-2:]
            assert len(lying.arenas) <= 2
            trainer.engine.complete()
        trainer.engine.close(DEADLINE_S)
    served.close(DEADLINE_S)


def test_tensors_may_be_made_anew_and_may_change(trainer: Trainer) -> None:
    """The same table is the same plan; another one is planned again, in the same arenas, of which
    nothing that lay there before is left."""
    first = trainer.save({"a": torch.ones(5000), "b": torch.full((3,), 2.0)}, shared=b"x" * 9000)
    again = trainer.save({"b": torch.full((3,), 3.0), "a": torch.ones(5000)})
    third = [trainer.save({"c": torch.ones(1, dtype=torch.int8)}, shared=b"") for _ in range(2)]
    plans = [reader.checkpoint.commit.plan for reader in (first, again, *third)]
    assert plans[0] == plans[1] != plans[2] == plans[3]
    for reader in third:
        shard = trainer.shard(reader)
        assert shard.strip(b"\0") == b"\x01" + bytes(4095) + b"o"
        assert len(shard) % 4096 == 0


def test_blobs_outgrow_their_arena(trainer: Trainer) -> None:
    tensors = {"a": torch.arange(10)}
    for size in (10, 5 << 20, 100):
        shared = os.urandom(size)
        assert trainer.save(tensors, shared).blob(0, "shared") == shared


def test_the_first_save_may_be_prepared(trainer: Trainer) -> None:
    tensors = {"a": torch.arange(10)}
    trainer.engine.prepare(tensors, blobs_bytes=100)
    arenas = [slot.arena for slot in trainer.engine._slots]
    trainer.save(tensors)
    assert {slot.arena for slot in trainer.engine._slots} == set(arenas) and len(arenas) == 2


@pytest.mark.parametrize("replicas", [[0], range(8)], ids=["right", "too small"])
def test_arenas_are_made_ahead(trainer: Trainer, replicas: Sequence[int]) -> None:
    """They are used where their size is right, and given back where it is not."""
    tensors = {"a": torch.arange(1 << 20), "b": torch.ones(3)}
    trainer.engine.reserve(tensors, 1000, replicas)
    trainer.engine._slots.join()
    ahead = {slot.arena for slot in trainer.engine._slots.ahead}
    trainer.save(tensors)
    used = {slot.arena for slot in trainer.engine._slots}
    assert len(ahead) == len(used) == 2
    assert used == ahead if len(replicas) == 1 else not used & ahead
    assert all((arena.fd < 0) == (arena not in used) for arena in ahead)


def test_arenas_are_not_allocated_after_a_stop(trainer: Trainer) -> None:
    trainer.engine.reserve({"a": torch.ones(1 << 28)}, 1000, [0])
    trainer.engine._slots.stop()
    assert len(list(trainer.engine._slots.ahead)) < 2 and not list(trainer.engine._slots)


def test_a_save_skipped_for_busy_arenas_is_reported(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, when_busy="skip", arenas=1)
    tensors = {"a": torch.arange(10)}
    trainer.save(tensors)
    trainer.signal(signal.SIGSTOP)
    first, _ = trainer.order(tensors)
    skipped, place = trainer.order(tensors)
    assert trainer.engine.wait(skipped, DEADLINE_S).kind == "skipped"
    assert ended(trainer, skipped).error.startswith(f"step {place.step} of rank 0: all 1 arenas")
    trainer.signal(signal.SIGCONT)
    assert trainer.engine.wait(first, DEADLINE_S).kind == "committed"
    trainer.save(tensors)
    trainer.engine.close(DEADLINE_S)
    assert not (tmp_path / place.directory).exists()


def test_waiting_for_an_arena_has_a_deadline(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, arenas=1, save_s=0.3)
    trainer.signal(signal.SIGSTOP)
    trainer.order({"a": torch.arange(10)})
    late, _ = trainer.order({"a": torch.arange(10)})
    assert "are being written after 0.3 s" in ended(trainer, late).error
    trainer.signal(signal.SIGCONT)
    trainer.engine.close(DEADLINE_S)


def ended(trainer: Trainer, save: int) -> Outcome:
    (outcome,) = [each for each in trainer.engine.outcomes() if each.save == save]
    assert outcome == trainer.engine.wait(save, DEADLINE_S)
    return outcome


def test_a_failed_save_is_reported_and_the_next_one_succeeds(trainer: Trainer) -> None:
    tensors = {"a": torch.arange(10)}
    trainer.root.joinpath(SavePoint(next(steps) + 1, 0, "a").directory).touch()
    number, _ = trainer.order(tensors)
    assert trainer.engine.wait(number, DEADLINE_S).kind == "failed"
    assert [outcome.kind for outcome in trainer.engine.outcomes()] == ["failed"]
    trainer.save(tensors)


def test_arenas_without_room_are_refused_with_the_arithmetic(trainer: Trainer) -> None:
    huge = torch.zeros(1).expand(1 << 44)
    with pytest.raises(StorageError, match=r"2 arenas of 70\.4 TB.*nothing was allocated"):
        trainer.order({"huge": huge})


def test_closing_gives_memory_and_descriptors_back(tmp_path: Path) -> None:
    def kept() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        return len([*Path("/proc/self/fd").iterdir()]), maps.count("outlast-arena")

    before = kept()
    trainer = Trainer(tmp_path)
    trainer.save({"a": torch.arange(10)})
    assert kept() > before
    trainer.engine.close(DEADLINE_S)
    assert kept() == before


def ranks_that_save(
    root: Path, tensors: Mapping[int, Mapping[str, torch.Tensor]]
) -> list[str | OutlastError]:
    """What became of one save on ranks with these tensors."""
    place, world = SavePoint(next(steps), 0, "a"), len(tensors)

    def one(rank: int, exchange: Exchange) -> str:
        trainer = Trainer(root, exchange=exchange, rank=rank, world=world)
        try:
            request = SaveRequest(place, tensors[rank], shared=b"all", own=b"%d" % rank)
            number = trainer.engine.save(request)
            return trainer.engine.wait(number, DEADLINE_S).kind
        finally:
            trainer.engine.close(DEADLINE_S)

    return all_ranks(world, one)


def test_replicas_write_halves_of_one_checkpoint(tmp_path: Path) -> None:
    weight = torch.randn(500, 333)
    ranks = {rank: {"w": weight.clone(), "step": torch.tensor(7)} for rank in range(2)}
    assert ranks_that_save(tmp_path, ranks) == ["committed", "written"]
    (directory,) = (path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink())
    place = SavePoint.parse(directory.name)
    assert place
    reader = CheckpointReader(open_checkpoint(Folder(tmp_path), place))
    found = {"w": torch.zeros_like(weight), "step": torch.tensor(0)}
    SaveEngine.read(reader, found)
    assert torch.equal(found["w"], weight) and found["step"] == 7
    assert [reader.blob(rank, "own") for rank in range(2)] == [b"0", b"1"]
    sizes = [manifest.size_bytes for manifest in reader.checkpoint.manifests]
    assert abs(sizes[0] - sizes[1]) <= 3 * 4096


def test_a_state_that_one_rank_cannot_save_fails_on_all_ranks(tmp_path: Path) -> None:
    ranks = {0: {"w": torch.ones(3)}, 1: {"w": torch.ones(3, device="meta")}}
    first, second = ranks_that_save(tmp_path, ranks)
    assert isinstance(first, UsageError) and isinstance(second, CodecError)
    assert str(first).startswith("rank 1: w is on the meta device")
    assert [*tmp_path.iterdir()] == []


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """So few may be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    here = Path("/proc/self/fd")
    free = (n for n in itertools.count() if not (here / str(n)).is_symlink())
    limit = next(itertools.islice(free, count, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_arena_that_could_not_be_made_is_made_at_the_next_save(trainer: Trainer) -> None:
    tensors = {"w": torch.ones(3)}
    with descriptors_left(3), pytest.raises(StorageError, match="Too many open files"):
        trainer.engine.prepare(tensors)
    trainer.signal(signal.SIGSTOP)
    for number, _ in [trainer.order(tensors), trainer.order(tensors)]:
        with pytest.raises(StorageError, match="has not ended"):
            trainer.engine.wait(number, 0.0)
    trainer.signal(signal.SIGCONT)
    assert trainer.engine.wait(number, DEADLINE_S).kind == "committed"


def test_a_rank_has_one_device() -> None:
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert only_device([torch.device("cpu"), first]) == first
    assert only_device([torch.device("cpu"), torch.device("meta")]) is None
    with pytest.raises(UsageError, match=r"on 2 CUDA devices \(cuda:0, cuda:1\)"):
        only_device({second, first})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_a_device_is_copied_beside_what_it_computes(trainer: Trainer) -> None:
    weight = torch.ones(1 << 24, device="cuda")
    place = SavePoint(next(steps), 0, "a")
    number = trainer.engine.save(SaveRequest(place, {"w": weight}, overlap=True))
    trainer.engine.fence()
    weight.zero_()
    assert trainer.engine.wait(number, DEADLINE_S).kind == "committed"
    SaveEngine.read(trainer.read(place), {"w": weight})
    assert (weight == 1).all()
