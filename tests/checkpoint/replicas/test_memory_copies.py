"""Copies in other keepers' memory: verified, and available after losses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.checkpoint.keeper_orders import (
    SIZE_BYTES,
    TIMEOUT_S,
    filled,
    newest,
    order_of,
    place_of,
    until,
)
from tests.checkpoint.replicas.faulty_network import Network
from tests.checkpoint.replicas.paired_keepers import (
    LARGE_BYTES,
    TOKEN,
    Seat,
    held,
    held_after,
    newest_of,
    paired,
    shard,
)

from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_launch import address_of, open_door
from outlast.checkpoint.replicas import memory_copies
from outlast.checkpoint.replicas.memory_copies import MemoryCopies
from outlast.errors import CorruptionError

pytestmark = pytest.mark.process


@pytest.fixture
def network() -> Iterator[Network]:
    """Between the keepers of `pair`."""
    network = Network("")
    yield network
    network.close()


@pytest.fixture
def pair(network: Network) -> Iterator[tuple[Seat, Seat]]:
    with paired(network) as pair:
        yield pair


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers that are dead are soon known to be."""
    monkeypatch.setattr(memory_copies, "REACH_S", 1.0)


def test_a_peer_holds_the_last_two_versions(pair: tuple[Seat, Seat], network: Network) -> None:
    first, second = pair
    for step in (1, 2, 3):
        told = first.save(step)
        assert (told.copies, told.error, told.place) == (1, "", place_of(step))
        assert (told.size_bytes, first.keeper.copying) == (SIZE_BYTES, False)
    second.leave()
    assert held(second) == {(0, 2): shard(first, 2), (0, 3): shard(first, 3)}
    assert TOKEN.encode() not in network.seen and shard(first, 3)[:4096] in network.seen


def test_all_but_one_keeper_die(pair: tuple[Seat, Seat], tmp_path: Path) -> None:
    """Trainers and a keeper are gone: the version is whole all the same; without both it is not,
    and the disk is what is left."""
    first, second = pair
    for seat in (second, first):
        seat.order(1, tmp_path / "root")
    assert first.copied(1).copies == second.copied(1).copies == 1
    until(lambda: newest(tmp_path / "root") == 1, "the commit")
    for seat in pair:
        assert seat.save(2).copies == 1
        seat.leave()
    first.kill()
    assert newest_of(*pair) == (2, [])
    second.kill()
    assert newest_of(*pair) == (None, [])


def test_an_older_version_where_a_copy_never_came(
    pair: tuple[Seat, Seat], network: Network
) -> None:
    first, second = pair
    assert first.save(1).copies == second.save(1).copies == 1
    network.close()
    told = first.save(2)
    assert told.copies == 0 and "its peer at 127.0.0.1" in told.error
    assert second.save(2).copies == 1
    for seat in pair:
        seat.leave()
    first.kill()
    assert newest_of(first, second) == (1, [])


BULK = 192 << 10  # what the first of two lanes carries


def test_bits_flip_on_the_way(pair: tuple[Seat, Seat], network: Network) -> None:
    """In the proof, the offer, a chunk, the manifest: the version before stays."""
    first, second = pair
    assert first.save(1).copies == 1
    for step, flip in enumerate((20, 90, 260, 100_000, BULK + 700), start=1):
        network.flip = flip
        told = first.save(2 * step)
        assert told.copies == 0 and told.error.startswith("its peer at 127.0.0.1")
        if flip == 100_000:
            assert "chunk 2 of shard-00000 arrived with other bytes than were sent" in told.error
        steps = {at for _, at in held_after(second)}
        assert 2 * step - 1 in steps and 2 * step not in steps
        network.flip = -1
        assert first.save(2 * step + 1).copies == 1
    second.leave()
    assert held(second)[0, 11] == shard(first, 11)


