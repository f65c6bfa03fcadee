"""Reads of keepers' memory from other hosts: the same bytes, or an error that names the keeper."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.replicas.faulty_network import Network
from tests.checkpoint.replicas.paired_keepers import TOKEN, Seat, paired, shard

from outlast.checkpoint.keeper.keeper_launch import address_of
from outlast.checkpoint.replicas import remote_copies
from outlast.checkpoint.replicas.keeper_links import KeeperLink, ReadRequest
from outlast.checkpoint.replicas.memory_copies import MemoryCopies, door_of
from outlast.checkpoint.replicas.remote_copies import RemoteKeeper
from outlast.checkpoint.stores import catalog
from outlast.errors import CorruptionError, StorageError

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers that are dead are soon known to be."""
    monkeypatch.setattr(remote_copies, "REACH_S", 1.0)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Seat, Seat]]:
    """Two keepers that hold each other's step 1, with files of their doors."""
    network = Network("")
    with paired(network) as pair:
        for seat in pair:
            (tmp_path / str(seat.rank)).write_text(address_of(seat.door))
            seat.save(1)
        yield pair
    network.close()


def newest(folder: Path) -> tuple[int | None, list[str]]:
    """Return the newest complete step behind the doors, every byte read, and skipped ones."""
    source = MemoryCopies.reach([door_of(folder, rank) for rank in range(2)], TOKEN, "a test")
    notes: list[str] = []
    found = catalog.newest_checkpoint(source, notes.append, verify=True)
    source.close()
    return (found.place.step if found else None), notes


def test_all_bytes_come_over_the_network(pair: tuple[Seat, Seat], tmp_path: Path) -> None:
    assert newest(tmp_path) == (1, [])
    keeper = RemoteKeeper(door_of(tmp_path, 0), TOKEN)
    (own,) = [each for each in keeper.contents().versions if each.manifest.rank == 0]
    data = bytearray(own.manifest.size_bytes)
    keeper.read(own.arena, 0, memoryview(data))
    assert bytes(data) == shard(pair[0], 1)
    part = bytearray(5000)
    keeper.read(own.arena, 4097, memoryview(part))
    assert bytes(part) == bytes(data[4097:9097])
    keeper.close()


def test_the_parts_of_a_lost_host_come_from_its_peer(
    pair: tuple[Seat, Seat], tmp_path: Path
) -> None:
    pair[0].kill()
    assert newest(tmp_path) == (1, [])
    (tmp_path / "0").unlink()
    assert newest(tmp_path) == (1, [])
    pair[1].kill()
    assert newest(tmp_path) == (None, [])


def test_readers_beside_a_trainer_and_each_other(pair: tuple[Seat, Seat], tmp_path: Path) -> None:
    found: list[tuple[int | None, list[str]]] = []
    threads = [threading.Thread(target=lambda: found.append(newest(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [(1, [])] * 8


def test_a_keeper_that_ends_is_named(pair: tuple[Seat, Seat], tmp_path: Path) -> None:
    keeper = RemoteKeeper(door_of(tmp_path, 1), TOKEN)
    arena = keeper.contents().arenas[0][0]
    pair[1].kill()
    with pytest.raises(CorruptionError, match="cannot be read"):
        keeper.read(arena, 0, memoryview(bytearray(10)))
    with pytest.raises(StorageError, match=str(tmp_path / "1")):
        keeper.contents()


@pytest.mark.parametrize("text", ["", "garbage", "127.0.0.1:port"])
def test_a_door_that_is_no_address_is_no_keeper(
    pair: tuple[Seat, Seat], tmp_path: Path, text: str
) -> None:
    (tmp_path / "0").write_text(text)
    assert newest(tmp_path) == (1, [])


def test_a_reader_without_the_token_reads_nothing(pair: tuple[Seat, Seat], tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        RemoteKeeper(door_of(tmp_path, 0), "another token").contents()


@pytest.mark.parametrize(("arena", "at", "size_bytes"), [(99, 0, 1), (0, -1, 2), (0, 0, 1 << 40)])
def test_a_read_beyond_memory_ends_the_connection(
    pair: tuple[Seat, Seat], arena: int, at: int, size_bytes: int
) -> None:
    link = KeeperLink.open(address_of(pair[0].door), TOKEN, time.monotonic() + 10)
    link.send(ReadRequest(arena=arena, at=at, size_bytes=size_bytes))
    with pytest.raises(ConnectionResetError):
        link.receive_into(memoryview(bytearray(1)))
    link.close()
    pair[0].save(2)  # the keeper goes on
