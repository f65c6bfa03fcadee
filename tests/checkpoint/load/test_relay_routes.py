"""Relay routes of chunks: every rank gets its chunks once, and all legs match."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.load.relay_routes import Leg, Wants, legs_of, spans

CHUNKS = 12
sets = st.sets(st.integers(0, CHUNKS - 1))


@st.composite
def passes(draw: st.DrawFn) -> tuple[list[int], list[set[int]], list[set[int]]]:
    world = draw(st.integers(1, 5))
    wanted = [draw(sets) for _ in range(world)]
    held = [draw(sets) & each for each in wanted]
    return draw(st.permutations(range(world))), wanted, held


@given(passes())
def test_legs_of_all_ranks_fit_each_other(
    given_pass: tuple[list[int], list[set[int]], list[set[int]]],
) -> None:
    chain, wanted, held = given_pass
    told = [Wants(spans(sorted(w)), spans(sorted(h))) for w, h in zip(wanted, held, strict=True)]
    legs = [legs_of(rank, chain, told) for rank in range(len(chain))]
    for rank, each in enumerate(legs):
        assert [leg.chunk for leg in each.relayed] == sorted({leg.chunk for leg in each.relayed})
        assert {leg.chunk for leg in each.relayed} | {*each.alone} == wanted[rank]
        assert len(each.relayed) + len(each.alone) == len(wanted[rank])
    for chunk in range(CHUNKS):
        parts = {
            r: leg for r, each in enumerate(legs) for leg in each.relayed if leg.chunk == chunk
        }
        alone = [rank for rank, each in enumerate(legs) if chunk in each.alone]
        assert len(parts) != 1
        if parts:
            way = follow(parts)
            assert {*way} == parts.keys() and len(way) == len(parts)
            inner = [chain.index(rank) for rank in way[1:]]
            assert inner == sorted(inner), "whoever reads, it passes them in one order"
            assert all(chunk in held[rank] for rank in alone)
            holds = any(chunk in each for each in held)
            assert not holds or chunk in held[way[0]]
            assert not any(chunk in held[rank] for rank in way[1:])
        else:  # who has it in memory, or nobody else wants it
            assert len([rank for rank in alone if chunk not in held[rank]]) <= 1


def follow(parts: dict[int, Leg]) -> list[int]:
    """Ranks from the reader to the end of the chain; each takes from the one before it."""
    (reader,) = [rank for rank, leg in parts.items() if leg.source is None]
    way = [reader]
    while (to := parts[way[-1]].to) is not None:
        assert parts[to].source == way[-1]
        way.append(to)
    return way


def test_reading_is_spread_evenly() -> None:
    told = [Wants([(0, 40)]), Wants([(0, 40)]), Wants([(0, 10)]), Wants([(0, 40)])]
    for rank, least in ((0, 12), (1, 12), (2, 2), (3, 12)):
        reads = [leg.chunk for leg in legs_of(rank, range(4), told).relayed if leg.source is None]
        assert least <= len(reads) <= least + 1
