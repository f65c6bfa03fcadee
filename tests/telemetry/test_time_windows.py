"""Division of time windows among claims without gaps or overlaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.telemetry.time_accounting import BUCKETS, Span, Window, carve, merge

TIMES = st.integers(0, 40)


@st.composite
def free_windows(draw: st.DrawFn) -> list[Window]:
    marks = sorted(draw(st.sets(TIMES, max_size=8)))
    return [Window(a, b) for a, b in zip(marks[::2], marks[1::2], strict=False)]


CLAIMS = st.lists(st.builds(Span, TIMES, TIMES, st.sampled_from(BUCKETS)), max_size=8)


@given(free=free_windows(), claims=CLAIMS)
def test_given_and_left_are_the_window(free: list[Window], claims: list[Span]) -> None:
    given_, left = carve(free, claims)
    ticks = [t for window in free for t in range(*window)]
    covered = [t for span in given_ for t in range(span.begin_ns, span.end_ns)]
    rest = [t for window in left for t in range(*window)]
    assert sorted(covered + rest) == ticks
    claimed = {t for claim in claims for t in range(claim.begin_ns, claim.end_ns)}
    assert set(covered) == claimed & set(ticks)
    for span in given_:
        for t in range(span.begin_ns, span.end_ns):
            holding = [c for c in claims if c.begin_ns <= t < c.end_ns]
            assert span.bucket in {c.bucket for c in holding}


def test_the_earlier_claim_keeps_what_it_has() -> None:
    given_, left = carve([Window(0, 10)], [Span(4, 8, "eval"), Span(2, 6, "step")])
    assert given_ == [Span(2, 6, "step"), Span(6, 8, "eval")]
    assert left == [Window(0, 2), Window(8, 10)]


def test_one_claim_may_cover_many_windows() -> None:
    given_, left = carve([Window(0, 2), Window(4, 6), Window(8, 9)], [Span(1, 9, "lost")])
    assert given_ == [Span(1, 2, "lost"), Span(4, 6, "lost"), Span(8, 9, "lost")]
    assert left == [Window(0, 1)]


def test_equal_neighbours_become_one() -> None:
    spans = [Span(5, 7, "step"), Span(0, 3, "step"), Span(3, 5, "step"), Span(8, 9, "step")]
    assert merge(spans) == [Span(0, 7, "step"), Span(8, 9, "step")]
