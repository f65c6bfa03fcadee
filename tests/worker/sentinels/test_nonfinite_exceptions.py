"""Exceptions of the script behind numbers that are not finite: what ranks know, and who moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from outlast import events
from outlast.controller.sentinels.nonfinite_rule import NonFiniteWord
from outlast.worker.sentinels.nonfinite_exceptions import ExceptionWord, NonFiniteExceptions
from outlast.worker.worker_events import WorkerEvents

FOUND = "gradient of w (3 of 4 elements)"


def word(seat: int, *, is_own: bool) -> NonFiniteWord:
    return NonFiniteWord(found=FOUND, is_own=is_own, worker=f"w1-{seat}", host="h", device="GPU 0")


class Job:
    """The ranks of a job, all before phase n+1."""

    def __init__(self, world: int = 2, n: int = 5) -> None:
        self.status: Any = SimpleNamespace(n=n)
        self.ranks = [NonFiniteExceptions(self.status) for _ in range(world)]

    def fail(self, *own: int, raising: tuple[int, ...] = (0, 1)) -> None:
        """Let an exception end an attempt, which these ranks' contributions have spoiled."""
        for seat in raising:
            self.ranks[seat].add(seat, word(seat, is_own=seat in own), RuntimeError())
        self.meet()

    def meet(self) -> None:
        """Begin a new generation."""
        sent = [msgspec.msgpack.encode(rank.word()) for rank in self.ranks]
        words = [msgspec.msgpack.decode(one, type=ExceptionWord) for one in sent]
        for rank in self.ranks:
            rank.learn(words)

    def requests(self) -> list[int]:
        return [seat for seat, rank in enumerate(self.ranks) if rank.request(seat)]

    def findings(self) -> list[tuple[str, str]]:
        """Complete the phase; return severity and worker of the findings."""
        found: list[tuple[str, str]] = []
        seats = range(len(self.ranks))
        for seat, rank in enumerate(self.ranks):
            timeline = WorkerEvents(None, f"w1-{seat}")
            timeline.seat = seat

            def emit(event: events.AnyEvent) -> None:
                assert isinstance(event, events.Warned)
                found.append((event.severity, event.worker))

            timeline.emit = emit
            rank.report_cure(timeline, 6, list(seats))
        return found


def test_the_rank_that_brought_it_asks_once_and_after_the_second_exception() -> None:
    job = Job()
    job.fail(1)
    assert not job.requests()
    job.fail(1)
    assert job.requests() == [1]
    assert not job.requests()
    job.meet()
    job.fail(1)
    assert not job.requests()


def test_a_rank_that_alone_raises_is_counted_on_all() -> None:
    """Anomaly detection raises where the NaN is, while the others wait in a reduction."""
    job = Job(world=3)
    job.fail(2, raising=(2,))
    job.fail(2, raising=(2,))
    assert [rank.failures for rank in job.ranks] == [2, 2, 2]
    assert job.requests() == [2]


def test_nobody_asks_where_all_or_none_brought_it() -> None:
    for own in ((), (0, 1)):
        job = Job()
        job.fail(*own)
        job.fail(*own)
        assert not job.requests()


def test_a_worker_that_takes_the_rank_knows_what_was_before_and_does_not_ask_again() -> None:
    job = Job()
    job.fail(1)
    job.fail(1)
    assert job.requests() == [1]
    job.ranks[1] = NonFiniteExceptions(job.status)
    job.meet()
    for rank in job.ranks:
        rank.connected([1])
    assert job.ranks[1].failures == 2
    text = job.ranks[1].add(1, word(1, is_own=True), RuntimeError())
    assert "before, rank 1 brought it, on GPU 0 of h (w1-1)" in text
    job.meet()
    assert not job.requests()


def test_a_cure_names_the_device_that_was_left() -> None:
    job = Job()
    job.fail(1)
    job.fail(1)
    for rank in job.ranks:
        rank.connected([1])
    assert job.findings() == [("drain", "w1-1")]


def test_a_cure_in_place_is_a_transient_error_there() -> None:
    job = Job()
    job.fail(1)
    assert job.findings() == [("warn", "w1-1")]
    assert not job.findings()


def test_another_phase_begins_anew() -> None:
    job = Job()
    job.fail(1)
    job.status.n += 1
    assert not job.ranks[0].failures
    assert "before" not in job.ranks[1].add(1, word(1, is_own=True), RuntimeError())
    job.meet()
    assert job.ranks[0].failures == 1 and not job.requests()


def test_torchs_anomaly_detection_is_evidence_by_itself() -> None:
    job = Job()
    error = RuntimeError("Function 'SqrtBackward0' returned nan values in its 0th output.")
    for _ in range(2):
        text = job.ranks[1].add(1, NonFiniteWord(), error)
        job.meet()
    assert text.startswith("the gradient in backward is not finite")
    assert job.requests() == [1]


def test_exceptions_for_other_reasons_are_counted_and_ask_for_nothing() -> None:
    job = Job()
    for _ in range(3):
        for seat, rank in enumerate(job.ranks):
            assert not rank.add(seat, NonFiniteWord(), RuntimeError())
        job.meet()
        assert not job.requests()
    assert not job.findings()
