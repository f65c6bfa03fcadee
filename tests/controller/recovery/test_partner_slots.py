"""Own state of ranks that were lost with their hosts, from partners on other hosts."""

from __future__ import annotations

import itertools

import pytest

from outlast.controller.replica_placement import partner_sets


@pytest.mark.parametrize("largest", range(5))
def test_partners_are_on_two_hosts_and_every_rank_has_some(largest: int) -> None:
    for rest in itertools.product(range(5), repeat=3):
        _check((largest, *rest))


def _check(sizes: tuple[int, ...]) -> None:
    hosts = [name for name, size in zip("abcd", sizes, strict=True) for _ in range(size)]
    sets = partner_sets(hosts)
    if len(set(hosts)) < 2:
        assert sets == ()
        return
    assert sorted(rank for ranks in sets for rank in ranks) == list(range(len(hosts)))
    assert all(len({hosts[rank] for rank in ranks}) > 1 for ranks in sets)
    if 2 * max(sizes) <= len(hosts):
        assert sum(len(ranks) != 2 for ranks in sets) == len(hosts) % 2


def test_partners_are_half_of_all_ranks_apart() -> None:
    assert partner_sets(list("aabbcc")) == ((0, 3), (1, 4), (2, 5))
