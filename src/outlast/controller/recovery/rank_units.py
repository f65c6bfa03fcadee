"""Units of ranks that leave a job and come back together.

Ranks that need each other's part in a collective leave together: the shards of a replica, the
stages of a pipeline. A unit is a connected part of the world; two ranks are connected if

- a collective that needs all members (all-gather, reduce-scatter, send and receive, ...) runs in a
  group of both, or
- a reduction runs in a group of both, each of whose members holds other shards: it adds parts of
  one value (tensor parallelism, the norm of a sharded gradient) and not values of replicas.

Units must be replicas of each other: as many ranks, with the same shards in the same order. Then a
sum over some units is scaled to a sum over all, if its group has the same places of each unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from outlast.transport.group_messages import GroupUse
from outlast.transport.rank_spans import unpack_ranks

Units = tuple[tuple[int, ...], ...]


class UnitPlace(NamedTuple):
    """Number of a rank's unit, and its place in it."""

    unit: int
    place: int


class RankUnits:
    """All ranks of a world in their units; by default each rank is one."""

    def __init__(self, world: int, units: Units = ()) -> None:
        self.world = world
        self.units = units or tuple((rank,) for rank in range(world))
        self.size = len(self.units[0]) if world else 1
        self._places = {
            rank: UnitPlace(number, place)
            for number, unit in enumerate(self.units)
            for place, rank in enumerate(unit)
        }

    def place_of(self, rank: int) -> UnitPlace:
        """Return the unit of a rank, and its place in it."""
        return self._places[rank]

    def numbers(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the numbers of the units that these ranks belong to, in increasing order."""
        return tuple(sorted({self._places[rank].unit for rank in ranks}))

    def closure(self, ranks: Iterable[int]) -> Units:
        """Return the units that these ranks belong to."""
        return tuple(self.units[number] for number in self.numbers(ranks))

    def why_unscalable(self, ranks: Sequence[int]) -> str:
        """Return why a sum over a group cannot be scaled while units are missing; "" if it can, or
        if the group is part of one unit, which is always whole."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            number, place = self._places[rank]
            found.setdefault(number, []).append(place)
        if len(found) == 1:
            return ""
        places = {tuple(sorted(each)) for each in found.values()}
        if len(found) == len(self.units) and len(places) == 1:
            return ""
        return (
            f"it reduces over ranks {_shown(ranks)}, which are some replicas and not all: averages"
            " of such averages would have other weights"
        )

    def sampler_rank(self, replicas: int, number: int, place: int) -> int:
        """Return the rank of the sampler of a place in a unit, for `num_replicas`; -1 if that
        cannot be known. Ranks of a unit share batches, or have their own."""
        if replicas == self.world:
            return self.units[number][place]
        share, rest = divmod(replicas, len(self.units))
        if rest or not share or self.size % share:
            return -1
        return number * share + place // (self.size // share)

    def why_undealt(self, rank: int, sampler: Sequence[int]) -> str:
        """Return why the batches of a rank cannot be dealt to the other units; "" if they can.
        `sampler`: see GroupUse."""
        if not sampler:
            return ""
        replicas, own = sampler
        number, place = self._places[rank]
        expected = self.sampler_rank(replicas, number, place)
        if expected == own:
            return ""
        units = f" in {len(self.units)} units" if self.size > 1 else ""
        text = f"rank {rank} has rank {own} of {replicas} of its sampler"
        return f"{text}, in a world of {self.world} ranks{units}"


@lru_cache(maxsize=8)
def units_of(world: int, units: Units) -> RankUnits:
    """Return the units of a world, which are often asked for."""
    return RankUnits(world, units)


def find_units(
    world: int, holdings: Mapping[int, bytes], uses: Mapping[int, GroupUse]
) -> tuple[RankUnits, str]:
    """Return the units of a world, and why none may leave ("" if some may). `holdings`: digest of
    each rank's shards; `uses`: groups that ranks have used in phases."""
    whole = dict.fromkeys(group for use in uses.values() for group in use.whole)
    reduced = dict.fromkeys(group for use in uses.values() for group in use.reduced)
    parts = _Parts(world)
    for group in whole:
        parts.join(tuple(unpack_ranks(group)))
    has_shards = len({holdings.get(rank) for rank in range(world)}) > 1
    groups = [tuple(unpack_ranks(group)) for group in reduced]
    for ranks in groups if has_shards else ():
        if len({holdings.get(rank) for rank in ranks}) == len(ranks):
            parts.join(ranks)
    found = parts.found()
    if world > 1 and len(found) == 1:
        return RankUnits(world), "no rank can do without the others"
    if why := _why_unequal(found, holdings):
        return RankUnits(world), why
    units = RankUnits(world, found if len(found[0]) > 1 else ())
    for ranks in groups:
        if why := units.why_unscalable(ranks):
            return units, f"a collective cannot be scaled: {why}"
    for rank, use in sorted(uses.items()):
        if why := units.why_undealt(rank, use.sampler):
            return units, f"the loader's batches cannot be dealt to other ranks: {why}"
    return units, ""


def _why_unequal(units: Units, holdings: Mapping[int, bytes]) -> str:
    """Return why units are not replicas of each other; "" if they are."""
    first = units[0]
    for unit in units[1:]:
        if len(unit) != len(first):
            return (
                f"ranks {_shown(first)} need each other, and so do ranks {_shown(unit)}: they are"
                " not replicas of each other"
            )
        if [holdings.get(rank) for rank in unit] != [holdings.get(rank) for rank in first]:
            return (
                f"ranks {_shown(unit)} hold other shards than ranks {_shown(first)}, and no"
                " collective of theirs shows which ranks are one replica"
            )
    return ""


def fewest_leaving(
    units: Units,
    lost: Collection[int],
    unknown: Collection[int],
    takers: Callable[[int], int],
) -> tuple[int, ...]:
    """Return the ranks of the fewest units without which all other lost ranks can be taken at once.
    Units with ranks whose own state is `unknown` leave first, then those with most lost ranks,
    whose healthy ones make room. `takers`: how many lost ranks can be taken when so many ranks
    have made room."""
    order = sorted(
        units,
        key=lambda unit: (
            set(unit).isdisjoint(unknown),
            -len(set(lost).intersection(unit)),
            [-rank for rank in unit],
        ),
    )
    leaving: list[int] = []
    for unit in order:
        rest = set(lost).difference(leaving)
        freed = len(set(leaving).difference(lost))
        if rest.isdisjoint(unknown) and len(rest) <= takers(freed):
            break
        leaving += unit
    return tuple(sorted(leaving))


def why_rooted(units: RankUnits, uses: Iterable[GroupUse], leaving: Collection[int]) -> str:
    """Return why ranks may not leave whose collectives others need as their root; "" if they
    may."""
    for root, group in sorted({each for use in uses for each in use.roots}):
        unit = set(units.units[units.place_of(root).unit])
        if root in leaving and not unit.issuperset(unpack_ranks(group)):
            return f"rank {root} is the root of a collective in the script's phases"
    return ""


def _shown(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:6], "...", shown[-1]])


class _Parts:
    """Disjoint sets of ranks."""

    def __init__(self, world: int) -> None:
        self._above = [*range(world)]

    def _top(self, rank: int) -> int:
        while (above := self._above[rank]) != rank:
            self._above[rank] = self._above[above]
            rank = above
        return rank

    def join(self, ranks: Sequence[int]) -> None:
        first = self._top(ranks[0])
        for rank in ranks:
            top = self._top(rank)
            first, top = min(first, top), max(first, top)
            self._above[top] = first

    def found(self) -> Units:
        """Return the sets in the order of their lowest ranks."""
        sets: dict[int, list[int]] = {}
        for rank in range(len(self._above)):
            sets.setdefault(self._top(rank), []).append(rank)
        return tuple(tuple(each) for each in sets.values())
