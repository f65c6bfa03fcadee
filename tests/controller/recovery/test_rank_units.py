"""Units of ranks that leave together, from the groups that ranks report."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.controller.recovery.rank_units import RankUnits, fewest_leaving, find_units, why_rooted
from outlast.transport.group_messages import GroupUse
from outlast.transport.rank_spans import pack_ranks


class Mesh(NamedTuple):
    """A mesh of ranks in row-major order: one dimension of replicas, the others within one."""

    shape: tuple[int, ...]
    replicas: int  # number of the dimension

    @property
    def world(self) -> int:
        return len(self.places())

    def places(self) -> list[tuple[int, ...]]:
        return [*product(*map(range, self.shape))]

    def groups(self, dimension: int) -> Iterator[tuple[int, ...]]:
        """Yield the groups along a dimension."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(self.places()):
            rest = (*place[:dimension], *place[dimension + 1 :])
            found.setdefault(rest, []).append(rank)
        yield from (tuple(ranks) for ranks in found.values() if len(ranks) > 1)

    def replica(self, number: int) -> tuple[int, ...]:
        return tuple(
            rank for rank, place in enumerate(self.places()) if place[self.replicas] == number
        )

    def holdings(self) -> dict[int, bytes]:
        """Return the shards of each rank, equal along the dimension of replicas."""
        return {
            rank: repr((*place[: self.replicas], *place[self.replicas + 1 :])).encode()
            for rank, place in enumerate(self.places())
        }

    def uses(self, *, whole: bool) -> dict[int, GroupUse]:
        """Return what each rank reports. `whole`: ranks of a replica call all-gathers, else
        all-reduces."""
        needed: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in range(self.world)}
        reduced: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in range(self.world)}
        for dimension in range(len(self.shape)):
            into = needed if whole and dimension != self.replicas else reduced
            for ranks in self.groups(dimension):
                for rank in ranks:
                    into[rank].append(ranks)
        everybody = tuple(range(self.world))
        return {
            rank: GroupUse(
                tuple(map(pack_ranks, needed[rank])),
                tuple(map(pack_ranks, (*reduced[rank], everybody))),
            )
            for rank in everybody
        }


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    at = draw(st.integers(0, len(shape)))
    shape.insert(at, draw(st.integers(2, 4)))
    return Mesh(tuple(shape), at)


@given(meshes(), st.booleans(), st.data())
def test_the_units_of_a_mesh_are_its_replicas(mesh: Mesh, whole: bool, data: st.DataObject) -> None:
    expected = tuple(mesh.replica(number) for number in range(mesh.shape[mesh.replicas]))
    uses = mesh.uses(whole=whole)
    units, why = find_units(mesh.world, mesh.holdings(), uses)
    assert why == "" and sorted(units.units) == sorted(expected)
    lost = data.draw(st.sets(st.integers(0, mesh.world - 1), min_size=1))
    closed = {rank for unit in units.closure(lost) for rank in unit}
    assert lost <= closed
    assert all(set(unit) <= closed or closed.isdisjoint(unit) for unit in expected)
    assert all(not lost.isdisjoint(unit) for unit in units.closure(lost)), "a unit too much"
    for use in uses.values():
        for ranks in (tuple(mesh.groups(dimension)) for dimension in range(len(mesh.shape))):
            assert all(units.why_unscalable(each) == "" for each in ranks)
        assert units.why_unscalable(range(mesh.world)) == "" and use.whole == use.whole


@given(meshes(), st.booleans(), st.data())
def test_lost_reports_never_give_other_units(mesh: Mesh, whole: bool, data: st.DataObject) -> None:
    known = mesh.uses(whole=whole)
    silent = data.draw(st.sets(st.integers(0, mesh.world - 1)))
    uses = {rank: use for rank, use in known.items() if rank not in silent}
    units, why = find_units(mesh.world, mesh.holdings(), uses)
    truth, _ = find_units(mesh.world, mesh.holdings(), known)
    assert why or units.units == truth.units, "units were made up"


@given(st.integers(2, 9), st.data())
def test_any_groups_give_closed_units_or_a_reason(world: int, data: st.DataObject) -> None:
    group = st.sets(st.integers(0, world - 1), min_size=2).map(sorted).map(pack_ranks)
    groups = st.lists(group, max_size=4).map(tuple)
    kinds = st.lists(st.sampled_from((b"a", b"b")), min_size=world, max_size=world)
    holdings = dict(enumerate(data.draw(kinds)))
    uses = {rank: GroupUse(data.draw(groups), data.draw(groups)) for rank in range(world)}
    units, why = find_units(world, holdings, uses)
    if why:  # then no rank leaves
        return
    assert sorted(rank for unit in units.units for rank in unit) == [*range(world)]
    for unit in units.units:
        assert [holdings[rank] for rank in unit] == [holdings[rank] for rank in units.units[0]]
    for use in uses.values():
        for spans in use.whole:
            ranks = [first + i * step for first, size, step in spans for i in range(size)]
            assert len(units.numbers(ranks)) == 1, "a collective needs ranks of two units"
        for spans in use.reduced:
            ranks = [first + i * step for first, size, step in spans for i in range(size)]
            shares = [sum(rank in unit for rank in ranks) for unit in units.units]
            assert len(units.numbers(ranks)) == 1 or (len({*shares}) == 1 and shares[0])


