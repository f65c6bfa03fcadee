"""Division of time windows among claims without gaps or overlaps."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outlast.telemetry.history.time_claims import Claims, Windows, carve, disjoint, merge

TIMES = st.integers(0, 40)
CLAIMS = st.lists(st.tuples(TIMES, TIMES, st.integers(0, 9)), max_size=8)


@st.composite
def free_windows(draw: st.DrawFn) -> list[tuple[int, int]]:
    marks = sorted(draw(st.sets(TIMES, max_size=8)))
    return list(zip(marks[::2], marks[1::2], strict=False))


def windows(rows: list[tuple[int, int]]) -> Windows:
    return Windows(*np.array(rows, np.int64).reshape(-1, 2).T)


def claims(rows: list[tuple[int, int, int]]) -> Claims:
    begin, end, code = np.array(rows, np.int64).reshape(-1, 3).T
    return Claims(begin, end, code.astype(np.uint8))


def listed(found: Claims | Windows) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in found), strict=True))


def ticks(rows: list[tuple[int, ...]]) -> list[int]:
    return [t for begin, end, *_ in rows for t in range(begin, end)]


@given(free=free_windows(), wanted=CLAIMS)
def test_parts_and_rest_are_the_windows(
    free: list[tuple[int, int]], wanted: list[tuple[int, int, int]]
) -> None:
    parts, rest = map(listed, carve(windows(free), disjoint(claims(sorted(wanted)))))
    assert sorted(ticks(parts) + ticks(rest)) == ticks([*free])
    assert set(ticks(parts)) == set(ticks([*wanted])) & set(ticks([*free]))
    for begin, end, code in parts:
        for t in range(begin, end):
            assert code == min(one for one in wanted if one[0] <= t < one[1])[2]


def test_the_earlier_claim_keeps_what_it_has() -> None:
    parts, rest = carve(windows([(0, 10)]), disjoint(claims([(2, 6, 1), (4, 8, 2)])))
    assert listed(parts) == [(2, 6, 1), (6, 8, 2)]
    assert listed(rest) == [(0, 2), (8, 10)]


def test_one_claim_may_cover_many_windows() -> None:
    parts, rest = carve(windows([(0, 2), (4, 6), (8, 9)]), claims([(1, 9, 5)]))
    assert listed(parts) == [(1, 2, 5), (4, 6, 5), (8, 9, 5)]
    assert listed(rest) == [(0, 1)]


def test_equal_neighbours_become_one() -> None:
    rows = claims([(0, 3, 1), (3, 5, 1), (5, 7, 1), (8, 9, 1), (9, 10, 1)])
    joined, lane = merge(rows, np.array([0, 0, 0, 0, 1]))
    assert listed(joined) == [(0, 7, 1), (8, 9, 1), (9, 10, 1)]
    assert lane.tolist() == [0, 0, 1]
