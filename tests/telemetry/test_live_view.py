"""Live view: correct board, fitting tables, and event lines."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.events import (
    AnyEvent,
    CheckpointSaved,
    Drained,
    DrainFailed,
    GenerationOpened,
    LoopBegun,
    Note,
    Scheduled,
    WorkerLost,
)
from outlast.telemetry import live_view
from outlast.telemetry.event_store import read_events
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import read_history
from outlast.telemetry.live_view import LineDisplay, LiveDisplay, display, view
from outlast.telemetry.run_board import Beats, RunBoard, headline, progress
from outlast.telemetry.time_accounting import account


class Shown(SyntheticRun):
    """A story that a display watches: the launcher's events at once, the workers' on disk."""

    display: LineDisplay | LiveDisplay

    def say(self, event: AnyEvent) -> None:
        super().say(event)
        self.display.event(event)


def beats(story: SyntheticRun, state: str = "running", loss: float = 2.5) -> Beats:
    seated = dict.fromkeys(story.seats, (story.n, story.step, state, loss))
    return seated | dict.fromkeys(story.warm, (0, 0, "waiting", math.nan))


def board_of(story: SyntheticRun) -> RunBoard:
    board = RunBoard()
    for event in read_events(story.run_dir):
        board.take(event)
    return board


def drawn(board: RunBoard, now_ns: int, width: int = 100, *notes: str) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(view(board, now_ns, list(notes)))
    return out.getvalue()


def test_the_board_assigns_workers_to_seats(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=3, spares=2).start().steps(4).killed(1).steps(2)
    board = board_of(story)
    board.beat(beats(story), story.t_ns)
    assert [(row.seat, row.worker, row.generation) for row in board.seats] == [
        (0, "w1-0", 2),
        (1, "w1-3", 2),
        (2, "w1-2", 2),
    ]
    assert [row.worker for row in board.spares] == ["w1-4"]
    assert (board.step, board.loss, board.recovering) == (6, 2.5, False)


def test_a_heartbeat_of_a_lost_worker_is_ignored(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2).start().steps(1).killed(0)
    board = board_of(story)
    board.beat({"w1-0": (1, 1, "running", 2.0), **beats(story)}, story.t_ns)
    assert [row.worker for row in board.seats] == ["w1-2", "w1-1"]
    assert board.spares == []


def test_live_goodput_equals_that_of_the_summary(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(30).killed(2).steps(30)
    story.say(Note(t_ns=story.t_ns, worker="", seat=-1, text="now", level="info"))
    times = account(read_history(tmp_path))
    board = board_of(story)
    assert board.goodput(story.t_ns) == pytest.approx(times.goodput, rel=0.01)
    lost_ns = times.totals_ns["lost"] + times.totals_ns["recovery"]
    assert board.lost_s(story.t_ns) == pytest.approx(lost_ns / 4 / 1e9, rel=0.03)


def test_a_redone_step_counts_from_the_opening(tmp_path: Path) -> None:
    """A survivor's own account of the redone phase begins where its refused attempt ended."""
    story = SyntheticRun(tmp_path, world=1, spares=0).start(ms=0)
    story.wait(900)
    story.say(GenerationOpened(t_ns=story.t_ns, incident=1, generation=2, n=0))
    begin_ns = story.t_ns - 800_000_000
    story.generation = 2
    story.wait(100)
    story.done(0, n=1, step=1, begin_ns=begin_ns)
    assert board_of(story).goodput(story.t_ns) == pytest.approx(0.1)


