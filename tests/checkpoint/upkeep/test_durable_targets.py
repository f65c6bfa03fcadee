"""Durable targets: settings, and checkpoints that are due."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast import quantities
from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.upkeep.durable_targets import (
    DurableRule,
    SaveInterval,
    parse_durable,
    wanted_checkpoints,
)
from outlast.checkpoint.upkeep.retention_policy import Keep, KnownCheckpoint
from outlast.errors import ConfigError

HOUR_NS = 3600 * 10**9


def known(step: int, hour: float = 0.0) -> KnownCheckpoint:
    return KnownCheckpoint(SavePoint(step, step, "a1"), int(hour * HOUR_NS), 10, verified=False)


def steps(
    offered: list[KnownCheckpoint],
    there: list[KnownCheckpoint],
    every: SaveInterval | None,
    keep: Keep | None = None,
    *,
    last: bool = False,
) -> list[int]:
    return [place.step for place in wanted_checkpoints(offered, there, keep, every, 0, last=last)]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("s3://bucket/run", DurableRule(address="s3://bucket/run")),
        ("/disk/my runs", DurableRule(address="/disk/my runs")),
        ("/disk every=1000", DurableRule(address="/disk", every=SaveInterval(steps=1000))),
        (" /disk  every=90m ", DurableRule(address="/disk", every=SaveInterval(seconds=5400.0))),
        (
            "gs://b/r rate=200MB/s keep=last=2, every=1000 every=6h",
            DurableRule(
                address="gs://b/r",
                every=SaveInterval(seconds=21600.0),
                keep=Keep(last=2, every=1000),
                rate_bytes_per_s=200_000_000,
            ),
        ),
    ],
)
def test_a_target_on_a_command_line(text: str, target: DurableRule) -> None:
    assert parse_durable(text) == target


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no target"),
        ("every=6h", "names no target"),
        ("/disk often=6h", "cannot read 'often=6h' of /disk: known are every, keep and rate"),
        ("/disk every=6h every=7h", "every is given twice for /disk"),
        ("/disk every=0", "'every=0' is no interval"),
        ("/disk every=0.1s", "'every=0.1s' is no interval"),
        ("/disk every=auto", "'every=auto' needs a number and one of ms, s, m, min, h"),
        ("/disk every=-5", "'every=-5' needs a number"),
        ("/disk keep=first=2", "cannot read 'first=2'"),
        ("/disk rate=fast", "'rate=fast' needs a number and one of B, kB"),
        ("/disk rate=0MB/s", "'rate=0MB/s' is less than one byte"),
        ("/disk rate=5MB/h", "'rate=5MB/h' needs a number"),
    ],
)
def test_a_target_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_durable(text)


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("7B", 7), ("7", None),
                             ("0GB", None), ("GB", None), ("-1GB", None), ("1e3GB", None)],
)  # fmt: skip
def test_amounts(text: str, size_bytes: int | None) -> None:
    if size_bytes is None:
        with pytest.raises(ConfigError, match=f"--flag {text}"):
            quantities.size(f"--flag {text}", text)
    else:
        assert quantities.size(f"--flag {text}", text) == size_bytes


def test_the_first_of_each_span_of_steps() -> None:
    offered = [known(step) for step in range(300, 3600, 300)]
    assert steps(offered, [], SaveInterval(steps=1000)) == [3000, 2100, 1200, 300]
    assert steps(offered, [known(3200), known(900)], SaveInterval(steps=1000)) == [2100, 1200]
    assert steps(offered, [], None) == [known.place.step for known in reversed(offered)]


def test_the_first_of_each_span_of_time() -> None:
    offered = [known(step, hour=step / 10) for step in range(1, 10)]
    assert steps(offered, [], SaveInterval(seconds=1800)) == [5, 1]
    assert steps(offered, [known(20, hour=0.9)], SaveInterval(seconds=1800)) == [1]


def test_a_clock_that_was_set_back_keeps_nothing_from_being_carried() -> None:
    there = [known(1, hour=1), known(2, hour=7), known(3, hour=13)]
    again = [known(4, hour=1), known(5, hour=2), known(6, hour=7)]
    assert steps(again, there, SaveInterval(seconds=21600)) == [6, 4]


def test_milestones_and_the_last_one_are_due_anyway() -> None:
    offered = [known(step) for step in (1100, 1200, 1300)]
    there = [known(1000)]
    every, keep = SaveInterval(steps=1000), Keep(last=9, milestones=frozenset({1200}))
    assert steps(offered, there, every) == []
    assert steps(offered, there, every, keep) == [1200]
    assert steps(offered, there, every, keep, last=True) == [1300, 1200]
    assert steps([], there, every, last=True) == []


def test_checkpoints_that_the_target_would_prune_are_not_due() -> None:
    offered = [known(step) for step in range(100, 3000, 100)]
    assert steps(offered, [], SaveInterval(steps=1000), Keep(last=2)) == [2000, 1000]


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.floats(0, 60)), max_size=20, unique_by=lambda s: s[0]
    ),
    st.sets(st.integers(0, 60)),
    st.one_of(
        st.builds(SaveInterval, steps=st.integers(1, 30)),
        st.builds(SaveInterval, seconds=st.floats(60, 1e5)),
    ),
)
def test_once_carried_nothing_more_is_due(
    made: list[tuple[int, float]], carried: set[int], every: SaveInterval
) -> None:
    """And each span has one, and gets no second."""
    items = [known(step, hour) for step, hour in sorted(made)]
    there = [item for item in items if item.place.step in carried]
    offered = [item for item in items if item not in there]
    due = set(steps(offered, there, every))
    after = [item for item in items if item in there or item.place.step in due]
    left = [item for item in items if item not in after]
    assert steps(left, after, every) == []
    spans = [every.span(item) for item in items]
    runs = 1 + sum(a != b for a, b in pairwise(spans)) if items else 0
    assert len(due) <= runs <= len(after)
