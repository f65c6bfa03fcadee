"""Own time of a rank, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outlast.transport.worker_page import OWN_TIMES, OwnTimeRecord, Page
from outlast.worker.sentinels.own_time import OwnTime

MS = 1_000_000


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page.create()
    yield made
    made.close()


class Rank:
    """A rank that computes and waits for given times."""

    def __init__(self, page: Page) -> None:
        self.now_ns = 1_000 * MS
        self.page, self.step = page, 0
        self.own = OwnTime(lambda: self.now_ns)
        self.generation = 1
        self.read = 0

    def compute(self, ms: int) -> None:
        self.now_ns += ms * MS

    def wait(self, ms: int) -> None:
        with self.own.wait():
            self.now_ns += ms * MS

    def enter(self) -> None:
        self.own.enter_phase(self.now_ns, self.generation)

    def vote(self, wait_ms: int, kind: str = "step f") -> None:
        self.own.enter_vote(self.now_ns)
        self.now_ns += wait_ms * MS
        is_step = kind.startswith("step")
        self.step += is_step
        self.own.won(self.now_ns, self.page, step=self.step, is_step=is_step, kind=kind)

    def begin(self) -> None:
        """Make a first step, which is not measured: nobody knows when it began."""
        self.enter()
        self.vote(1)

    def records(self) -> list[OwnTimeRecord]:
        self.read, found = self.page.own_times(self.read)
        return found

    def newest(self) -> tuple[int, int, int]:
        """Length, own time and that before the phase of the newest step, in ms."""
        *_, before, last = [OwnTimeRecord(), *self.records()]
        times = (
            last.step_us - before.step_us,
            last.own_us - before.own_us,
            last.before_us - before.before_us,
        )
        return tuple(us // 1000 for us in times)  # type: ignore[return-value]


def test_waits_and_the_vote_are_not_own_time(page: Page) -> None:
    rank = Rank(page)
    rank.begin()
    assert rank.records() == [], "the begin of the first step is unknown"
    rank.compute(5)
    rank.enter()
    rank.compute(40)
    rank.wait(30)
    rank.compute(10)
    rank.vote(15)
    assert rank.newest() == (100, 55, 5)


def test_a_collective_in_the_background_ends_nothing(page: Page) -> None:
    rank = Rank(page)
    rank.begin()
    rank.enter()
    for _ in range(3):  # the buckets of DDP
        rank.compute(20)
        rank.own.future_taken()
    rank.compute(35)  # DDP waits in C++, and the gradients are clipped
    rank.vote(5)
    assert rank.newest() == (100, 60, 0)


def test_work_behind_a_seen_wait_counts_again(page: Page) -> None:
    rank = Rank(page)
    rank.begin()
    rank.enter()
    rank.compute(20)
    rank.own.future_taken()
    rank.compute(30)  # unseen
    rank.wait(10)
    rank.compute(40)
    rank.vote(0)
    assert rank.newest() == (100, 60, 0)


def test_nested_waits_of_two_threads_count_once(page: Page) -> None:
    rank = Rank(page)
    rank.begin()
    rank.enter()
    rank.compute(10)
    with rank.own.wait():
        rank.wait(20)
        rank.compute(5)
    rank.compute(10)
    rank.vote(0)
    assert rank.newest() == (45, 20, 0)


@pytest.mark.parametrize("kind", ["eval g", "draw", "epoch"])
def test_other_phases_are_part_of_the_step_that_follows(page: Page, kind: str) -> None:
    rank = Rank(page)
    rank.begin()
    rank.enter()
    rank.compute(10)
    rank.vote(5, kind)
    rank.compute(1)
    rank.enter()
    rank.compute(20)
    rank.vote(4)
    assert rank.newest() == (40, 31, 11)


def test_a_step_behind_a_checkpoint_is_not_measured(page: Page) -> None:
    rank = Rank(page)
    rank.begin()
    rank.enter()
    rank.vote(1, "checkpoint")
    rank.enter()
    rank.compute(900)
    rank.vote(1)
    assert rank.records() == []
    rank.enter()
    rank.compute(9)
    rank.vote(1)
    assert rank.newest() == (10, 9, 0)


def test_an_attempt_that_is_made_again_is_not_measured(page: Page) -> None:
    rank = Rank(page)
    rank.begin()
    rank.enter()
    rank.compute(10)
    rank.enter()
    rank.compute(10)
    rank.vote(1)
    assert rank.records() == []


def test_a_step_in_a_new_generation_is_not_measured(page: Page) -> None:
    rank = Rank(page)
    rank.begin()
    rank.generation = 2
    rank.compute(500)  # waits for the decision
    rank.enter()
    rank.vote(1)
    assert rank.records() == []
    rank.enter()
    rank.vote(10)
    (record,) = rank.records()
    assert (record.generation, record.step, record.steps) == (2, 3, 1)


def test_a_lost_vote_leaves_no_wait_behind(page: Page) -> None:
    rank = Rank(page)
    rank.begin()
    rank.own.begin_wait()  # severed in the wait: no end is seen
    rank.enter()
    rank.vote(50)
    rank.enter()
    rank.compute(70)
    rank.wait(20)
    rank.vote(10)
    assert rank.newest() == (100, 70, 0)


def test_fast_steps_are_recorded_in_powers_of_two_and_slow_ones_each(page: Page) -> None:
    rank = Rank(page)
    rank.begin()
    steps: list[int] = []
    for _ in range(4096):
        rank.enter()
        rank.compute(1)
        rank.vote(0)
        steps += [record.step for record in rank.records()]
    strides = {b - a for a, b in zip(steps[-50:], steps[-49:], strict=False)}
    assert strides == {32} and all(step % 32 == 0 for step in steps[-50:])
    for _ in range(200):
        rank.enter()
        rank.compute(200)
        rank.vote(0)
    steps = [record.step for record in rank.records()]
    assert {b - a for a, b in zip(steps[-20:], steps[-19:], strict=False)} == {1}


def test_a_large_world_has_fewer_records(page: Page) -> None:
    rank = Rank(page)
    rank.own.world = 16_384
    rank.begin()
    count = 0
    for _ in range(1000):
        rank.enter()
        rank.compute(100)
        rank.vote(0)
        count += len(rank.records())
    assert count < 100 / 2 + 10, "one each 2 to 4 s"


def test_a_reader_that_is_late_gets_the_newest_records(page: Page) -> None:
    for step in range(1, 3 * OWN_TIMES):
        page.put_own_time(OwnTimeRecord(1, step, step, 10 * step, 5 * step, step))
    count, records = page.own_times(0)
    assert count == 3 * OWN_TIMES - 1
    assert [record.step for record in records] == list(range(2 * OWN_TIMES + 1, 3 * OWN_TIMES))
    assert page.own_times(count) == (count, [])
    assert page.paces() == {}, "its neighbour in the page"
