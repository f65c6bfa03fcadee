"""Ranks of groups as spans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.transport.rank_spans import has_rank, pack_ranks, unpack_ranks


@given(st.lists(st.integers(0, 1 << 20), unique=True, max_size=40))
def test_spans_have_the_ranks_in_order(ranks: list[int]) -> None:
    assert list(unpack_ranks(pack_ranks(ranks))) == ranks


@given(st.lists(st.integers(0, 40), unique=True, max_size=40))
def test_spans_have_no_other_ranks(ranks: list[int]) -> None:
    spans = pack_ranks(ranks)
    assert [rank for rank in range(-2, 43) if has_rank(spans, rank)] == sorted(ranks)


@pytest.mark.parametrize("ranks", [range(4096), range(3, 4096, 8), range(1), range(0)])
def test_ranks_of_a_mesh_are_one_span(ranks: range) -> None:
    assert len(pack_ranks(ranks)) == min(1, len(ranks))
