"""Explanations of incidents: correct, complete and formatted."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.events import CheckpointSaved
from outlast.telemetry.event_store import Life
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import read_history
from outlast.telemetry.incident_explanation import explain

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7\nValueError: bad batch'


def explained(run_dir: Path, width: int = 110) -> str:
    out = io.StringIO()
    explain(incidents(read_history(run_dir)), Console(file=out, width=width))
    return out.getvalue()


def test_a_replacement(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(5).killed(2).steps(2)
    story.end()
    text = explained(tmp_path)
    for said in (
        "rank 2 was killed by SIGKILL ──",
        "(w1-2, node-1)",
        "the agent's pidfd reported the end",
        "step 6, generation 1",
        "replace: another worker took the seat",
        "a warm spare is there",
        "rank 2: w1-2 was replaced by w1-4",
        "every committed step",
        "99 MiB from rank 3 in 90 ms (1.1 GiB/s)",
        "recovered in generation 2, 613 ms in all",
    ):
        assert said in text, said
    phases = [line.split()[1:3] for line in text.splitlines() if " ms " in line and "█" in line]
    assert ["join", "400.0"] in phases and ["redo", "102.0"] in phases


def test_the_longest_phase_has_the_longest_bar(tmp_path: Path) -> None:
    SyntheticRun(tmp_path).start().steps(5).killed(2).steps(2).end()
    bars = {
        line.split()[1]: line.count("█") for line in explained(tmp_path).splitlines() if "█" in line
    }
    assert max(bars, key=lambda phase: bars[phase]) == "join"
    assert bars["join"] == 30 and bars["transfer"] == 7


def test_phases_that_did_not_happen_take_no_line(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(1)
    story.broken(1, story.fault("raised", 1), how="report").decide(rung="retry").heal()
    story.steps(1).end()
    text = explained(tmp_path)
    assert " report " in text and " join " not in text and " transfer " not in text


def test_a_traceback_is_shown_once(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(2)
    for _ in range(3):
        fault = story.fault("raised", 1, traceback=TRACEBACK)
        story.broken(1, fault, how="report").decide(rung="retry").heal()
    fault = story.fault("raised", 1, traceback=TRACEBACK)
    story.broken(1, fault, how="report").end("user_error", 1, fault)
    text = explained(tmp_path)
    assert text.count("line 7") == 1
    assert text.count("the same as in incident 1") == 3
    assert "rank 1 raised ValueError: bad batch" in text
    assert "the run ended with it" in text
    assert "the run ended before anything was decided" in text


def test_a_peers_broken_connection_is_an_echo(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(1)
    noise = "RuntimeError: pair.cc:537 Read error: Connection reset by peer. " * 20
    story.broken(0, story.fault("transport", 0, detail=noise), how="peer")
    story.notice(story.fault("killed", 2, signal=9))
    story.decide((2,)).heal((2,)).steps(1).end()
    text = explained(tmp_path)
    assert "rank 0: the connection to a peer broke" in text
    assert "pair.cc" not in text
    assert "rank 2 was killed by SIGKILL (w1-2, node-1)" in text


def test_a_long_error_leaves_the_frame_whole(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(1)
    fault = story.fault("raised", 1, traceback="pkg.errors.DataError: " + "long " * 80)
    story.broken(1, fault, how="report").decide(rung="retry").heal().steps(1).end()
    first = explained(tmp_path).splitlines()[0]
    assert "rank 1 raised DataError ──" in first


def test_rolled_back_steps_are_not_called_kept(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2, spares=0).start().steps(9)
    story.broken(0, story.fault("killed", 0, signal=9))
    story.decide((0, 1), rung="restart", n=5, step=5).heal((0, 1)).steps(6).end()
    text = explained(tmp_path)
    assert "every committed step" not in text
    assert "all up to step 5; 4 committed steps had to be redone" in text


@pytest.mark.parametrize("checkpoint_step", [0, 4])
def test_a_copy_in_memory_that_lost_nothing_is_not_the_checkpoint(
    tmp_path: Path, checkpoint_step: int
) -> None:
    story = SyntheticRun(tmp_path, world=2, spares=0).start().steps(6)
    if checkpoint_step:
        saved = CheckpointSaved(t_ns=story.t_ns, n=4, step=4, path="c", size_bytes=1, seconds=0.1)
        story.say(saved)
    story.broken(0, story.fault("killed", 0, signal=9))
    story.decide((0, 1), rung="rollback", n=6, step=6).heal((0, 1)).steps(1).end()
    assert "every committed step: all restarted from step 6 " in explained(tmp_path)


def test_long_times_are_minutes_and_days_have_dates(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(1)
    for took_ms in (9_999, 1_220_280):
        story.wait(30 * 3600 * 1000)
        fault = story.fault("killed", 1, signal=9)
        story.broken(1, fault).decide((1,)).heal((1,), join_ms=took_ms).steps(1)
    story.end()
    text = explained(tmp_path)
    phases = [line.split()[1:6] for line in text.splitlines() if line.startswith("│ join")]
    assert phases[0][:3] == ["join", "9999.0", "ms"]
    assert phases[1] == ["join", "20", "min", "20", "s"]
    days = {line.split()[3] for line in text.splitlines() if "─ incident" in line}
    assert len(days) == 2


def test_an_incident_without_an_end(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(2)
    story.broken(
        1, story.fault("hung", 1, detail="rank 1 made no progress for 12.3 s"), how="heartbeat"
    )
    story.close()
    text = explained(tmp_path)
    assert "rank 1 made no progress for 12.3 s" in text
    assert "the events end before anything was decided" in text and "its launcher died here" in text


@pytest.mark.parametrize("width", [50, 80])
def test_it_fits_narrow_terminals(tmp_path: Path, width: int) -> None:
    SyntheticRun(tmp_path).start().steps(5).killed(2).steps(2).end()
    assert max(map(len, explained(tmp_path, width).splitlines())) == width


def test_markup_in_messages_is_shown_as_it_is(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(1)
    fault = story.fault(
        "raised", 1, detail="[bold]x[/bold] [/oops]", traceback="KeyError: '[/red]'"
    )
    story.broken(1, fault, how="report").decide(rung="retry", reason="[/nonsense]").heal()
    story.steps(1).end()
    text = explained(tmp_path)
    assert "[bold]x[/bold] [/oops]" in text and "KeyError: '[/red]'" in text
    assert "[/nonsense]" in text


def test_a_stop_redid_nothing(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2, spares=0).start().steps(6)
    story.say(CheckpointSaved(t_ns=story.t_ns, n=4, step=4, path="c", size_bytes=1, seconds=0.1))
    fault = story.fault("killed", 0, signal=9)
    story.broken(0, fault).give_up((0, 1)).end("gave_up", 3, fault)
    text = explained(tmp_path)
    assert "was replaced by" not in text and "redone" not in text and "undone" not in text
    assert "6 steps had been committed" in text
    assert "resumes from step 4, the newest checkpoint" in text


def test_a_drain_is_explained_as_a_drain(tmp_path: Path) -> None:
    SyntheticRun(tmp_path).start().steps(5).drained()
    text = explained(tmp_path)
    assert "a request to end the run: SIGTERM to the launcher" in text
    assert "drain: all ranks stop at one place" in text and "after step 5" in text
    for said in ("retry", "redone", "broke", "itself reported it"):
        assert said not in text, said


def test_place_and_fate_of_the_lost_worker(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=3).start().steps(3)
    fault = story.fault("killed", 1, signal=9, state="applying")
    story.n = story.step = 4
    for seat in (0, 2):
        story.done(seat)
    story.broken(1, fault).decide((1,)).heal((1,)).steps(1)
    fault = story.fault("killed", 2, signal=9)
    story.broken(2, fault).decide((2,)).heal((2,)).phase("eval").end()
    text = explained(tmp_path)
    assert "while applying step 4, generation 1" in text
    assert "and the interrupted one: every survivor had completed it" in text
    assert "in the evaluation after step 5, generation 2" in text
    assert "the evaluation was run again" in text


@pytest.mark.parametrize(
    ("life", "said"),
    [("running", "the run is in the middle of it"), ("died", "its launcher died here")],
)
def test_an_open_incident_depends_on_the_liveness_of_the_run(
    tmp_path: Path, life: Life, said: str
) -> None:
    story = SyntheticRun(tmp_path).start().steps(2)
    story.broken(1, story.fault("hung", 1), how="heartbeat").close()
    out = io.StringIO()
    explain(incidents(read_history(tmp_path)), Console(file=out, width=110), life)
    assert said in out.getvalue()
    other = {"the run is in the middle of it", "its launcher died here"} - {said}
    assert other.pop() not in out.getvalue()


def test_an_open_incident_before_a_later_launcher(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(2)
    story.broken(1, story.fault("killed", 1, signal=9)).decide((1,)).close()
    story.wait(3000)
    story.start(resumed_n=2, resumed_step=2).steps(1).end()
    text = explained(tmp_path)
    assert "its launcher died here; a later one resumed the run" in text
    assert "in the middle of it" not in text
