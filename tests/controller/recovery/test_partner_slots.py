"""Own state of ranks that were lost with their hosts, from partners on other hosts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.controller.replica_placement import SET_MAX, partner_sets


@pytest.mark.parametrize("largest", range(5))
def test_partners_are_on_two_hosts_and_every_rank_has_some(largest: int) -> None:
    for rest in itertools.product(range(5), repeat=3):
        _check((largest, *rest))


def _check(sizes: tuple[int, ...]) -> None:
    hosts = [name for name, size in zip("abcd", sizes, strict=True) for _ in range(size)]
    sets = partner_sets(hosts, {}).sets
    if len(set(hosts)) < 2:
        assert sets == ()
        return
    assert sorted(rank for ranks in sets for rank in ranks) == list(range(len(hosts)))
    assert all(len({hosts[rank] for rank in ranks}) > 1 for ranks in sets)
    if 2 * max(sizes) <= len(hosts):
        assert sum(len(ranks) != 2 for ranks in sets) == len(hosts) % 2


def test_partners_are_half_of_all_ranks_apart() -> None:
    assert partner_sets(list("aabbcc"), {}).sets == ((0, 3), (1, 4), (2, 5))


names = st.sampled_from("abc")
clusters = st.lists(
    st.tuples(st.lists(names, max_size=3).map("/".join), st.integers(1, 6)), min_size=1, max_size=9
)


@given(clusters)
def test_no_domain_holds_a_rank_and_all_copies_where_that_is_possible(
    nodes: list[tuple[str, int]],
) -> None:
    domains = {f"n{number}": domain for number, (domain, _) in enumerate(nodes)}
    hosts = [f"n{number}" for number, (_, ranks) in enumerate(nodes) for _ in range(ranks)]
    sets, note = partner_sets(hosts, domains)
    if len(nodes) == 1:
        assert sets == ()
        return
    assert sorted(rank for ranks in sets for rank in ranks) == list(range(len(hosts)))
    assert all(len({hosts[rank] for rank in ranks}) > 1 for ranks in sets)
    for depth in range(3):
        tops = [tuple(f"{domains[host]}//".split("/")[: depth + 1]) for host in hosts]
        if len(set(tops)) == 1:
            continue  # all ranks are in one domain of this level
        elsewhere = len(hosts) - max(map(tops.count, tops))
        if -(-len(hosts) // min(elsewhere, len(hosts) // 2)) <= SET_MAX:
            assert all(len({tops[rank] for rank in ranks}) > 1 for ranks in sets)
            assert not note
            return
        assert "ranks are in the failure domain" in note
        return
    assert bool(note) == any(domains.values())


def test_a_large_domain_shares_the_ranks_of_the_others() -> None:
    sets, note = partner_sets(list("aabbccd"), {"a": "r1", "b": "r1", "c": "r1", "d": "r2"})
    assert (sets, note) == ((tuple(range(7)),), "")
    sets, note = partner_sets(list("aabbcdd"), {"a": "r1", "b": "r1", "c": "r2", "d": "r2"})
    assert sets == ((0, 3, 4), (1, 5), (2, 6)) and not note
    assert all(min(ranks) < 4 <= max(ranks) for ranks in sets)


def test_a_domain_with_all_copies_is_named() -> None:
    alone = dict.fromkeys("ab", "row1/rack7")
    sets, note = partner_sets(list("aabb"), alone)
    assert sets == ((0, 2), (1, 3)) and note.startswith(
        "4 of 4 ranks are in the failure domain row1/"
    )
    many = {"z": "rack2", **dict.fromkeys("ab", "rack1")}
    sets, note = partner_sets([*"a" * 20, *"b" * 20, "z"], many)
    assert note.startswith("40 of 41 ranks are in the failure domain rack1")
    assert max(map(len, sets)) == 3
