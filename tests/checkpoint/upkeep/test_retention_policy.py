"""Retention policies: checkpoints kept and deleted, and the syntax of a policy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.upkeep.retention_policy import (
    Keep,
    KnownCheckpoint,
    RetentionVerdict,
    apply_policy,
    parse_policy,
)
from outlast.errors import ConfigError

NOW_NS = 10**18
DAY_NS = 86400 * 10**9


def known(
    step: int, days: float = 0, size: int = 1, verified: bool = True, n: int = 0
) -> KnownCheckpoint:
    place = SavePoint(step, n or step, f"a{step}x{n}")
    return KnownCheckpoint(place, NOW_NS - int(days * DAY_NS), size, verified)


def steps(verdicts: list[RetentionVerdict], keep: bool = True) -> list[int]:
    return [verdict.place.step for verdict in verdicts if verdict.keep is keep]


def kept(items: list[KnownCheckpoint], **policy: Any) -> list[int]:
    return steps(apply_policy(items, Keep(**policy), NOW_NS))


def test_a_shared_file_takes_room_once() -> None:
    """Two files in turn, each of 90 of the 100 bytes of a checkpoint; then one changes."""
    items = [known(step, size=100)._replace(linked=(((7, step % 2), 90),)) for step in range(1, 21)]
    assert kept(items, last=1, size_bytes=100) == [20]
    assert kept(items, last=1, size_bytes=199) == list(range(20, 0, -2)), "10 more for each"
    assert kept(items, last=1, size_bytes=200) == [20, 19]
    assert kept(items, last=1, size_bytes=230) == [20, 19, 18, 17, 16]
    assert kept(items, last=1, size_bytes=380) == list(range(20, 0, -1))
    assert kept(items, last=2, milestones=frozenset({1}), size_bytes=220) == [20, 19, 18, 1]
    apart = [item._replace(linked=()) for item in items]
    assert kept(apart, last=1, size_bytes=380) == [20, 19, 18]


HISTORIES = st.lists(
    st.builds(
        known,
        st.integers(0, 60),
        st.floats(-2, 20),
        st.integers(0, 100),
        st.booleans(),
        st.integers(0, 3),
    ),
    unique_by=lambda item: item.place,
    max_size=25,
)
POLICIES = st.builds(
    Keep,
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 20),
    milestones=st.frozensets(st.integers(0, 60), max_size=4),
    age_s=st.none() | st.floats(0, 20 * 86400),
    size_bytes=st.none() | st.integers(0, 500),
)


def newest_first(items: list[KnownCheckpoint]) -> list[KnownCheckpoint]:
    return sorted(items, key=lambda k: (k.place.step, k.place.n, k.time_ns, k.place), reverse=True)


@given(HISTORIES, POLICIES)
def test_invariants_of_the_retention_policy(items: list[KnownCheckpoint], keep: Keep) -> None:
    verdicts = apply_policy(items, keep, NOW_NS)
    assert [v.place for v in verdicts] == [k.place for k in newest_first(items)]
    assert all(verdict.why for verdict in verdicts)
    gone = {verdict.place for verdict in verdicts if not verdict.keep}
    order = newest_first(items)
    verified = [i for i, item in enumerate(order) if item.verified]
    for i, item in enumerate(order):
        if item.place in gone:
            assert verified
            assert i > verified[0], "it goes before a newer one has been verified"
            assert i >= keep.last
            assert item.place.step not in keep.milestones


@given(HISTORIES, POLICIES)
def test_a_second_pruning_deletes_nothing_more(items: list[KnownCheckpoint], keep: Keep) -> None:
    left = {verdict.place for verdict in apply_policy(items, keep, NOW_NS) if verdict.keep}
    again = apply_policy([item for item in items if item.place in left], keep, NOW_NS)
    assert {verdict.place for verdict in again if verdict.keep} == left


@given(HISTORIES, POLICIES, st.floats(0, 30))
def test_time_and_space_only_trim(items: list[KnownCheckpoint], keep: Keep, days: float) -> None:
    """What rules keep is the same at any time; what age and size leave gets less with time."""
    bare = Keep(last=keep.last, every=keep.every, milestones=keep.milestones)
    ruled = set(kept_places(items, bare, NOW_NS))
    now = set(kept_places(items, keep, NOW_NS))
    assert ruled <= now
    if keep.size_bytes is None:
        assert set(kept_places(items, keep, NOW_NS + int(days * DAY_NS))) <= now
    else:
        sizes = {item.place: item.size_bytes for item in items}
        assert now == ruled or sum(sizes[place] for place in now) <= keep.size_bytes


def kept_places(items: list[KnownCheckpoint], keep: Keep, now_ns: int) -> list[SavePoint]:
    return [verdict.place for verdict in apply_policy(items, keep, now_ns) if verdict.keep]


def test_the_last_checkpoints_are_kept() -> None:
    assert kept([known(step) for step in range(0, 600, 100)], last=2) == [500, 400]


def test_an_unverified_newest_keeps_the_last_verified() -> None:
    items = [known(1), known(2), known(3, verified=False), known(4, verified=False)]
    verdicts = apply_policy(items, Keep(last=1), NOW_NS)
    assert steps(verdicts) == [4, 3, 2]
    assert [verdict.why for verdict in verdicts] == [
        "the newest",
        "no newer one has been verified",
        "the last verified one",
        "no rule keeps it",
    ]


def test_one_of_each_span_stays_the_same_one() -> None:
    items = [known(step) for step in range(300, 3600, 300)]
    assert kept(items, last=1, every=1000) == [3300, 3000, 2100, 1200]
    assert kept(items[:9], last=1, every=1000) == [2700, 2100, 1200]


def test_of_two_attempts_at_a_span_the_newest_stays() -> None:
    items = [known(1000, n=1000), known(1000, n=1007), known(1500), known(2500)]
    verdicts = apply_policy(items, Keep(last=1, every=1000), NOW_NS)
    assert [(v.place.step, v.place.n) for v in verdicts if v.keep] == [(2500, 2500), (1000, 1007)]


def test_milestones_age_and_size() -> None:
    items = [known(step, days=10 - step, size=10) for step in range(10)]
    assert kept(items, last=1, milestones=frozenset({0, 3})) == [9, 3, 0]
    assert kept(items, last=1, age_s=3.5 * 86400) == [9, 8, 7]
    assert kept(items, last=1, size_bytes=35) == [9, 8, 7]
    assert kept(items, last=3, size_bytes=0) == [9, 8, 7]
    assert kept(items, last=1, age_s=9e9, size_bytes=35, milestones=frozenset({0})) == [9, 8, 0]


def test_a_policy_on_a_command_line() -> None:
    assert parse_policy("last=3, every=1000,age=7d,size=10TB,milestone=5000,milestone=7") == Keep(
        last=3,
        every=1000,
        age_s=7 * 86400,
        size_bytes=10 * 1000**4,
        milestones=frozenset({5000, 7}),
    )
    assert parse_policy("age=1.5h").age_s == 5400
    assert parse_policy("size=2GiB").size_bytes == 2 << 30
    assert parse_policy("every=5").last == Keep().last


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lists the checkpoints to keep"),
        ("latest=3", "cannot read 'latest=3'"),
        ("last", "cannot read 'last'"),
        ("last=0", "last=0"),
        ("last=-1", "whole number"),
        ("last=two", "whole number"),
        ("every=0", "every=0"),
        ("age=7", "needs a number and one of ms, s, m, min, h"),
        ("age=7q", "needs a number"),
        ("size=10", "needs a number and one of B, kB, MB"),
        ("size=TB", "needs a number"),
        ("last=1,last=2", "given twice"),
    ],
)
def test_a_policy_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_policy(text)