HALVES = (pack_ranks((0, 1)), pack_ranks((2, 3)))
ALL = pack_ranks(range(4))
SHARDS = {0: b"a", 1: b"b", 2: b"a", 3: b"b"}
SAME = dict.fromkeys(range(4), b"a")


@pytest.mark.parametrize(
    ("holdings", "use", "says"),
    [
        (SHARDS, GroupUse(whole=(ALL,)), "no rank can do without the others"),
        (SHARDS, GroupUse(), "no collective of theirs shows which ranks are one replica"),
        (SHARDS, GroupUse(whole=HALVES[:1]), "not replicas of each other"),
        ({0: b"a", 1: b"b", 2: b"b", 3: b"a"}, GroupUse(whole=HALVES), "hold other shards"),
        (SAME, GroupUse(reduced=HALVES), "some replicas and not all"),
        (SHARDS, GroupUse(HALVES, (pack_ranks((0, 1, 2)),)), "some replicas and not all"),
        (SAME, GroupUse(sampler=(4, 1)), "rank 0 has rank 1 of 4 of its sampler"),
        (SAME, GroupUse(sampler=(2, 0)), "rank 0 of 2 of its sampler"),
        (SHARDS, GroupUse(HALVES, sampler=(3, 0)), "in 2 units"),
    ],
)
def test_what_cannot_leave_is_named(holdings: dict[int, bytes], use: GroupUse, says: str) -> None:
    _, why = find_units(4, holdings, {0: use})
    assert says in why


@pytest.mark.parametrize(
    ("replicas", "units", "expected"),
    [
        (4, ((0, 1), (2, 3)), {0: (0, 1), 1: (2, 3)}),
        (4, ((0, 2), (1, 3)), {0: (0, 2), 1: (1, 3)}),
        (2, ((0, 2), (1, 3)), {0: (0, 0), 1: (1, 1)}),
        (1, ((0, 1), (2, 3)), {0: (-1, -1), 1: (-1, -1)}),
    ],
)
def test_ranks_of_a_unit_have_batches_of_their_own_or_share_them(
    replicas: int, units: tuple[tuple[int, ...], ...], expected: dict[int, tuple[int, ...]]
) -> None:
    found = RankUnits(4, units)
    for number, ranks in expected.items():
        assert ranks == tuple(found.sampler_rank(replicas, number, place) for place in (0, 1))


def test_two_shards_of_data_in_a_unit_of_four() -> None:
    units = RankUnits(8, ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert [units.sampler_rank(4, 1, place) for place in range(4)] == [2, 2, 3, 3]
    assert units.why_undealt(6, (4, 3)) == "" and units.why_undealt(6, (4, 2)) != ""


def test_a_root_within_a_unit_leaves_with_it() -> None:
    units = RankUnits(4, ((0, 1), (2, 3)))
    inside, across = ((2, HALVES[1]),), ((2, ALL),)
    assert why_rooted(units, [GroupUse(roots=inside)], {2, 3}) == ""
    assert "rank 2 is the root" in why_rooted(units, [GroupUse(roots=across)], {2, 3})
    assert why_rooted(units, [GroupUse(roots=across)], {0, 1}) == ""


@pytest.mark.parametrize(
    ("lost", "unknown", "spares", "fresh", "leaving"),
    [
        ({3}, set(), 0, 0, (2, 3)),
        ({3}, set(), 1, 0, ()),
        ({1, 2, 3}, set(), 0, 1, (2, 3)),  # nobody is freed, and one can be started
        ({1, 3}, set(), 0, 0, (0, 1, 2, 3)),
        ({1, 3}, set(), 0, 9, (2, 3)),  # the host of rank 2 has room for rank 1
        ({1, 3}, {1}, 1, 0, (0, 1)),
        ({0, 1, 2, 3}, set(), 2, 0, (2, 3)),
    ],
)
def test_the_fewest_units_leave(
    lost: set[int], unknown: set[int], spares: int, fresh: int, leaving: tuple[int, ...]
) -> None:
    broken = RankUnits(6, ((0, 1), (2, 3), (4, 5))).closure(lost)
    rooms = 1 if lost == {1, 2, 3} else 0

    def takers(freed: int) -> int:
        return spares + min(fresh, rooms + freed)

    assert fewest_leaving(broken, lost, unknown, takers) == leaving


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_who_stays_can_be_taken(count: int, size: int, data: st.DataObject) -> None:
    world = count * size
    units = tuple(tuple(range(at, at + size)) for at in range(0, world, size))
    lost = data.draw(st.sets(st.integers(0, world - 1)))
    unknown = data.draw(st.sets(st.integers(0, world - 1))) & lost
    spares, fresh = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))

    def takers(freed: int) -> int:
        return spares + min(fresh, freed)

    broken = RankUnits(world, units).closure(lost)
    leaving = {*fewest_leaving(broken, lost, unknown, takers)}
    assert all(leaving.isdisjoint(unit) or leaving.issuperset(unit) for unit in units)
    assert unknown <= leaving
    assert len(lost - leaving) <= takers(len(leaving - lost))
    assert all(not lost.isdisjoint(unit) for unit in units if leaving.issuperset(unit))
