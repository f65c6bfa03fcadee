"""Parity in keepers' memory: one lost part of a group is computed and verified."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.keeper_orders import (
    CHUNK_BYTES,
    SIZE_BYTES,
    TIMEOUT_S,
    manifest_of,
    order_of,
    place_of,
    until,
)
from tests.checkpoint.replicas.faulty_network import Network
from tests.checkpoint.replicas.paired_keepers import (
    LARGE_BYTES,
    TOKEN,
    Memory,
    Seat,
    grouped,
    newest_of,
    shard,
)

from outlast.checkpoint.format.manifests import Manifest, SavePoint
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_frames import Outcome, PeerKeeper, VersionParity
from outlast.checkpoint.keeper.keeper_launch import address_of
from outlast.checkpoint.replicas import group_parity, memory_copies
from outlast.checkpoint.replicas.group_parity import (
    HeldParities,
    HeldParity,
    HeldPart,
    StripFolding,
    cut_strip,
    other_members,
    rebuild_part,
    strip_bytes,
)
from outlast.checkpoint.replicas.keeper_links import Offer
from outlast.checkpoint.replicas.memory_copies import MemoryCopies
from outlast.checkpoint.replicas.replica_sender import ReplicaSender, SentVersion
from outlast.errors import StorageError, WireError

pytestmark = pytest.mark.process


blocks = st.integers(0, 9).map(lambda count: count * 4096)


@given(st.lists(blocks, min_size=2, max_size=6), st.data())
def test_any_one_part_is_computed_from_the_others(sizes: list[int], data: st.DataObject) -> None:
    """Of parts of any lengths; from any byte to any other."""
    ranks = st.lists(st.integers(0, 99), min_size=len(sizes), max_size=len(sizes), unique=True)
    group = tuple(sorted(data.draw(ranks)))
    whole = {rank: os.urandom(size) for rank, size in zip(group, sizes, strict=True)}
    parts = {
        rank: HeldPart(manifest_of(1, rank, size_bytes=len(each)), Memory(each))
        for rank, each in whole.items()
    }
    longest = max(strip_bytes(size, len(group)) for size in sizes)
    parities = []
    for holder in group:
        made = bytearray(longest)
        left = other_members(group, holder)
        for rank in left:
            begin, end = cut_strip(group, rank, holder, len(whole[rank]))
            group_parity.xor_into(memoryview(made), memoryview(whole[rank])[begin:end])
        manifests = [parts[rank].manifest for rank in left]
        found = VersionParity(rank=holder, group=group, manifests=manifests, arena=-1)
        parities.append(HeldParity(found, Memory(bytes(made))))
    lost = data.draw(st.sampled_from(group))
    del parts[lost]
    rebuilt = rebuild_part(parts, [each for each in parities if each.parity.rank != lost])
    assert rebuilt.keys() == {lost}
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(whole[lost]))] * 2)))
    into = bytearray(end - begin)
    rebuilt[lost].memory.read(begin, memoryview(into))
    assert into == whole[lost][begin:end]
    assert rebuilt[lost].manifest.rank == lost


@given(st.integers(0, 1 << 40), st.integers(2, 16))
def test_strips_are_a_part_and_no_more(size_bytes: int, members: int) -> None:
    group = tuple(range(members))
    strips = [cut_strip(group, 0, holder, size_bytes) for holder in other_members(group, 0)]
    lengths = [strip.end - strip.begin for strip in strips]
    assert [strip.begin for strip in strips[1:]] == list(accumulate(lengths))[:-1]
    assert sum(lengths) == size_bytes and max(lengths) <= strip_bytes(size_bytes, members)
    assert strip_bytes(size_bytes, members) < size_bytes / (members - 1) + 2 * 4096


# --- keepers ----------------------------------------------------------------------------------


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network("")
    yield network
    network.close()


@pytest.fixture
def three(network: Network) -> Iterator[list[Seat]]:
    with grouped(3, network) as seats:
        yield seats


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers that are dead are soon known to be."""
    monkeypatch.setattr(memory_copies, "REACH_S", 1.0)


def save(seats: list[Seat], step: int) -> None:
    for seat in seats:
        seat.order(step)
    for seat in seats:
        told = seat.copied(step)
        assert (told.copies, told.strips, told.error) == (2, 2, "")


def parities_of(seat: Seat) -> set[int]:
    """The steps of which a keeper that still has its trainer has parity."""
    return {each.manifests[0].place.step for each in seat.keeper.contents().parities}


def damage(seat: Seat, step: int) -> None:
    """One bit in a keeper's parity of a step."""
    keeper = KeeperClient.connect(seat.address, TOKEN)
    (found,) = (
        each for each in keeper.contents().parities if each.manifests[0].place == place_of(step)
    )
    memory = keeper.take(found.arena)
    byte = bytearray(1)
    memory.read(5000, memoryview(byte))
    os.pwrite(memory.fd, bytes([byte[0] ^ 8]), 5000)
    memory.close()
    keeper.close(TIMEOUT_S)


