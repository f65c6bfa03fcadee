"""Ranks of groups as spans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.transport.rank_spans import pack_ranks, unpack_ranks


@given(st.lists(st.integers(0, 1 << 20), unique=True, max_size=40))
def test_spans_have_the_ranks_in_order(ranks: list[int]) -> None:
    assert list(unpack_ranks(pack_ranks(ranks))) == ranks


@pytest.mark.parametrize("ranks", [range(4096), range(3, 4096, 8), range(1), range(0)])
def test_ranks_of_a_mesh_are_one_span(ranks: range) -> None:
    assert len(pack_ranks(ranks)) == min(1, len(ranks))
