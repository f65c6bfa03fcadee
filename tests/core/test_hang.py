"""The watch: who is blamed, when, and who is not."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.config import Limits
from outlast.core.detect.hang import Look, Memory, Verdict, timeout_ns, watch

S = 1_000_000_000
LIMITS = Limits(hang_floor_s=10, hang_ceiling_s=600, hang_factor=8)


def look(seat: int, moved_s: float, **changes: Any) -> Look:
    page: dict[str, Any] = {
        "worker": f"w{seat}", "seat": seat, "n": 40, "state": "running", "collectives": 17,
        "t_ns": int(moved_s * S), "t_state_ns": int(moved_s * S), "completed": 40, "letter": "S",
    }  # fmt: skip
    return Look(**{**page, **changes})


def known(*durations_s: float) -> Memory:
    return Memory(durations_ns=tuple(int(duration_s * S) for duration_s in durations_s))


def judge(memory: Memory, now_s: float, *looks: Look) -> Verdict:
    return watch(memory, looks, int(now_s * S), LIMITS)[1]


def test_the_one_that_the_others_wait_for_is_blamed() -> None:
    looks = [look(seat, 100) for seat in (0, 1, 3)] + [look(2, 99, collectives=16)]
    assert judge(known(0.5), 108, *looks) == Verdict()
    verdict = judge(known(0.5), 112.3, *looks)
    assert [fault.worker for fault in verdict.suspects] == ["w2"]
    fault = verdict.suspects[0]
    assert (fault.kind, fault.seat, fault.n) == ("hung", 2, 40)
    assert fault.detail == (
        "rank 2 has not moved for 13.3 s in phase 41, running, at collective 16; 3 other rank(s)"
        " wait for it (phase 41, running, at collective 17)"
    )
    assert verdict.retry is None


@pytest.mark.parametrize(
    ("durations_s", "timeout_s"),
    [((), 600), ((0.1,), 10), ((2.0, 0.1), 16), ((200.0,), 600), ((0.1, *[2.0] * 20), 16)],
)
def test_the_time_out_follows_the_runs_own_phases(
    durations_s: tuple[float, ...], timeout_s: float
) -> None:
    assert timeout_ns(known(*durations_s), look(0, 0), LIMITS) == timeout_s * S


@pytest.mark.parametrize("changes", [{"completed": 2}, {"state": "dry"}, {"state": "checkpoint"}])
def test_first_phases_and_slow_states_have_the_ceiling(changes: dict[str, Any]) -> None:
    assert timeout_ns(known(0.1), look(0, 0, **changes), LIMITS) == 600 * S


@pytest.mark.parametrize("state", ["waiting", "finished", "healing"])
def test_who_waits_by_design_never_trips(state: Any) -> None:
    assert judge(known(0.1), 9999, look(0, 0, state=state), look(1, 9998)) == Verdict()


def test_who_is_between_phases_is_behind_who_is_in_one() -> None:
    looks = [look(0, 100, state="idle", collectives=99), look(1, 100), look(2, 100, state="voting")]
    verdict = judge(known(0.1), 120, *looks)
    assert [fault.seat for fault in verdict.suspects] == [0]
    assert "the script's own code before phase 41" in verdict.suspects[0].detail


def test_all_at_the_same_place_is_nobodys_fault_and_said_once() -> None:
    looks = [look(0, 100, state="voting"), look(1, 101, state="voting")]
    memory, verdict = watch(known(0.1), looks, 120 * S, LIMITS)
    assert verdict.suspects == ()
    assert verdict.retry is not None and verdict.retry.kind == "transport"
    assert "all 2 ranks" in verdict.retry.detail
    memory, verdict = watch(memory, looks, 121 * S, LIMITS)
    assert verdict == Verdict()
    again = [look(0, 130, state="voting"), look(1, 130, state="voting")]
    assert watch(memory, again, 150 * S, LIMITS)[1].retry is not None


def test_nobody_is_blamed_while_the_last_one_still_moves() -> None:
    assert judge(known(0.1), 120, look(0, 100), look(1, 119, collectives=3)) == Verdict()
    assert judge(known(0.1), 120, look(0, 100), look(1, 119)) == Verdict()


def test_a_stopped_process_is_blamed_directly() -> None:
    memory = known(0.1)
    stopped = look(1, 100, letter="T", collectives=20)
    memory, verdict = watch(memory, [look(0, 100), stopped], 101 * S, LIMITS)
    assert verdict == Verdict()
    memory, verdict = watch(memory, [look(0, 110), stopped], 111 * S + 1, LIMITS)
    assert [(f.kind, f.worker) for f in verdict.suspects] == [("stopped", "w1")]
    memory, verdict = watch(memory, [look(0, 111), stopped], 112 * S, LIMITS)
    assert verdict == Verdict()  # said already
    assert watch(memory, [look(0, 121), stopped], 122 * S, LIMITS)[1].suspects  # and again later
    memory, _ = watch(memory, [look(0, 112), look(1, 112)], 113 * S, LIMITS)
    assert memory.stopped == {}


def test_durations_are_measured_and_disturbed_phases_are_not() -> None:
    memory = Memory()
    states = ["running", "running", "running", "checkpoint", "running", "running"]
    for second, (n, state) in enumerate(zip([1, 2, 3, 3, 4, 5], states, strict=True)):
        page = look(0, second, n=n, state=state)
        memory, _ = watch(memory, [page], second * S, LIMITS)
    assert memory.durations_ns == (1 * S, 1 * S)  # 2 -> 3 and 4 -> 5


def test_faults_carry_unix_times() -> None:
    looks = [look(0, 100), look(1, 100, collectives=1)]
    _, verdict = watch(known(0.1), looks, 120 * S, LIMITS, unix_ns=5_000 * S)
    assert verdict.suspects[0].t_ns == 4_980 * S
    assert judge(known(0.1), 120, *looks).suspects[0].t_ns == 0


def test_an_uninterruptible_wait_is_named() -> None:
    verdict = judge(known(0.1), 120, look(0, 100), look(1, 100, collectives=1, letter="D"))
    assert "uninterruptible" in verdict.suspects[0].detail


def test_a_script_that_ended_while_the_others_go_on_is_named() -> None:
    looks = [look(0, 100), look(1, 99, state="finished"), look(2, 100, state="voting")]
    assert judge(known(0.1), 100.5, *looks) == Verdict()
    (fault,) = judge(known(0.1), 101.5, *looks).suspects
    assert (fault.kind, fault.worker) == ("contract", "w1")
    assert "rank 1 exited after phase 40, while 2 other rank(s)" in fault.detail


def test_who_has_finished_all_phases_waits_for_a_joiner_of_the_last_one() -> None:
    looks = [look(0, 0, state="finished"), look(1, 0, state="dry", completed=0)]
    assert judge(known(0.1), 50, *looks) == Verdict()
