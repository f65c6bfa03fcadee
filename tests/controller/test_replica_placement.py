"""Replica placement: distinct failure domains and equal loads."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.controller.replica_placement import ReplicaPlacement, ReplicaSpot, group, place
from outlast.errors import ConfigError

labels = st.integers(0, 3).map(str)
spots = st.lists(st.builds(ReplicaSpot, host=st.integers(0, 6).map(str), rack=labels), min_size=1)


def loads(placed: ReplicaPlacement) -> Counter[int]:
    return Counter(peer for peers in placed.peers for peer in peers)


@given(spots, st.data())
def test_every_part_is_spread_as_far_as_domains_go(
    found: list[ReplicaSpot], data: st.DataObject
) -> None:
    copies = data.draw(st.integers(1, min(6, len(found))))
    placed = place(found, copies)
    assert place(found, copies) == placed
    racks, hosts = {spot.rack for spot in found}, set(found)
    for rank, peers in enumerate(placed.peers):
        holders = {rank, *peers}
        assert len(peers) == copies - 1 and len(holders) == copies
        where = {found[holder] for holder in holders}
        assert len({spot.rack for spot in where}) == min(copies, len(racks))
        assert len(where) == min(copies, len(hosts))


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.data())
def test_equal_domains_carry_equal_loads(
    racks: int, hosts: int, ranks: int, data: st.DataObject
) -> None:
    found = [
        ReplicaSpot(f"host {rack}.{host}", f"rack {rack}")
        for rack in range(racks)
        for host in range(hosts)
        for _ in range(ranks)
    ]
    copies = data.draw(st.sampled_from([n for n in range(1, 7) if n == 1 or racks % n == 0]))
    found = data.draw(st.permutations(found))
    placed = place(found, copies)
    assert all(loads(placed)[rank] == copies - 1 for rank in range(len(found)))


def test_domains_come_before_balance() -> None:
    found = [ReplicaSpot("large")] * 6 + [ReplicaSpot("small")] * 2
    placed = place(found, 2)
    assert all(peer in (6, 7) for peers in placed.peers[:6] for peer in peers)
    assert all(peer < 6 for peers in placed.peers[6:] for peer in peers)
    assert loads(placed)[6] == loads(placed)[7] == 3


def test_one_host_is_a_ring_and_said_so() -> None:
    placed = place([ReplicaSpot("here")] * 4, 2)
    assert placed.peers == ((2,), (3,), (0,), (1,))
    assert placed.notes == ("all 2 copies of a part lie on one host: none survives its loss",)


def test_what_copies_do_not_survive_is_said() -> None:
    two = [
        ReplicaSpot("a", "r1"),
        ReplicaSpot("b", "r1"),
        ReplicaSpot("a", "r1"),
        ReplicaSpot("b", "r1"),
    ]
    rack, host = place(two, 3).notes
    assert rack == "all 3 copies of a part lie on one rack: none survives its loss"
    assert host.startswith("3 copies of a part lie on 2 hosts: they survive the loss of all but")
    assert place([ReplicaSpot("a"), ReplicaSpot("b")], 2).notes == ()
    assert place(two, 1).notes == ()


@pytest.mark.parametrize("copies", [0, 3, -1])
def test_copies_need_ranks(copies: int) -> None:
    with pytest.raises(ConfigError, match=f"{copies} copies of each rank's part need"):
        place([ReplicaSpot("a"), ReplicaSpot("b")], copies)


def test_a_large_fleet_is_placed_at_once() -> None:
    found = [ReplicaSpot(f"h{rank // 8}", f"r{rank // 64}") for rank in range(16_384)]
    placed = place(found, 3)
    assert set(loads(placed).values()) == {2}
    assert all(
        len({found[holder].rack for holder in (rank, *peers)}) == 3
        for rank, peers in enumerate(placed.peers)
    )


# --- groups -----------------------------------------------------------------------------------


def groups(placed: ReplicaPlacement) -> set[tuple[int, ...]]:
    """Each rank's own, which all its members must have alike."""
    return {tuple(sorted((rank, *peers))) for rank, peers in enumerate(placed.peers)}


@given(spots.filter(lambda found: len(found) > 1), st.data())
def test_groups_are_even_and_spread(found: list[ReplicaSpot], data: st.DataObject) -> None:
    world = len(found)
    size = data.draw(st.integers(2, min(16, world)))
    placed = group(found, size)
    assert group(found, size) == placed
    made = groups(placed)
    assert sorted(rank for members in made for rank in members) == list(range(world))
    lengths = {len(members) for members in made}
    assert min(lengths) >= 2 and max(lengths) - min(lengths) <= 1
    assert max(lengths) <= max(size, 3 if world % 2 else 2)
    assert len(made) == min(-(-world // size), world // 2)
    for where in ([spot.rack for spot in found], [(spot.rack, spot.host) for spot in found]):
        for domain, count in Counter(where).items():
            hit = [sum(where[rank] == domain for rank in members) for members in made]
            assert max(hit) == -(-count // len(made))  # by counting, no fewer can be
    assert all(list(peers) == sorted(peers) for peers in placed.peers)


def test_what_groups_do_not_survive_is_said() -> None:
    alone = "a group's parity does not survive the loss of one host"
    assert group([ReplicaSpot("here")] * 4, 4).notes == (alone,)
    assert group([ReplicaSpot("a"), ReplicaSpot("b"), ReplicaSpot("c")], 3).notes == ()
    two = [ReplicaSpot(f"h{rank // 2}", f"r{rank // 4}") for rank in range(8)]
    assert group(two, 4).notes == (
        "a group's parity does not survive the loss of a rack that 2 of its ranks are on",
    )
    assert group(two, 2).notes == ()


@pytest.mark.parametrize(("world", "size"), [(1, 2), (3, 4), (3, 1), (0, 2)])
def test_groups_need_ranks(world: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"a parity group of {size} ranks needs as many"):
        group([ReplicaSpot("a")] * world, size)
