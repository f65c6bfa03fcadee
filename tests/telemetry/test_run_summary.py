"""Run summaries: figures and text, also of runs that failed."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.errors import RunDirError
from outlast.events import (
    RECORDED,
    CheckpointFailed,
    Drained,
    DrainFailed,
    LoopBegun,
    Metrics,
    Note,
    PhaseDone,
    RunEnded,
    RunStarted,
    WorkerLost,
    WorkerSpawned,
    encoder,
)
from outlast.telemetry.history.run_history import read_history
from outlast.telemetry.history.time_buckets import BUCKETS
from outlast.telemetry.run_summary import NOTES_MAX, RunSummary, summarise, summarise_history
from outlast.telemetry.segment_files import segment_paths
from outlast.telemetry.summary_tables import INCIDENTS_MAX, MEANS, STYLE, listed, render
from outlast.text_formatting import duration, size


def shown(summary: RunSummary, width: int = 100) -> str:
    out = io.StringIO()
    render(summary, Console(file=out, width=width))
    return out.getvalue()


def test_a_run_with_two_incidents(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=4, spares=1).start().steps(5).killed(2).steps(5)
    story.broken(1, story.fault("stopped", 1), how="heartbeat", ms=50)
    story.decide((1,), rung="respawn").heal((1,)).steps(5).end()
    summary = summarise(tmp_path)
    assert (summary.outcome, summary.exit_code, summary.steps, summary.phases) == (
        "done",
        0,
        15,
        15,
    )
    assert (summary.committed_steps_lost, summary.generations, summary.terms) == (0, 3, 1)
    assert (summary.spares, summary.spares_used, summary.respawns) == (1, 1, 1)
    assert [line.cause for line in summary.incidents] == ["killed", "stopped"]
    killed, stopped = summary.incidents
    assert summary.causes["killed"].total_s == pytest.approx(killed.total_ms / 1e3)
    assert summary.causes["stopped"].count == 1
    assert sum(summary.buckets_s.values()) == pytest.approx(summary.wall_s * 4)
    assert summary.step_s == 0.1
    assert summary.loss == pytest.approx(4.0 / 2.5)
    assert stopped.rung == "respawn"


def test_the_loss_is_of_the_lowest_rank_that_reports_one(tmp_path: Path) -> None:
    """Of a pipeline, ranks of the last stage alone have a loss."""
    story = SyntheticRun(tmp_path, world=4).start()
    story.n = story.step = 1
    for seat, worker in enumerate(story.seats):
        story.done(seat)
        if seat > 1:
            values = {"loss": 0.25 * seat}
            story.write(
                worker, Metrics(t_ns=story.t_ns, worker=worker, seat=seat, step=1, values=values)
            )
    story.end()
    assert summarise(tmp_path).loss == 0.5


def test_an_event_may_stand_for_many_steps(tmp_path: Path) -> None:
    """As in a simulated run; of a real one nothing is written of it."""
    story = SyntheticRun(tmp_path, world=2).start()
    story.step = story.n = 40
    begin_ns, end_ns = story.t_ns, story.wait(40 * 10_000)
    for seat, worker in enumerate(story.seats):
        many = PhaseDone(
            t_ns=end_ns, worker=worker, seat=seat, generation=1, n=40, step=40, kind="step",
            t_begin_ns=begin_ns, t_vote_ns=end_ns, steps=40,
        )  # fmt: skip
        assert b"steps" in encoder.encode(many)
        assert b"steps" not in encoder.encode(msgspec.structs.replace(many, steps=1))
        story.write(worker, many)
    story.steps(30, ms=100).end()
    summary = summarise(tmp_path)
    assert (summary.steps, summary.step_s) == (70, 10.0)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_it_is_shown_at_any_width(tmp_path: Path, width: int) -> None:
    SyntheticRun(tmp_path).start().steps(5).killed(2).steps(5).end()
    text = shown(summarise(tmp_path), width)
    assert max(len(line) for line in text.splitlines()) == width
    for word in ("10 steps", "rank 2 was killed by SIGKILL", "replace", "0 committed", "ETTR"):
        assert word in " ".join(text.replace("│", " ").split())


def test_it_survives_json(tmp_path: Path) -> None:
    SyntheticRun(tmp_path).start().steps(5).killed(2).steps(5).end()
    summary = summarise(tmp_path)
    assert msgspec.json.decode(msgspec.json.encode(summary), type=RunSummary) == summary


def test_two_terms(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(7)
    story.close()
    story.wait(4000)
    story.start(resumed_n=4, resumed_step=4).steps(6).end()
    summary = summarise(tmp_path)
    assert (summary.terms, summary.steps, summary.committed_steps_lost) == (2, 10, 3)
    assert summary.buckets_s["down"] == 16
    assert any("ended without a record" in note and "step 4" in note for note in summary.notes)
    assert "4.00 s" in " ".join(summary.notes)


def test_a_hang_with_flight_recorder_dumps_names_the_explain_command(
    tmp_path: Path,
) -> None:
    story = SyntheticRun(tmp_path).start().steps(3)
    hung = story.fault("hung", 1)
    story.broken(1, replace(hung, detail=f"{RECORDED} 3 rank(s): traces/x"), how="heartbeat")
    story.decide((1,)).heal((1,)).steps(3).end()
    (note,) = summarise(tmp_path).notes
    assert f"outlast explain {tmp_path}" in note
    assert "outlast explain" in shown(summarise(tmp_path), width=400)


def test_a_run_that_never_ended(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(3)
    story.broken(1, story.fault("killed", 1, signal=9)).close()
    summary = summarise(tmp_path)
    assert (summary.outcome, summary.exit_code, summary.steps) == ("unfinished", None, 3)
    assert "no end recorded" in shown(summary)
    assert "not finished" in shown(summary)


def test_a_user_error_names_its_root_cause(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(2)
    fault = story.fault("raised", 3, traceback="Traceback ...\nKeyError: 'tokens'")
    story.broken(3, fault, how="report").end("user_error", 1, fault)
    text = shown(summarise(tmp_path))
    assert "root cause" in text and "rank 3 raised KeyError: 'tokens'" in text


def test_a_root_cause_is_printed_in_full_and_once(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start()
    detail = "rank 0 died before its first step: KeyError: 'x'; " + "do this and that " * 20
    fault = story.fault("raised", 0, detail=detail, traceback="Traceback\nKeyError: 'x'")
    story.broken(0, fault, how="report").end("user_error", 1, fault)
    text = " ".join(shown(summarise(tmp_path)).replace("│", " ").split())
    assert f"root cause {detail.strip()}" in text
    assert text.count("KeyError: 'x'") == 2  # the cause, and the incident's line


def test_a_script_that_never_called_init(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path)
    story.say(
        RunStarted(t_ns=story.t_ns, run="r", term=1, world=2, spares=0, script="old.py", args=())
    )
    for seat in range(2):
        story.say(WorkerSpawned(t_ns=story.t_ns, worker=f"w1-{seat}", seat=seat, pid=1, host="h"))
    story.wait(9000)
    story.say(RunEnded(t_ns=story.t_ns, outcome="done", exit_code=0, n=0, step=0))
    story.close()
    summary = summarise(tmp_path)
    assert summary.restart_only
    assert (summary.goodput, summary.ettr) == (None, None)
    text = shown(summary)
    assert "restart only" in text and "ETTR" not in text
    assert "2 ranks for 9.00 s" in text


def test_durable_storage_is_summed_up(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(1)
    failure = "rank 1: No space left"
    story.say(CheckpointFailed(t_ns=story.t_ns, n=1, step=1, path="ckpt/1", error=failure))
    story.say(Note(t_ns=story.t_ns, worker="", seat=-1, text=f"step 1 failed: {failure}; kept"))
    for where in (
        "s3://b/1",
        "s3://b/1",
        "s3://b/2",
        "/far/2",
    ):  # the same one again, by a later launcher
        story.say(
            Drained(t_ns=story.t_ns, n=1, step=1, where=where, size_bytes=1 << 20, seconds=0.5)
        )
    story.say(DrainFailed(t_ns=story.t_ns, where="s3://b", error="access is denied"))
    story.end()
    summary = summarise(tmp_path)
    assert summary.durable == {"/far": 1, "s3://b": 2}
    assert summary.notes == (
        "checkpoint at step 1 failed: rank 1: No space left (ckpt/1)",
        "durable storage s3://b: access is denied",
    )
    assert "0 saved, 1 in /far, 2 in s3://b" in shown(summary)


def test_notes_are_deduplicated_and_bounded(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(1)
    for seat in (0, 0, 0, 1):
        story.say(Note(t_ns=story.t_ns, worker="w", seat=seat, text="a large position"))
    story.say(Note(t_ns=story.t_ns, worker="", seat=-1, text="fine", level="info"))
    story.say(CheckpointFailed(t_ns=story.t_ns, n=1, step=1, path="ckpt/1", error="No space left"))
    for k in range(40):
        story.say(Note(t_ns=story.t_ns, worker="", seat=-1, text=f"note {k}"))
    story.end()
    notes = summarise(tmp_path).notes
    assert notes[:3] == (
        "checkpoint at step 1 failed: No space left (ckpt/1)",
        "rank 0: a large position (3 times)",
        "rank 1: a large position",
    )
    assert len(notes) == NOTES_MAX + 1 and "23 more notes" in notes[-1]


def test_markup_in_names_is_shown_as_it_is(tmp_path: Path) -> None:
    run_dir = tmp_path / "[red]run[" / "x]"
    story = SyntheticRun(run_dir).start().steps(1)
    story.say(Note(t_ns=story.t_ns, worker="", seat=-1, text="[/oops] :bug:"))
    fault = story.fault("raised", 0, detail="[/b]", traceback="KeyError: '[/red]'")
    story.broken(0, fault).end("user_error", 1, fault)
    text = shown(summarise(run_dir), 200)
    for said in (str(run_dir), "[/oops] :bug:", "KeyError: '[/red]'"):
        assert said in text


def test_damage_is_in_the_notes(tmp_path: Path) -> None:
    SyntheticRun(tmp_path).start().steps(5).end()
    path = next(p for p in segment_paths(tmp_path / "events") if p.name.startswith("w1-3"))
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(data)
    assert any(f"{path} is damaged at byte" in note for note in summarise(tmp_path).notes)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunDirError):
        summarise(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0004, "0.4 ms"),
        (0.0094, "9.4 ms"),
        (0.613, "613 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (9.994, "9.99 s"),
        (42.24, "42.2 s"),
        (99.96, "1 min 40 s"),
        (3599.7, "1 h 00 min"),
        (7511, "2 h 05 min"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_sizes() -> None:
    found = [size(each) for each in (999, 1536, 104_000_000, 3 << 40)]
    assert found == ["999 B", "1.5 KiB", "99 MiB", "3.0 TiB"]


def test_every_bucket_has_a_colour_and_a_meaning() -> None:
    assert set(STYLE) == set(MEANS) == set(BUCKETS)


def test_a_stop_without_survivors_loses_nothing(tmp_path: Path) -> None:
    """A real one: all ranks had 6 steps, and were told to have run 4 with 6 lost."""
    story = SyntheticRun(tmp_path, world=2, spares=0).start().steps(6)
    fault = story.fault("killed", 0, signal=9)
    story.broken(0, fault).give_up((0, 1))
    story.step = 4  # what the controller last heard
    story.end("gave_up", 3, fault)
    summary = summarise(tmp_path)
    assert (summary.steps, summary.committed_steps_lost) == (6, 0)


def test_a_drain_is_counted_among_no_failures(tmp_path: Path) -> None:
    SyntheticRun(tmp_path).start().steps(5).killed(1).steps(2).drained()
    summary = summarise(tmp_path)
    assert [line.drain for line in summary.incidents] == [False, True]
    assert set(summary.causes) == {"killed"}
    text = " ".join(shown(summary).replace("│", " ").split())
    assert "failures 1 incident, 1 drain on request, 0 committed" in text
    assert "after step 7: drain" in text and "end requested: SIGTERM to the launcher" in text
    assert "from the checkpoint of step 7" in text and "again" not in text


def test_an_interrupted_run_says_what_a_resumed_one_does_again(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start().steps(5)
    story.end("interrupted", 4)
    text = " ".join(shown(summarise(tmp_path)).replace("│", " ").split())
    assert "from the beginning: no checkpoint; 5 committed steps will be done again" in text


def test_spares_refilled_are_no_respawns(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2, spares=1).start().steps(2)
    for seat in (0, 1):
        story.killed(seat).steps(1)
        story.warm.append(story.spawn(-1))
    summary = summarise(tmp_path)
    assert (summary.spares_used, summary.spares_refilled, summary.respawns) == (2, 2, 0)
    assert "1 configured, 2 used, 2 refilled, 0 respawns" in shown(summary)
    story.warm.clear()
    story.killed(0).steps(1).end()
    summary = summarise(tmp_path)
    assert (summary.spares_refilled, summary.respawns) == (2, 1)


def test_incidents_by_cause(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, spares=30).start().steps(1)
    for k in range(24):
        story.broken(1, story.fault("killed", 1, signal=9)).decide((1,))
        story.heal((1,), join_ms=9000 if k == 3 else 400).steps(1)
    story.broken(2, story.fault("raised", 2, traceback="KeyError: 1")).decide(rung="retry").heal()
    story.steps(1).end()
    summary = summarise(tmp_path)
    text = shown(summary)
    rows = [line.replace("│", " ").split() for line in text.splitlines()]
    (killed,) = [row for row in rows if row[:1] == ["killed"]]
    assert killed[1] == "24" and killed[-2:] == ["9.21", "s"]
    assert len([line for line in listed(summary.incidents) if line.number in (4, 25)]) == 2
    assert len(listed(summary.incidents)) == INCIDENTS_MAX
    assert "and 15 more: outlast explain" in text
    assert len(text.splitlines()) < 60


def init_failed(tmp_path: Path, exit_code: int, traceback: str) -> RunSummary:
    story = SyntheticRun(tmp_path, world=1, spares=0)
    story.say(
        RunStarted(t_ns=story.t_ns, run="r", term=1, world=1, spares=0, script="x.py", args=())
    )
    story.seats = [story.spawn(0)]
    fault = story.fault("exited", 0, exit_code=exit_code, traceback=traceback, state="starting")
    story.say(WorkerLost(t_ns=story.wait(900), worker="w0-0", seat=0, fault=fault))
    cause = fault if exit_code else None
    story.end("user_error" if exit_code else "done", int(bool(exit_code)), cause)
    return summarise(tmp_path)


def test_a_script_that_died_before_init_is_not_advised_to_call_it(tmp_path: Path) -> None:
    trace = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'datasets'"
    summary = init_failed(tmp_path, 1, trace)
    assert not summary.restart_only and summary.ettr is None
    text = " ".join(shown(summary, 200).replace("│", " ").split())
    assert "never called" not in text
    assert f"no worker reached outlast.init(): see {tmp_path}/logs/RANK/" in text
    assert "rank 0 exited with code 1 before the run was over: ModuleNotFoundError: No mod" in text


def test_a_script_that_ended_well_without_init_never_called_it(tmp_path: Path) -> None:
    summary = init_failed(tmp_path, 0, "")
    assert summary.restart_only and "never called outlast.init()" in summary.notes[0]


def test_a_live_run_has_its_progress(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path).start()
    story.write(
        "w1-0",
        LoopBegun(t_ns=story.t_ns, worker="w1-0", seat=0, until=200, epochs=None, length=None),
    )
    story.steps(5).close()
    summary = summarise_history(read_history(tmp_path), tmp_path, life="running")
    assert (summary.outcome, summary.steps_total) == ("running", 200)
    assert "2 % of 200" in shown(summary, 140) and "still running" in shown(summary)
    assert summarise_history(read_history(tmp_path), tmp_path, life="died").outcome == "died"


@pytest.mark.parametrize(
    ("until", "epochs", "length", "steps"),
    [
        (30, None, None, 30),
        (30, None, 10, 30),
        (None, 2, 10, 20),
        (30, 2, 10, 20),
        (None, 2, None, None),
        (30, 2, None, None),
    ],
)
def test_the_steps_of_a_loop(
    until: int | None, epochs: int | None, length: int | None, steps: int | None
) -> None:
    begun = LoopBegun(t_ns=1, worker="w", seat=0, until=until, epochs=epochs, length=length)
    assert begun.steps == steps
