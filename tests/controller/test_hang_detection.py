"""Tests of hang detection: suspected ranks, timing, and innocent ranks."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.config import Limits
from outlast.controller.hang_detection import (
    HangVerdict,
    WorkerHistory,
    timeout_ns,
    watch,
)
from outlast.transport.worker_page import (
    UNSEEN,
    WARM_PHASES,
    PhasePace,
    WorkerObservation,
    phase_key,
    updated_pace,
)

S = 1_000_000_000
LIMITS = Limits(hang_floor_s=10, hang_ceiling_s=600, hang_factor=8)
STEP, EVALUATION = 11, 12
FAST = {STEP: PhasePace(40, S // 10)}


def look(seat: int, moved_s: float, **changes: Any) -> WorkerObservation:
    page: dict[str, Any] = {
        "worker": f"w{seat}", "seat": seat, "n": 40, "state": "running", "collectives": 17,
        "t_ns": int(moved_s * S), "key": STEP, "paces": FAST, "letter": "S", "waits": True,
    }  # fmt: skip
    return WorkerObservation(**{**page, **changes})


def judge(now_s: float, *looks: WorkerObservation) -> HangVerdict:
    return watch(WorkerHistory(), looks, int(now_s * S), LIMITS)[1]


def test_the_one_that_the_others_wait_for_is_blamed() -> None:
    looks = [look(seat, 100) for seat in (0, 1, 3)] + [look(2, 99, collectives=16)]
    assert judge(108, *looks) == HangVerdict()
    verdict = judge(112.3, *looks)
    assert [fault.worker for fault in verdict.suspects] == ["w2"]
    fault = verdict.suspects[0]
    assert (fault.kind, fault.seat, fault.n) == ("hung", 2, 40)
    assert fault.detail == (
        "rank 2 made no progress for 13.3 s in phase 41, running, at collective 16; 3 other rank(s)"
        " wait for it (phase 41, running, at collective 17)"
    )
    assert verdict.retry is None


def test_an_agent_of_several_judges_stopped_processes_and_the_controller_the_rest() -> None:
    behind = [look(0, 100), look(1, 99, collectives=16)]
    stopped = [look(0, 100), look(1, 100, letter="T")]
    for looks, by_agent, by_controller in ((behind, 0, 1), (stopped, 1, 0)):
        memory = watch(WorkerHistory(), looks, 120 * S, LIMITS)[0]
        for parts, suspects in (("stopped", by_agent), ("progress", by_controller)):
            verdict = watch(memory, looks, 140 * S, LIMITS, parts=parts)[1]
            assert (len(verdict.suspects), verdict.retry) == (suspects, None)


def skipped(*seats: int, world: int = 3, moved_s: float = 100) -> list[WorkerObservation]:
    """`seats` left the fourth collective out; all the others wait in it."""
    voting: dict[str, Any] = {"state": "voting", "collectives": 3}
    waiting: dict[str, Any] = {"collectives": 4}
    return [look(seat, moved_s, **(voting if seat in seats else waiting)) for seat in range(world)]


def test_who_left_a_collective_out_is_blamed_when_a_retry_does_not_help() -> None:
    memory, verdict = watch(WorkerHistory(), skipped(2), 111 * S, LIMITS)
    assert not verdict.suspects and verdict.retry is not None
    said = "rank 2 reached the vote of phase 41 after 3 collective(s), but skipped one that 2 other"
    assert verdict.retry.detail.startswith(said)
    assert (verdict.retry.kind, verdict.retry.worker) == ("transport", "")
    memory, verdict = watch(memory, skipped(2), 111 * S, LIMITS)
    assert verdict == HangVerdict(), "it was said"
    memory, verdict = watch(memory, skipped(2, moved_s=112), 123 * S, LIMITS)
    (fault,) = verdict.suspects
    assert (fault.kind, fault.worker, fault.seat) == ("hung", "w2", 2)
    assert fault.detail.startswith(said) and verdict.retry is None


def test_not_all_who_wait_in_it_are_seen_to_be_late_at_one_look() -> None:
    early = [*skipped(2)[1:], look(0, 102, collectives=4)]
    assert judge(111, *early) == HangVerdict()
    assert judge(113, *early).retry is not None
    computing = [*skipped(2)[1:], look(0, 100, collectives=4, t_work_ns=699 * S)]
    assert judge(700, *computing) == HangVerdict()
    assert judge(701, *computing).retry is not None


def test_of_two_ranks_neither_is_killed_at_first() -> None:
    assert judge(111, *skipped(0, world=2)).retry is not None


def test_whoever_is_behind_is_blamed_where_others_could_not_wait_for_the_vote() -> None:
    """A rank that has made as many collectives, most ranks in the vote, one that is behind."""
    one_more = [*skipped(2), look(3, 100, state="voting", collectives=4)]
    assert [fault.seat for fault in judge(111, *one_more).suspects] == [0, 1]
    assert [fault.seat for fault in judge(111, *skipped(1, 2)).suspects] == [0]
    behind = [*skipped(2), look(3, 100, collectives=2)]
    assert [fault.seat for fault in judge(111, *behind).suspects] == [3]


@pytest.mark.parametrize(
    ("paces", "timeout_s"),
    [
        ({}, 600),
        ({STEP: PhasePace(2, 0)}, 600),  # its first phases: nothing is known
        ({STEP: PhasePace(9, S // 10)}, 10),
        ({STEP: PhasePace(9, 2 * S)}, 16),
        ({STEP: PhasePace(9, 200 * S)}, 600),
        ({STEP: PhasePace(9, 2 * S), EVALUATION: PhasePace(9, 30 * S)}, 16),
        (
            {EVALUATION: PhasePace(9, 2 * S)},
            600,
        ),  # another kind of phase says nothing about this one
    ],
)
def test_the_time_out_follows_this_kind_of_phase(
    paces: dict[int, PhasePace], timeout_s: float
) -> None:
    page = look(0, 0, paces=paces)
    assert timeout_ns(page, [page], LIMITS) == timeout_s * S


@pytest.mark.parametrize("state", ["dry", "checkpoint", "setup", "starting", "idle"])
def test_what_may_take_its_time_has_the_ceiling(state: Any) -> None:
    page = look(0, 0, state=state)
    assert timeout_ns(page, [page, look(1, 0)], LIMITS) == 600 * S


@pytest.mark.parametrize(
    ("others_s", "timeout_s"), [(0.1, 30), (2.0, 48), (4.0, 60), (10.0, 80), (100.0, 600)]
)
def test_a_newcomer_is_given_more_than_the_others_and_not_the_ceiling(
    others_s: float, timeout_s: float
) -> None:
    others = [look(seat, 0, paces={STEP: PhasePace(40, int(others_s * S))}) for seat in (0, 1)]
    newcomer = look(2, 0, paces={STEP: PhasePace(1, 0)})
    assert timeout_ns(newcomer, [*others, newcomer], LIMITS) == timeout_s * S
    assert timeout_ns(look(2, 0, paces={}, state="dry"), others, LIMITS) == 600 * S


def test_who_computes_is_not_stuck_until_the_ceiling() -> None:
    waiting = [look(seat, 100) for seat in (0, 1)]
    behind = look(2, 99, collectives=3, t_work_ns=398 * S)
    assert judge(400, *waiting, behind) == HangVerdict()
    assert [fault.seat for fault in judge(409, *waiting, behind).suspects] == [2]
    endless = look(2, 99, collectives=3, t_work_ns=700 * S)
    assert judge(698, *waiting, endless) == HangVerdict()
    assert [fault.seat for fault in judge(700, *waiting, endless).suspects] == [2]


def test_nobody_is_retried_while_one_at_the_same_place_computes() -> None:
    looks = [look(0, 100), look(1, 100, t_work_ns=119 * S)]
    assert judge(120, *looks) == HangVerdict()
    assert judge(130, *looks).retry is not None


def test_each_retry_of_the_same_phase_is_given_twice_the_time() -> None:
    memory, asked = WorkerHistory(), []
    began_s, now_s = 100, 100
    while now_s < 1400:
        now_s += 1
        looks = [look(seat, began_s, key=STEP) for seat in (0, 1)]
        memory, verdict = watch(memory, looks, now_s * S, LIMITS)
        if verdict.retry:
            asked.append(now_s - began_s)
            began_s = now_s
    assert asked == [11, 21, 41, 81, 161, 321, 601]
    looks = [look(seat, now_s, n=41) for seat in (0, 1)]  # that phase is over: patience is as ever
    memory, _ = watch(memory, looks, (now_s + 1) * S, LIMITS)
    assert watch(memory, looks, (now_s + 11) * S, LIMITS)[1].retry is not None


def test_a_pace_follows_the_slow_ones_at_once_and_forgets_them_slowly() -> None:
    pace = UNSEEN
    for took_s in (60.0, 30.0):  # a compiler
        pace = updated_pace(pace, int(took_s * S))
    assert pace == (WARM_PHASES, 0)
    pace = updated_pace(pace, S)
    assert pace == (WARM_PHASES + 1, S)
    pace = updated_pace(updated_pace(pace, 16 * S), S)
    assert pace.slowest_ns == 15 * S
    for _ in range(100):
        pace = updated_pace(pace, S)
    assert pace.slowest_ns < 1.1 * S
    assert updated_pace(UNSEEN, 0).slowest_ns == 0 and phase_key("step train") != phase_key(
        "eval train"
    )


@pytest.mark.parametrize("state", ["waiting", "finished", "healing"])
def test_who_waits_by_design_never_trips(state: Any) -> None:
    assert judge(9999, look(0, 0, state=state), look(1, 9998)) == HangVerdict()


def test_the_scripts_own_code_between_phases_may_take_its_time() -> None:
    looks = [look(0, 100, state="idle", collectives=99), look(1, 100), look(2, 100, state="voting")]
    assert judge(111, *looks) == HangVerdict()  # it saves or uploads while the others wait for it
    verdict = judge(701, *looks)
    assert [fault.seat for fault in verdict.suspects] == [0]
    assert "the script's own code before phase 41" in verdict.suspects[0].detail


def test_all_at_the_same_place_is_nobodys_fault_and_said_once() -> None:
    looks = [look(0, 100, state="voting"), look(1, 101, state="voting")]
    memory, verdict = watch(WorkerHistory(), looks, 120 * S, LIMITS)
    assert verdict.suspects == ()
    assert verdict.retry is not None and verdict.retry.kind == "transport"
    assert "all 2 ranks" in verdict.retry.detail
    memory, verdict = watch(memory, looks, 121 * S, LIMITS)
    assert verdict == HangVerdict()
    again = [look(0, 130, state="voting"), look(1, 130, state="voting")]
    assert watch(memory, again, 151 * S, LIMITS)[1].retry is not None


def test_nobody_is_blamed_while_the_last_one_still_moves() -> None:
    assert judge(120, look(0, 100), look(1, 119, collectives=3)) == HangVerdict()
    assert judge(120, look(0, 100), look(1, 119)) == HangVerdict()


@pytest.mark.parametrize("heals", [True, False])
def test_who_waited_for_the_culprit_is_given_the_floor_to_be_woken(heals: bool) -> None:
    """Its generation is closed; under load one survivor still stands where it stood for long."""
    culprit, slow = look(1, 100, collectives=16), look(0, 100, state="voting")
    memory, verdict = watch(WorkerHistory(), [slow, culprit, look(2, 100)], 701 * S, LIMITS)
    assert [fault.seat for fault in verdict.suspects] == [1]
    other = [look(2, 702, state="healing")] if heals else []  # or it was the first to die
    for now_s in (702, 707, 712):
        memory, verdict = watch(memory, [slow, *other], now_s * S, LIMITS)
        assert verdict == HangVerdict()
    memory, verdict = watch(memory, [slow, *other], 713 * S, LIMITS)
    assert not verdict.suspects  # the controller has a deadline for its answer to Close


def test_a_retry_blames_nobody_who_is_slow_to_hear_of_it() -> None:
    looks = [look(0, 100, state="voting"), look(1, 100, state="voting")]
    memory, verdict = watch(WorkerHistory(), looks, 120 * S, LIMITS)
    assert verdict.retry is not None
    woken = [look(0, 121, state="healing"), looks[1]]
    assert watch(memory, woken, 121 * S, LIMITS)[1] == HangVerdict()


def test_two_that_hang_at_once_are_blamed_at_once() -> None:
    looks = [look(0, 100), look(1, 99, collectives=16), look(2, 99, collectives=16)]
    assert [fault.seat for fault in judge(120, *looks).suspects] == [1, 2]


def test_a_stopped_process_is_blamed_directly() -> None:
    memory = WorkerHistory()
    stopped = look(1, 100, letter="T", collectives=20)
    memory, verdict = watch(memory, [look(0, 100), stopped], 101 * S, LIMITS)
    assert verdict == HangVerdict()
    limit_ns = int(LIMITS.stopped_s * S)
    memory, verdict = watch(memory, [look(0, 103), stopped], 101 * S + limit_ns, LIMITS)
    assert verdict == HangVerdict()
    memory, verdict = watch(memory, [look(0, 103), stopped], 101 * S + limit_ns + 1, LIMITS)
    assert [(f.kind, f.worker) for f in verdict.suspects] == [("stopped", "w1")]
    memory, verdict = watch(memory, [look(0, 111), stopped], 112 * S, LIMITS)
    assert verdict == HangVerdict()  # said already
    assert watch(memory, [look(0, 121), stopped], 122 * S, LIMITS)[1].suspects  # and again later
    memory, _ = watch(memory, [look(0, 112), look(1, 112)], 113 * S, LIMITS)
    assert memory.stopped == {}


def test_a_stopped_process_is_called_stopped_and_not_hung() -> None:
    """It moved last just before it was first seen stopped: both verdicts come due together."""
    memory, waiting = WorkerHistory(), look(0, 100)
    stopped = look(1, 99.9, letter="T", collectives=16)
    for now_s in (100, 101, 110):
        memory, verdict = watch(memory, [waiting, stopped], now_s * S, LIMITS)
        assert [fault.kind for fault in verdict.suspects] == ["stopped"] * (now_s == 110)


def test_faults_carry_unix_times() -> None:
    looks = [look(0, 100), look(1, 100, collectives=1)]
    _, verdict = watch(WorkerHistory(), looks, 120 * S, LIMITS, unix_ns=5_000 * S)
    assert verdict.suspects[0].t_ns == 4_980 * S
    assert judge(120, *looks).suspects[0].t_ns == 0


def test_an_uninterruptible_wait_is_named() -> None:
    verdict = judge(120, look(0, 100), look(1, 100, collectives=1, letter="D"))
    assert "uninterruptible" in verdict.suspects[0].detail


@pytest.mark.parametrize("n", [40, 41])  # 41: it has ended behind the vote of phase 41
def test_a_script_that_ended_while_the_others_go_on_is_named(n: int) -> None:
    looks = [look(0, 100, n=n), look(1, 99, state="finished"), look(2, 100, state="voting", n=n)]
    assert judge(100.5, *looks) == HangVerdict()
    (fault,) = judge(101.5, *looks).suspects
    assert (fault.kind, fault.worker) == ("contract", "w1")
    assert "rank 1 exited after phase 40, while 2 other rank(s)" in fault.detail


def test_who_has_finished_all_phases_waits_for_a_joiner_of_the_last_one() -> None:
    looks = [look(0, 0, state="finished"), look(1, 0, state="dry", paces={})]
    assert judge(50, *looks) == HangVerdict()


def out(seat: int, moved_s: float, **changes: Any) -> WorkerObservation:
    """A rank that stands in an attempt, outside any collective."""
    return look(seat, moved_s, waits=False, **changes)


def waits(
    *outside: int, moved_s: float = 100, world: int = 4, **changes: Any
) -> list[WorkerObservation]:
    """`outside` stand still in the middle of an attempt; all others wait in a collective."""
    return [
        out(seat, moved_s, **changes) if seat in outside else look(seat, moved_s)
        for seat in range(world)
    ]


@pytest.mark.parametrize("state", ["running", "applying", "idle", "setup", "dry"])
def test_all_who_wait_outside_a_collective_have_the_ceiling(state: Any) -> None:
    """Rollouts, uploads, sleeps: no message can be lost where none is awaited."""
    looks = waits(0, 1, 2, 3, state=state)
    assert judge(699, *looks) == HangVerdict()
    verdict = judge(701, *looks)
    assert [fault.seat for fault in verdict.suspects] == [0, 1, 2, 3] and verdict.retry is None


def test_a_rank_that_applies_has_the_ceiling_while_all_others_wait_for_it() -> None:
    looks = waits(0, state="applying")
    assert judge(699, *looks) == HangVerdict()
    assert [fault.seat for fault in judge(701, *looks).suspects] == [0]


def test_one_outside_is_given_up_once_and_then_has_the_ceiling_there() -> None:
    memory, verdict = watch(WorkerHistory(), waits(0), 111 * S, LIMITS)
    (fault,) = verdict.suspects
    assert (fault.kind, fault.seat) == ("hung", 0)
    assert "3 other rank(s) wait for it" in fault.detail
    assert "--limit hang_floor_s above 10" in fault.detail and "600 s" in fault.detail
    redone = [look.__class__(**{**_fields(look), "worker": f"x{look.seat}"}) for look in waits(0)]
    healed = [*redone[:1], *waits(0)[1:]]  # a successor sits there, and waits for the same
    memory, verdict = watch(memory, healed, 699 * S, LIMITS)
    assert verdict == HangVerdict()
    elsewhere = waits(0, moved_s=700, collectives=3)  # in the same phase: still the ceiling
    memory, verdict = watch(memory, elsewhere, 750 * S, LIMITS)
    assert verdict == HangVerdict()
    later = waits(0, moved_s=800, n=60)  # the place is known
    memory, verdict = watch(memory, later, 850 * S, LIMITS)
    assert verdict == HangVerdict()
    other = waits(0, moved_s=900, n=61, collectives=3)  # another one is not
    memory, verdict = watch(memory, other, 911 * S, LIMITS)
    assert [fault.seat for fault in verdict.suspects] == [0]


def _fields(look: WorkerObservation) -> dict[str, Any]:
    return {name: getattr(look, name) for name in look.__struct_fields__}


def test_most_ranks_outside_are_no_hang_and_few_are() -> None:
    assert judge(120, *waits(1, 2, 3)) == HangVerdict()
    assert [fault.seat for fault in judge(120, *waits(1, 2)).suspects] == [1, 2]


def test_who_waits_is_not_blamed_for_having_made_fewer_collectives() -> None:
    """A pipeline: rank 0 waits for rank 1, which waits for rank 2, which waits for a request."""
    looks = [look(0, 100, collectives=3), look(1, 100, collectives=5), out(2, 90, collectives=9)]
    assert [fault.seat for fault in judge(111, *looks).suspects] == [2]


def test_a_place_where_peers_have_stood_long_is_no_place_to_hang_at() -> None:
    """Rollouts of different lengths: the last one is given what the first ones took."""
    memory, _ = watch(WorkerHistory(), waits(0, 1, 2, 3), 101 * S, LIMITS)
    done = [look(seat, 130, collectives=18) for seat in (1, 2, 3)]
    memory, verdict = watch(memory, [out(0, 100), *done], 131 * S, LIMITS)
    assert verdict == HangVerdict() and memory.stood == (40, 30 * S)
    memory, verdict = watch(memory, [out(0, 100), *done], 339 * S, LIMITS)
    assert verdict == HangVerdict()
    memory, verdict = watch(memory, [out(0, 100), *done], 341 * S, LIMITS)
    assert [fault.seat for fault in verdict.suspects] == [0]


def test_nobody_outside_is_given_up_while_others_heal() -> None:
    """Its generation is over, and it may be the only one that holds the state."""
    looks = [out(0, 100), look(1, 100, state="healing")]
    assert judge(699, *looks) == HangVerdict()
    assert [fault.seat for fault in judge(701, *looks).suspects] == [0]


def test_a_main_thread_that_is_woken_goes_on_unless_it_waits_for_others() -> None:
    """An upload makes the kernel wake its thread; a wait for other ranks has timers of its own."""
    assert judge(120, *waits(1, 2, t_woken_ns=119 * S)) == HangVerdict()
    woken = [look(seat, 100, t_woken_ns=119 * S) for seat in (0, 1)]
    assert judge(120, *woken).retry is not None
