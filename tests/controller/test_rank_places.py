"""Ranks of a pipeline: who is behind whom, and who is blamed where all wait."""

from __future__ import annotations

from typing import Any

from outlast.config import Limits
from outlast.controller.hang_detection import HangVerdict, WorkerHistory, watch
from outlast.controller.rank_places import are_known_behind, is_before, ranks_behind
from outlast.transport.worker_page import PhasePace, WorkerObservation

S = 1_000_000_000
LIMITS = Limits(hang_floor_s=10, hang_ceiling_s=600, hang_factor=8)
STEP = 11
FIRST, SECOND = (0,), (1,)


def look(seat: int, stages: tuple[int, ...], collectives: int, **changes: Any) -> WorkerObservation:
    page: dict[str, Any] = {
        "worker": f"w{seat}", "seat": seat, "n": 40, "state": "running", "t_ns": 100 * S,
        "key": STEP, "paces": {STEP: PhasePace(40, S // 10)}, "letter": "S", "waits": True,
    }  # fmt: skip
    return WorkerObservation(stages=stages, collectives=collectives, **{**page, **changes})


def pipeline(*collectives: int, **changes: Any) -> list[WorkerObservation]:
    """Ranks 0 and 1 hold the first stage, ranks 2 and 3 the second, which communicates less."""
    stages = (FIRST, FIRST, SECOND, SECOND)
    pairs = zip(stages, collectives, strict=True)
    return [look(seat, held, count, **changes) for seat, (held, count) in enumerate(pairs)]


def judge(now_s: int, looks: list[WorkerObservation]) -> HangVerdict:
    return watch(WorkerHistory(), looks, now_s * S, LIMITS)[1]


def seats(looks: list[WorkerObservation]) -> list[int]:
    return [each.seat for each in looks]


def test_collectives_are_compared_among_replicas_of_a_stage() -> None:
    first, replica, second, _ = pipeline(9, 8, 5, 5)
    assert is_before(replica, first) and not is_before(first, replica)
    assert not is_before(second, first) and not is_before(first, second)
    assert is_before(second, look(0, FIRST, 9, state="voting"))
    assert is_before(look(2, SECOND, 50, state="idle"), second)
    assert is_before(second, look(0, FIRST, 0, n=41))


def test_ranks_of_another_stage_are_not_behind_for_communicating_less() -> None:
    assert seats(ranks_behind(pipeline(9, 9, 5, 5))) == [0, 1, 2, 3]
    assert seats(ranks_behind(pipeline(9, 9, 5, 4))) == [3]
    assert seats(ranks_behind(pipeline(8, 9, 4, 5))) == [0, 2]
    assert are_known_behind(*2 * [pipeline(9, 9, 5, 4)]) is False
    assert are_known_behind(pipeline(9, 9, 5, 4)[3:], pipeline(9, 9, 5, 4))


def test_stages_at_their_own_counts_are_at_the_same_place() -> None:
    """The second stage has the fewest collectives, which is no reason to blame it."""
    verdict = judge(112, pipeline(9, 9, 5, 5))
    assert not verdict.suspects and verdict.retry is not None
    assert verdict.retry.detail.startswith("all 4 ranks have been at the same place for 12.0 s")


def test_a_rank_behind_its_own_replica_is_blamed() -> None:
    verdict = judge(112, pipeline(9, 9, 5, 4))
    assert [fault.seat for fault in verdict.suspects] == [3]
    assert verdict.suspects[0].detail == (
        "rank 3 made no progress for 12.0 s in phase 41, running, at collective 4; 1 other rank(s)"
        " wait for it (phase 41, running, at collective 5)"
    )


def test_two_stages_that_may_wait_for_each_other_are_retried_before_they_are_blamed() -> None:
    memory, verdict = watch(WorkerHistory(), pipeline(8, 9, 4, 5), 112 * S, LIMITS)
    assert not verdict.suspects and verdict.retry is not None
    assert verdict.retry.detail == (
        "the pipeline has stood for 12.0 s: rank 0, rank 2 waited at phase 41, running, at"
        " collective 8; a message between stages was lost, or a stage did not send it"
    )
    assert (verdict.retry.kind, verdict.retry.worker) == ("transport", "")
    memory, verdict = watch(memory, pipeline(8, 9, 4, 5), 113 * S, LIMITS)
    assert verdict == HangVerdict()
    again = pipeline(8, 9, 4, 5, t_ns=115 * S)
    memory, verdict = watch(memory, again, 150 * S, LIMITS)
    assert [fault.seat for fault in verdict.suspects] == [0, 2]


def test_a_stage_whose_neighbour_is_in_the_vote_is_retried_first() -> None:
    """The last gradient of the second stage is on its way when the first one waits."""
    looks = [look(0, FIRST, 9), look(1, SECOND, 7, state="voting")]
    memory, verdict = watch(WorkerHistory(), looks, 112 * S, LIMITS)
    assert not verdict.suspects and verdict.retry is not None
    later = [look(0, FIRST, 9, t_ns=115 * S), look(1, SECOND, 7, state="voting", t_ns=115 * S)]
    memory, verdict = watch(memory, later, 150 * S, LIMITS)
    assert [fault.seat for fault in verdict.suspects] == [0]


def test_a_rank_that_votes_too_early_is_found_among_its_replicas() -> None:
    looks = pipeline(9, 9, 5, 5)
    early = look(3, SECOND, 4, state="voting")
    memory, verdict = watch(WorkerHistory(), [*looks[:3], early], 112 * S, LIMITS)
    assert verdict.retry is not None and verdict.retry.detail.startswith("rank 3 reached the vote")
    looks = pipeline(9, 9, 5, 5, t_ns=115 * S)
    early = look(3, SECOND, 4, state="voting", t_ns=115 * S)
    memory, verdict = watch(memory, [*looks[:3], early], 150 * S, LIMITS)
    assert [fault.seat for fault in verdict.suspects] == [3]


def test_nobody_is_blamed_while_a_rank_behind_computes() -> None:
    looks = pipeline(8, 9, 4, 5)
    computing = look(2, SECOND, 4, t_work_ns=111 * S)
    assert judge(112, [*looks[:2], computing, looks[3]]) == HangVerdict()
