"""Incidents: cause, timeline, and phases that add up to their duration."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.events import (
    CheckpointSaved,
    Decided,
    FaultInjected,
    GenerationOpened,
    Reported,
    WorkerLost,
)
from outlast.telemetry.event_store import read_events
from outlast.telemetry.history.incident_course import Incident, Replacement
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import read_history


def told(story: SyntheticRun) -> list[Incident]:
    found = incidents(read_history(story.run_dir))
    for one in found:
        assert sum(one.phases_ms.values()) == pytest.approx(one.total_ms)
    return found


def test_a_kill_from_the_fault_to_the_redone_step(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=3).start().steps(4)
    story.broken(1, story.fault("killed", 1, signal=9, t_ns=story.t_ns + 20_000_000), ms=20)
    story.decide((1,), reason="a spare is warm").heal((1,), join_ms=400, copy_ms=90)
    story.steps(3, ms=100, script_ms=2).end()
    (one,) = told(story)
    assert one.phases_ms == {
        "notice": 1,
        "report": 6,
        "decide": 2,
        "join": 400,
        "connect": 10,
        "transfer": 90,
        "redo": 102,
    }
    assert (one.number, one.state, one.rung, one.verdict) == (1, "recovered", "replace", "redo")
    assert (one.generation_from, one.generation_to, one.n, one.step) == (1, 2, 4, 5)
    assert one.replaced == (Replacement(seat=1, old="w1-1", new="w1-3"),)
    assert [(c.donor, c.joiner, c.size_bytes) for c in one.copies] == [(2, 1, 104_000_000)]
    assert (one.reason, one.how, one.committed_steps_lost) == ("a spare is warm", ("pidfd",), 0)
    assert one.t_ns == read_events(tmp_path)[0].t_ns + (500 + 4 * 102 + 20) * 1_000_000


def test_an_injected_fault_dates_its_incident(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(1)
    struck_ns = story.wait(5)
    for worker in story.seats[:2]:  # worker 0's fault (slow) ends well: it breaks nothing
        story.write(
            worker,
            FaultInjected(t_ns=struck_ns, worker=worker, seat=0, spec="stop:rank=1", n=1, step=2),
        )
    story.t_ns = struck_ns
    story.broken(1, story.fault("stopped", 1), how="heartbeat", ms=7000)
    story.decide((1,)).heal((1,)).steps(1).end()
    (one,) = told(story)
    assert one.phases_ms["notice"] == 7001
    assert one.t_ns == struck_ns


def test_a_fault_that_broke_nothing_dates_no_later_incident(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(1)
    story.write(
        "w1-1",
        FaultInjected(t_ns=story.t_ns, worker="w1-1", seat=1, spec="slow:rank=1", n=1, step=2),
    )
    story.steps(5).killed(1).steps(1).end()
    assert told(story)[0].phases_ms["notice"] == 0


def test_a_second_failure_in_the_recovery_is_the_same_incident(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=3, spares=1).start().steps(2)
    story.broken(1, story.fault("killed", 1, signal=9)).decide((1,))
    story.wait(50)  # the spare dies while it builds its model
    story.notice(story.fault("killed", 1, signal=11))
    story.closed()
    story.wait(4)
    story.say(
        Reported(
            t_ns=story.t_ns, incident=1, generation=2, worker="w1-0", seat=0, n=2, state="idle"
        )
    )
    story.decide((1,), rung="respawn").heal((1,), join_ms=300, copy_ms=60)
    story.steps(2, ms=100, script_ms=0).end()
    (one,) = told(story)
    assert [fault.signal for fault in one.faults] == [9, 11]
    assert one.replaced == (Replacement(seat=1, old="w1-1", new="w1-4"),)
    assert (one.generation_from, one.generation_to, one.rung) == (1, 3, "respawn")
    assert one.phases_ms == {
        "notice": 0,
        "report": 6 + 4,
        "decide": 2 + 2,
        "join": 50 + 300,
        "connect": 10,
        "transfer": 60,
        "redo": 100,
    }


def test_a_failure_after_the_opening_is_the_next_incident(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, spares=2).start().steps(2).killed(2)
    story.broken(0, story.fault("killed", 0, signal=9), ms=30)  # before step 3 is redone
    story.decide((0,)).heal((0,)).steps(1, ms=100, script_ms=0).end()
    first, second = told(story)
    assert (first.state, second.state) == ("recovered", "recovered")
    assert first.phases_ms["redo"] == 31  # thrown away by the second one
    assert second.phases_ms["redo"] == 100
    assert [first.number, second.number] == [1, 2]
    assert first.step == second.step == 3


def test_a_restart_counts_what_was_rolled_back(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2, spares=0).start().steps(9)
    story.broken(0, story.fault("killed", 0, signal=9))
    story.decide((0, 1), rung="restart", n=5, step=5).heal((0, 1))
    story.steps(4, ms=100, script_ms=0)
    story.phase(ms=100).end()
    (one,) = told(story)
    assert (one.committed_steps_lost, one.step, one.n) == (4, 10, 5)
    assert one.phases_ms["redo"] == 500  # until step 10, which was interrupted, is there


def test_a_commit_needs_no_redo(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2, spares=0).start().steps(3)
    begin_ns = story.t_ns
    story.wait(100)
    story.incident = 1
    story.notice(story.fault("transport", 1), how="peer")
    story.closed()
    story.wait(5)
    story.say(
        Decided(
            t_ns=story.t_ns,
            incident=1,
            generation=2,
            verdict="commit",
            rung="retry",
            n=4,
            step=4,
            replaced=(),
            reason="rank 0 has applied it",
        )
    )
    for seat in range(2):
        t_ns = story.t_ns - 4_000_000 * (1 - seat)
        story.done(seat, n=4, step=4, begin_ns=begin_ns, t_ns=t_ns)
    story.wait(10)
    story.say(GenerationOpened(t_ns=story.t_ns, incident=1, generation=2, n=4))
    story.n = story.step = 4
    story.steps(1).end()
    (one,) = told(story)
    assert (one.state, one.step, one.committed_steps_lost) == ("recovered", 4, 0)
    assert one.phases_ms["redo"] == 0
    assert one.total_ms == 15


def test_an_end_inside_an_incident(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(2)
    fault = story.fault("raised", 1, traceback="Traceback\nKeyError: 'x'")
    story.broken(1, fault, how="report").end("user_error", 1, fault)
    (one,) = told(story)
    assert (one.state, one.rung) == ("stopped", "")
    assert one.phases_ms["report"] == 12 + 5 + 50


def test_an_incident_open_at_the_launchers_death_has_state_died(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(2)
    story.broken(1, story.fault("killed", 1, signal=9)).decide((1,))
    story.close()
    story.wait(3000)
    story.start(resumed_n=2, resumed_step=2).steps(1).killed(0).steps(1).end()
    first, second = told(story)
    assert (first.state, first.total_ms) == ("died", 11)
    assert (second.number, second.state) == (2, "recovered")


def test_the_fault_that_explains_the_others_is_the_cause(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(1)
    story.broken(0, story.fault("transport", 0), how="peer")
    story.notice(story.fault("killed", 2, signal=9))
    story.notice(story.fault("raised", 3, traceback="ValueError: no"), how="report")
    story.decide((2, 3)).heal((2, 3)).steps(1).end()
    (one,) = told(story)
    assert [fault.kind for fault in one.faults] == ["transport", "killed", "raised"]
    assert one.cause.kind == "raised"
    assert one.how == ("peer", "pidfd", "report")


def test_a_stop_loses_nothing_and_resets_nothing(tmp_path: Path) -> None:
    """With no survivor the decision to stop names phase 0: nobody goes there."""
    story = SyntheticRun(tmp_path, world=2, spares=0).start().steps(4)
    story.phase("checkpoint").say(
        CheckpointSaved(t_ns=story.t_ns, n=5, step=4, path="c", size_bytes=1, seconds=0.1)
    )
    story.steps(2)
    fault = story.fault("killed", 0, signal=9)
    story.broken(0, fault).give_up((0, 1)).end("gave_up", 3, fault)
    (one,) = told(story)
    assert (one.rung, one.state, one.committed_steps_lost) == ("stop", "stopped", 0)
    assert (one.n, one.step, one.checkpoint_step) == (7, 7, 4)
    assert one.replaced == ()  # nobody took the seats


def test_a_death_behind_the_last_step_is_over_when_the_generation_opens(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(5)
    story.broken(1, story.fault("killed", 1, signal=9, state="idle"))
    story.decide((1,)).heal((1,), join_ms=400)
    story.wait(7000)  # the script's tail, once more on the new worker
    story.end()
    (one,) = told(story)
    assert (one.state, one.step, one.where) == ("recovered", 5, "after the last step")
    assert one.phases_ms["redo"] == 0 and one.total_ms < 1000


def test_a_restart_behind_the_last_step_is_over_when_all_have_it_again(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2, spares=0).start().steps(5)
    story.broken(1, story.fault("killed", 1, signal=9, state="idle"))
    story.restart(n=2, step=2).steps(3, ms=100, script_ms=0)
    story.wait(7000)
    story.end()
    (one,) = told(story)
    assert (one.state, one.where, one.committed_steps_lost) == (
        "recovered",
        "after the last step",
        3,
    )
    assert one.phases_ms["redo"] == 300


def test_a_phase_that_only_a_dead_rank_completed_was_not_committed(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=3).start().steps(5)
    story.done(1, n=6, step=6)
    story.broken(1, story.fault("killed", 1, signal=9, n=6))
    story.decide((1,), n=5, step=5).heal((1,)).steps(1, ms=100, script_ms=0).end()
    (one,) = told(story)
    assert (one.committed_steps_lost, one.step, one.n) == (0, 6, 5)
    assert one.phases_ms["redo"] == 100


def test_a_restart_counts_new_workers_as_joining(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2, spares=0).start().steps(3)
    story.broken(0, story.fault("killed", 0, signal=9))
    story.restart(n=2, step=2, start_ms=4000).steps(2).end()
    (one,) = told(story)
    assert one.phases_ms["join"] == 4000
    assert one.phases_ms["connect"] == 10


@pytest.mark.parametrize(
    ("kind", "state", "behind", "where", "step"),
    [
        ("step", "running", 0, "in step 4", 4),
        ("step", "voting", 0, "in the vote of step 4", 4),
        ("step", "applying", 1, "while applying step 4", 4),
        ("eval", "running", 0, "in the evaluation after step 3", 3),
        ("checkpoint", "checkpoint", 0, "while the checkpoint was written, after step 3", 3),
        ("step", "idle", 0, "between phases, after step 3", 4),
        ("step", "", 0, "in step 4", 4),
    ],
)
def test_where_is_where_the_victim_was(
    tmp_path: Path, kind: str, state: str, behind: int, where: str, step: int
) -> None:
    """`behind`: the survivors have done the phase in which the victim died."""
    story = SyntheticRun(tmp_path, world=3).start().steps(3)
    fault = story.fault("killed", 1, signal=9, state=state)
    if behind:
        for seat in (0, 2):
            story.done(seat, n=4, step=4)
        story.n = story.step = 4
    story.broken(1, fault).decide((1,)).heal((1,)).phase(kind).steps(1).end()
    (one,) = told(story)
    assert (one.where, one.step, one.redone) == (where, step, not behind)


def test_the_trail_of_a_restart_is_not_that_of_what_follows(tmp_path: Path) -> None:
    """Phases have other numbers the second time: the checkpoint is not written again."""
    story = SyntheticRun(tmp_path, world=2, spares=0).start().steps(2).phase("checkpoint").steps(1)
    story.broken(0, story.fault("killed", 0, signal=9))
    story.restart(n=2, step=2).steps(4).end()
    (one,) = told(story)
    assert (one.where, one.committed_steps_lost) == ("in step 4", 1)


def test_a_step_that_a_first_decision_commits_is_lost_by_a_second_one(tmp_path: Path) -> None:
    """The victim dies while it applies step 4, and its replacement before the generation opens."""
    story = SyntheticRun(tmp_path, world=3).start().steps(3)
    for seat in (0, 2):
        story.done(seat, n=4, step=4)
    story.n = story.step = 4
    story.broken(1, story.fault("killed", 1, signal=9, state="applying")).decide((1,))
    story.broken(0, story.fault("killed", 0, signal=9))
    story.restart(n=0, step=0).steps(5).end()
    (one,) = told(story)
    assert (one.rung, one.committed_steps_lost) == ("restart", 4)


def test_a_drain_is_no_failure(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(5).drained()
    (one,) = told(story)
    assert one.is_drain and one.where == "after step 5"
    story = SyntheticRun(tmp_path / "broken").start().steps(5).killed(1).steps(1).end()
    assert not told(story)[0].is_drain


def test_a_spare_that_was_killed_dates_no_later_incident(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(1)
    spare = story.warm[0]
    story.write(
        spare,
        FaultInjected(t_ns=story.t_ns, worker=spare, seat=-1, spec="kill:spare=0", n=-1, step=-1),
    )
    fault = story.fault("killed", 1, worker=spare, seat=-1)
    story.say(WorkerLost(t_ns=story.wait(1), worker=spare, seat=-1, fault=fault))
    story.warm.clear()
    story.wait(306_000)
    story.killed(1).steps(1).end()
    assert told(story)[0].phases_ms["notice"] == 0
