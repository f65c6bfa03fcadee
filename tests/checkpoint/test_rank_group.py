"""Meetings of ranks before an exchange: absent ranks are named, within a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from outlast.checkpoint.rank_group import RankGroup, RankRendezvous
from outlast.errors import GroupError, UsageError

WORLD = 3


def ranks(do: Callable[[int, RankRendezvous], None], timeout_s: float = 30.0) -> list[str]:
    """What each rank's `do` raised, or nothing."""
    store = HashStore()

    def one(rank: int) -> str:
        try:
            do(rank, RankRendezvous(store, rank, WORLD, timeout_s))
        except GroupError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(one, range(WORLD)))


def test_all_come_turn_by_turn_and_call_by_call() -> None:
    def do(rank: int, meeting: RankRendezvous) -> None:
        for call in (1, 2):
            for turn in (1, 2):
                meeting.come(call, turn)
            meeting.leave(call)

    assert ranks(do) == [""] * WORLD


@pytest.mark.parametrize(
    ("why", "told"), [("", "rank 1 did not take part"), ("no room", "rank 1 failed: no room")]
)
def test_a_rank_that_left_is_named_at_once_on_all_others(why: str, told: str) -> None:
    def do(rank: int, meeting: RankRendezvous) -> None:
        meeting.come(1, 1)
        meeting.leave(1)  # which is over, and keeps nobody from the second call
        if rank == 1:
            meeting.leave(2, why)
        else:
            meeting.come(2, 1)

    said = ranks(do)
    assert said[1] == "" and told in said[0] and told in said[2]


def test_a_late_leave_of_an_earlier_call_hides_no_failure() -> None:
    left = threading.Event()

    def do(rank: int, meeting: RankRendezvous) -> None:
        meeting.come(1, 1)
        if rank == 1:
            meeting.leave(1)
            meeting.leave(2, "no room")
            left.set()
            return
        assert left.wait(30)
        meeting.leave(1)
        meeting.come(2, 1)

    said = ranks(do)
    assert "rank 1 failed: no room" in said[0] and "rank 1 failed: no room" in said[2]


def test_a_rank_that_misses_the_deadline_is_named_on_all_ranks() -> None:
    given_up = threading.Event()

    def do(rank: int, meeting: RankRendezvous) -> None:
        if rank == 2:
            assert given_up.wait(30)
        try:
            meeting.come(1, 1)
        finally:
            given_up.set()

    said = ranks(do, timeout_s=0.3)
    assert all("rank 2 did not come within 0.3 s" in each for each in said)


def test_a_call_of_a_second_thread_is_refused_by_name() -> None:
    group = RankGroup()
    with group.together("save"), ThreadPoolExecutor(1) as pool:
        refusal = pool.submit(group.together("load").__enter__).exception(30)
    assert isinstance(refusal, UsageError) and "another thread is in save()" in str(refusal)
    with group.together("load"):
        pass