def test_the_peer_dies_in_the_middle(pair: tuple[Seat, Seat], network: Network) -> None:
    first, second = pair
    assert first.save(1).copies == 1
    network.pause_after(SIZE_BYTES // 2, second.served.process.kill)
    first.order(2)
    assert network.paused.wait(TIMEOUT_S)
    until(lambda: not first.keeper.busy(0), "the keeper holds its own version")
    assert first.keeper.copying
    network.go.set()
    told = first.copied(2)
    assert told.copies == 0 and told.error and not first.keeper.copying
    second.kill()
    second.again()
    assert first.save(3).copies == 1
    assert held_after(first) == {(0, 2), (0, 3)}


def test_the_sender_dies_in_the_middle(pair: tuple[Seat, Seat], network: Network) -> None:
    first, second = pair
    assert first.save(1).copies == 1
    first.lend(LARGE_BYTES)
    network.pause_after(LARGE_BYTES // 2, first.served.process.kill)
    first.order(2)
    assert network.paused.wait(TIMEOUT_S)
    network.go.set()
    first.kill()
    assert held_after(second) == {(0, 1)}
    first.again()
    assert first.save(3).copies == 1
    second.leave()
    assert held(second) == {(0, 1): first.arenas[1].view[:SIZE_BYTES], (0, 3): shard(first, 3)}


def test_a_damaged_part_is_read_from_its_copy(pair: tuple[Seat, Seat]) -> None:
    first, second = pair
    for seat in pair:
        assert seat.save(1).copies == 1
    first.arena(1).view[5000] ^= 1
    for seat in pair:
        seat.leave()
    assert newest_of(first, second) == (1, [])
    found, notes = newest_of(first)
    assert found is None and "chunk 0" in notes[0]


def test_a_copy_over_it_ends_the_sending(network: Network, pair: tuple[Seat, Seat]) -> None:
    """The trainer does not wait for peers, and they never get half of each."""
    first, second = pair
    assert first.save(1).copies == 1
    first.lend(LARGE_BYTES)
    network.pause_after(LARGE_BYTES // 2)
    first.order(2)
    assert network.paused.wait(TIMEOUT_S)
    first.keeper.reuse(first.numbers[0])
    first.arena(2).view[:] = bytes(first.arena(2).size_bytes)
    network.go.set()
    told = first.copied(2)
    assert (told.copies, told.error) == (0, "")
    assert held_after(second) == {(0, 1)}


def test_memory_of_earlier_trainers_is_given_back(pair: tuple[Seat, Seat]) -> None:
    seat = pair[1]
    assert seat.save(1).copies == 1 and seat.save(2).copies == 1
    seat.leave()
    for turn in range(3):
        keeper = KeeperClient.connect(seat.address, TOKEN)
        assert {each.manifest.place.step for each in keeper.held_versions()} == {
            10 * turn + 1,
            10 * turn + 2,
        }
        arenas = [filled(), filled()]
        for step, arena in enumerate(arenas, start=1):
            step += 10 * (turn + 1)
            order = order_of(step, Path(), arena=keeper.lend(arena), rank=1, world=2)
            keeper.order(msgspec.structs.replace(order, to_disk=False))
        assert len(keeper.held_versions()) == 4 and len(keeper.older) == 2
        newest = max(
            (each.place for each in keeper.older if each.place), key=lambda place: place.step
        )
        keeper.forget(lambda place, newest=newest: place == newest)
        assert len(keeper.held_versions()) == 3 and [each.place for each in keeper.older] == [
            newest
        ]
        keeper.forget(lambda _: False)
        assert len(keeper.held_versions()) == 2 and keeper.older == ()
        keeper.close(TIMEOUT_S)
        for arena in arenas:
            arena.close()


def test_all_peers_together_keep_to_a_rate() -> None:
    doors = [open_door() for _ in range(3)]
    to = tuple(address_of(door) for door in doors[1:])
    seats = [
        Seat(0, 3, doors[0], to, bytes_per_s=20_000_000),
        *(Seat(rank, 3, doors[rank], ()) for rank in (1, 2)),
    ]
    try:
        seats[0].lend(10 << 20)
        told = seats[0].save(1)
        assert told.copies == 2 and told.seconds > 0.7  # 21 MB, less what haste is allowed
    finally:
        for seat, door in zip(seats, doors, strict=True):
            seat.close()
            door.close()


def test_nothing_is_whole_without_every_part() -> None:
    nothing = MemoryCopies([])
    assert nothing.directories() == []
    with pytest.raises(CorruptionError, match="is missing"):
        nothing.get("step", "commit.json")