def test_a_keeper_and_its_worker_are_lost(three: list[Seat]) -> None:
    """Whichever it is, its part is there byte for byte, of both versions; with two, none is."""
    three[1].lend(LARGE_BYTES)
    save(three, 1)
    expected = {1: [shard(seat, 1) for seat in three]}
    three[2].lend(SIZE_BYTES // 2 // 4096 * 4096)
    save(three, 2)
    expected[2] = [shard(seat, 2) for seat in three]
    assert parities_of(three[0]) == {1, 2}
    lying = three[0].keeper.contents()
    sizes = dict(lying.arenas)
    assert all(sizes[each.arena] == LARGE_BYTES // 2 for each in lying.parities)
    for seat in three:
        seat.leave()
    three[1].kill()
    assert newest_of(*three) == (2, [])
    source = MemoryCopies.reach([seat.address for seat in three], TOKEN, "a test")
    for step, shards in expected.items():
        for rank, each in enumerate(shards):
            assert source.get(place_of(step).directory, f"shard-0000{rank}") == each
    source.close()
    three[2].kill()
    assert newest_of(*three) == (None, [])


def test_a_keeper_that_took_over_sends_again(three: list[Seat]) -> None:
    """What is in already is not taken for something else."""
    save(three, 1)
    told: list[Outcome] = []
    peers = tuple(PeerKeeper(name="a peer", address=address_of(seat.door)) for seat in three[1:])
    sender = ReplicaSender(peers, TOKEN, 0, (0, 1, 2))
    order = msgspec.structs.replace(order_of(1, Path(), world=3), to_disk=False)
    arena = three[0].arena(1)
    sender.add(SentVersion(order, arena, arena.stamp, told.append, lambda _: None))
    until(lambda: told, "the second sending")
    assert (told[0].copies, told[0].strips, told[0].error) == (2, 2, "")
    for seat in three:
        seat.leave()
    three[0].kill()
    assert newest_of(*three) == (1, [])
    sender.stop()


def test_a_bit_flips(three: list[Seat]) -> None:
    """In parity: the version before, as long as the part is lost. In a part: computed."""
    for step in (1, 2):
        save(three, step)
    three[1].arena(2).view[70_000] ^= 1
    for seat in three:
        seat.leave()
    assert newest_of(*three) == (2, [])
    damage(three[0], 2)
    three[2].kill()
    step, notes = newest_of(*three)
    assert step == 1 and len(notes) == 1
    assert "shard-00001: chunk 1" in notes[0] or "shard-00002: chunk 0" in notes[0]


def test_a_strip_that_breaks_off_spoils_that_version_alone(
    three: list[Seat], network: Network
) -> None:
    save(three, 1)
    network.flip = 100_000
    for seat in three:
        seat.order(2)
    told = three[0].copied(2)
    assert (told.copies, told.strips) == (1, 2)
    assert (
        "its peer at 127.0.0.1" in told.error and "chunk 2 of the strip from byte 0" in told.error
    )
    assert three[2].copied(2).copies >= 1 and three[1].copied(2).error == ""
    network.flip = -1
    for seat in three:
        seat.leave()
    three[2].kill()
    assert newest_of(*three) == (1, [])


def test_the_sender_dies_in_the_middle(three: list[Seat], network: Network) -> None:
    """Parity of that version stays void; the next ones are whole."""
    save(three, 1)
    for seat in three:
        seat.lend(LARGE_BYTES)
    network.pause_after(LARGE_BYTES // 4, three[0].served.process.kill)
    for seat in three:
        seat.order(2)
    assert network.paused.wait(TIMEOUT_S)
    network.go.set()
    three[0].kill()
    for seat in three[1:]:
        seat.copied(2)
    assert parities_of(three[1]) == {1}
    three[0].again()
    for step in (3, 4):
        save(three, step)
    for seat in three:
        seat.leave()
    three[1].kill()
    assert newest_of(*three) == (4, [])


# --- what comes when --------------------------------------------------------------------------


def offer(rank: int, place: SavePoint, size_bytes: int = SIZE_BYTES) -> Offer:
    return Offer(
        copy=f"{rank} {place}",
        lanes=1,
        rank=rank,
        size_bytes=size_bytes,
        chunk_bytes=CHUNK_BYTES,
        arena_bytes=size_bytes,
        place=place,
    )


def places(*steps: int, attempt: str = "a") -> list[SavePoint]:
    return [SavePoint(step, step, attempt) for step in steps]


def send(parities: HeldParities, rank: int, place: SavePoint, data: bytes = b"") -> None:
    folding = parities.begin(offer(rank, place, max(4096, len(data))))
    assert folding
    fold(folding, data)
    folding.keep(manifest(rank, place))


def manifest(rank: int, place: SavePoint) -> Manifest:
    return msgspec.structs.replace(manifest_of(1, rank, 4), place=place)


def fold(folding: StripFolding, data: bytes) -> None:
    at = 0
    for piece in folding.pieces(0, len(data)):
        piece[:] = data[at : at + len(piece)]
        at += len(piece)


def whole(parities: HeldParities) -> list[int]:
    return [found.manifests[0].place.step for found, _ in parities.complete]


def test_longer_strips_come_later() -> None:
    parities = HeldParities(3, (0, 1, 2, 3))
    one, two, three = places(1, 2, 3)
    data = [os.urandom(size) for size in (4096, 5 << 20, 3 << 20)]
    for place in (one, two, three):  # the third in memory of the first
        for rank, each in enumerate(data):
            send(parities, rank, place, each)
    assert whole(parities) == [2, 3]
    expected = bytearray(5 << 20)
    for each in data:
        group_parity.xor_into(memoryview(expected), memoryview(each))
    for _, arena in parities.complete:
        assert arena.size_bytes == 6 << 20
        assert bytes(arena.view) == bytes(expected).ljust(6 << 20, b"\0")
        arena.close()


def test_a_retransmitted_strip_is_not_folded_twice() -> None:
    parities = HeldParities(0, (0, 1, 2))
    (one,) = places(1)
    send(parities, 1, one)
    assert parities.begin(offer(1, one)) is None
    folding = parities.begin(offer(2, one))
    assert folding
    folding.abandon("its sender died")
    with pytest.raises(WireError, match="an earlier transfer of a strip"):
        parities.begin(offer(2, one))
    with pytest.raises(WireError, match=r"rank 2 broke off .its sender died"):
        folding.keep(manifest(2, one))
    with pytest.raises(WireError, match="is not of its group"):
        parities.begin(offer(3, one))
    assert whole(parities) == []


def test_versions_take_turns() -> None:
    """Who is behind is refused, who is ahead ends what can never be whole, or waits for it."""
    parities = HeldParities(0, (0, 1, 2))
    one, two, three, four = places(1, 2, 3, 4)
    (again,) = places(1, attempt="b")
    send(parities, 1, one)
    send(parities, 2, one)
    send(parities, 1, three)
    with pytest.raises(WireError, match="of step 3, which is newer"):
        parities.begin(offer(2, two))
    behind = parities.begin(offer(2, three))
    assert behind
    ahead: list[StripFolding | None] = []
    waiting = threading.Thread(target=lambda: ahead.append(parities.begin(offer(1, four))))
    waiting.start()
    behind.keep(manifest(2, three))
    waiting.join(TIMEOUT_S)
    (late,) = ahead
    assert late and whole(parities) == [3]
    send(parities, 2, again)  # after a rollback: rank 1 never sends the end of step 4
    with pytest.raises(WireError, match="step 4 is void: rank 2 continued with step 1"):
        late.keep(manifest(1, four))
    send(parities, 1, again)
    assert whole(parities) == [3, 1]


def test_a_waiting_sender_continues_once_the_older_version_is_void() -> None:
    """As soon as one of them has shown that the version before never comes."""
    parities = HeldParities(0, (0, 1, 2, 3))
    one, two = places(1, 2)
    send(parities, 1, one)
    begun: list[StripFolding | None] = []
    waiting = threading.Thread(target=lambda: begun.append(parities.begin(offer(1, two))))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    assert parities.begin(offer(2, two))
    waiting.join(group_parity.TURN_S / 4)
    assert begun and begun[0]


def test_waiting_for_another_version_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_parity, "TURN_S", 0.05)
    parities = HeldParities(0, (0, 1, 2, 3))
    one, two = places(1, 2)
    send(parities, 1, one)
    slow = parities.begin(offer(2, one))
    with pytest.raises(WireError, match="still makes parity of step 1"):
        parities.begin(offer(1, two))
    assert slow
    slow.keep(manifest(2, one))
    begun = time.monotonic()
    send(parities, 1, two)
    assert time.monotonic() - begun < TIMEOUT_S / 2
    with pytest.raises(WireError, match="newer"):
        parities.begin(offer(3, one))


def test_missing_memory_is_reported_with_the_computation() -> None:
    parities = HeldParities(0, (0, 1, 2, 3))
    (one,) = places(1)
    said = (
        r"not enough memory for parity of the parts of ranks 1, 2, 3, 2 strips of 36029 TB:"
        r" each 1/3 of the memory of a part of 108086 TB: 72058 TB are needed; the memory .* free"
    )
    with pytest.raises(StorageError, match=said):
        parities.begin(offer(1, one, 1 << 55))
    with pytest.raises(WireError, match=r"void: the strip of rank 1 broke off .not enough memory"):
        parities.begin(offer(2, one))