def test_lost_time_runs_on_while_recovering(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(3)
    story.broken(1, story.fault("killed", 1, signal=9)).decide((1,))
    board = board_of(story)
    assert board.recovering
    later_s = board.lost_s(story.t_ns + 2_000_000_000) - board.lost_s(story.t_ns)
    assert later_s == pytest.approx(2)


def test_steps_per_second_come_from_beats(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start()
    board = board_of(story)
    for _ in range(5):
        story.steps(10, ms=100, script_ms=0)
        board.beat(beats(story), story.t_ns)
    assert board.steps_per_s() == pytest.approx(10)
    assert "10.0 steps/s" in progress(board, story.t_ns)


@pytest.mark.parametrize("resumed", [0, 500])
def test_the_start_is_no_part_of_the_rate(tmp_path: Path, resumed: int) -> None:
    """After a start of 10 s a step seemed to take seconds, and 500 resumed steps 10 s."""
    board = board_of(SyntheticRun(tmp_path, world=1, spares=0).start())
    for second in range(10):
        board.beat({"w1-0": (0, 0, "starting", 0.0)}, second * 10**9)
    board.beat({"w1-0": (1, resumed + 1, "running", 2.0)}, 10 * 10**9)
    assert board.steps_per_s() == 0 and " left" not in progress(board, 10 * 10**9)
    board.beat({"w1-0": (11, resumed + 11, "running", 2.0)}, 11 * 10**9)
    assert board.steps_per_s() == pytest.approx(10)


def test_the_view_shows_ranks_incidents_and_notes(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(5).killed(2).steps(5)
    story.broken(1, story.fault("raised", 1, traceback="ValueError: x"), how="report")
    board = board_of(story)
    board.beat(beats(story), story.t_ns)
    text = " ".join(drawn(board, story.t_ns, 100, "[/odd] note").replace("│", " ").split())
    assert "step 10, loss 2.5000, generation 2" in text
    assert "2 w1-4 2 10 2.5000 running" in text
    assert "incident 1: rank 2 was killed by SIGKILL in step 6, w1-4 took rank 2: recovered" in text
    assert "incident 2: rank 1 raised ValueError: x in step 11 ..." in text
    assert "note: [/odd] note" in text


@pytest.mark.parametrize("width", [50, 80, 160])
def test_the_view_fits(tmp_path: Path, width: int) -> None:
    story = SyntheticRun(tmp_path).start().steps(5).killed(2).steps(5)
    board = board_of(story)
    board.beat(beats(story), story.t_ns)
    assert max(map(len, drawn(board, story.t_ns, width).splitlines())) == width


def test_large_worlds_show_ranks_that_are_behind(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=64, spares=0).start().steps(2)
    board = board_of(story)
    late = {"w1-40": (1, 1, "running", 2.0)}
    board.beat(beats(story) | late, story.t_ns)
    text = drawn(board, story.t_ns)
    assert "w1-40" in text and "48 more ranks" in text
    assert len(text.splitlines()) < 25


def test_lines_report_incidents_saves_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_view, "PROGRESS_S", 0.0)
    out, said = io.StringIO(), io.StringIO()
    story = Shown(tmp_path)
    story.display = lines = LineDisplay(tmp_path, lines=out, stream=said)
    story.start().steps(5).killed(2).steps(5)
    story.say(
        CheckpointSaved(t_ns=story.t_ns, n=10, step=10, path="ckpt/10", size_bytes=1, seconds=1.0)
    )
    story.say(
        Drained(t_ns=story.t_ns, n=10, step=10, where="s3://b/10", size_bytes=1 << 20, seconds=1.0)
    )
    story.say(DrainFailed(t_ns=story.t_ns, where="s3://b", error="access is denied"))
    story.say(Scheduled(t_ns=story.t_ns, memory=0, disk=240, why="it is best"))
    lines.beats(beats(story))
    lines.line("hello", is_error=False)
    story.end()
    lines.close()
    assert out.getvalue() == "hello\n"
    text = said.getvalue()
    assert "train.py: 4 ranks and 1 spare, term 1" in text
    assert "incident 1: rank 2 was killed by SIGKILL at step 6 ..." in text
    assert "incident 1: replace from step 5: a warm spare is there" in text
    assert text.count("recovered in") == 1
    assert "checkpoint of step 10: ckpt/10" in text
    assert "checkpoint of step 10 is in durable storage: s3://b/10 (1.0 MiB in 1.00 s)" in text
    assert "durable storage s3://b is behind, and tried again: access is denied" in text
    assert "outlast: checkpoints every 240 steps; `outlast explain` shows why" in text
    assert "outlast: step 10, loss 2.5000" in text
    assert "\x1b" not in text


def test_an_incident_that_ends_the_run_is_printed_once(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(2)
    fault = story.fault("raised", 1, traceback="KeyError: 'x'")
    story.broken(1, fault, how="report").end("user_error", 1, fault)
    said = io.StringIO()
    lines = LineDisplay(None, lines=io.StringIO(), stream=said)
    for event in read_events(tmp_path):
        lines.event(event)
    lines.close()
    assert said.getvalue().count("the run ended") == 1


def test_a_closed_stream_ends_nothing() -> None:
    out = io.StringIO()
    lines = LineDisplay(None, lines=out, stream=out)
    out.close()
    lines.line("x", is_error=False)
    lines.event(Note(t_ns=1, worker="", seat=-1, text="y"))
    lines.close()


def test_the_live_view_draws_and_leaves_a_clean_screen(tmp_path: Path) -> None:
    screen, out = io.StringIO(), io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, height=40)
    story = Shown(tmp_path)
    story.display = shown = LiveDisplay(tmp_path, console=console, lines=out)
    story.start().steps(5).killed(2).steps(5)
    shown.beats(beats(story))
    shown.line("a worker's line", is_error=False)
    shown.line("a worker's error", is_error=True)
    story.end()
    shown.close()
    assert out.getvalue() == "a worker's line\n"  # stdout is no terminal: it stays clean
    assert "recovered in" in screen.getvalue() and "a worker's error" in screen.getvalue()
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is back


def test_lines_are_chosen_where_no_terminal_is(tmp_path: Path) -> None:
    chosen = display(tmp_path)  # pytest's stderr is captured: not a terminal
    assert isinstance(chosen, LineDisplay)
    chosen.close()


def test_headline_of_an_open_incident(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(1)
    story.broken(0, story.fault("transport", 0), how="peer")
    story.notice(story.fault("killed", 2, signal=9))
    said = "incident 1: rank 2 was killed by SIGKILL"  # that a peer saw it is no second fault
    assert headline(board_of(story).tracker.found()[0]) == f"{said} in step 2 ..."
    story.notice(story.fault("killed", 3, signal=9))
    one = board_of(story).tracker.found()[0]
    assert headline(one) == f"{said} and 1 fault more in step 2 ..."


def test_the_step_remains_after_the_workers_ended(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2).start().steps(4)
    board = board_of(story)
    board.beat(beats(story), story.t_ns)
    for seat, worker in enumerate(story.seats):
        fault = story.fault("exited", seat)
        board.take(WorkerLost(t_ns=story.t_ns, worker=worker, seat=seat, fault=fault))
        board.beat({}, story.t_ns)
    assert (board.step, board.loss, board.seats) == (4, 2.5, [])


def test_nothing_yet() -> None:
    assert "starting" in drawn(RunBoard(), 1)


def test_a_loss_that_is_not_a_number_shows(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2).start()
    board = board_of(story)
    board.beat(dict.fromkeys(story.seats, (0, 0, "starting", 0.0)), story.t_ns)
    board.beat(beats(story, loss=math.nan), story.t_ns)
    assert board.loss is None and "loss" not in progress(board, story.t_ns)
    board.beat(beats(story, loss=0.0), story.t_ns)
    assert board.loss == 0.0 and "loss 0.0000" in progress(board, story.t_ns)
    board.beat(beats(story, loss=math.nan), story.t_ns)
    assert "loss nan" in progress(board, story.t_ns)
    assert drawn(board, story.t_ns).count("nan") == 3  # the headline, and each of two ranks


def test_progress_and_remaining_time(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start()
    begun = LoopBegun(t_ns=story.t_ns, worker="w1-0", seat=0, until=3000, epochs=None, length=None)
    story.write("w1-0", begun)
    board = board_of(story)
    for _ in range(3):
        story.steps(40, ms=100, script_ms=0)
        board.beat(beats(story), story.t_ns)
    assert progress(board, story.t_ns).startswith("step 120 of 3000 (4 %), 4 min 48 s left, loss")
    board.steps_total = None
    assert progress(board, story.t_ns).startswith("step 120, loss")


def test_a_resumed_run_numbers_its_incidents_on(tmp_path: Path) -> None:
    """As `outlast explain` does; what earlier launchers saw is not told once more."""
    story = SyntheticRun(tmp_path, spares=2).start().steps(2).killed(1).steps(1).killed(2).steps(1)
    story.close()
    resumed, said = Shown(tmp_path), io.StringIO()
    resumed.term, resumed.t_ns = 1, story.wait(5000)
    resumed.display = lines = LineDisplay(tmp_path, lines=io.StringIO(), stream=said)
    resumed.start(resumed_n=4, resumed_step=4).steps(1)
    resumed.incident = 0  # the controller's own count begins anew
    resumed.killed(3).steps(1)
    text = progress(lines.feed.board, resumed.t_ns)
    assert "1 incident," in text and "of this launch" in text
    resumed.end()
    lines.close()
    told = [line for line in said.getvalue().splitlines() if "incident" in line]
    assert told and all("incident 3: " in line for line in told)
    assert [one.number for one in incidents(read_history(tmp_path))] == [1, 2, 3]
