"""The summary: right numbers, said readably, also of runs that ended badly."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from outlast.errors import RunDirError
from outlast.events import CheckpointFailed, Note, RunEnded, RunStarted, WorkerSpawned
from outlast.observe.segments import segment_paths
from outlast.observe.spans import BUCKETS
from outlast.observe.summary import NOTES_MAX, Summary, summarise
from outlast.observe.tables import MEANS, STYLE, render
from outlast.observe.words import duration, size
from outlast.testing.stories import Story


def shown(summary: Summary, width: int = 100) -> str:
    out = io.StringIO()
    render(summary, Console(file=out, width=width))
    return out.getvalue()


def test_a_run_with_two_incidents(tmp_path: Path) -> None:
    story = Story(tmp_path, world=4, spares=1).start().steps(5).killed(2).steps(5)
    story.broken(1, story.fault("stopped", 1), how="heartbeat", ms=50)
    story.decide((1,), rung="respawn").heal((1,)).steps(5).end()
    summary = summarise(tmp_path)
    assert (summary.outcome, summary.exit_code, summary.steps, summary.phases) == (
        "done",
        0,
        15,
        16,
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


@pytest.mark.parametrize("width", [60, 80, 140])
def test_it_is_shown_at_any_width(tmp_path: Path, width: int) -> None:
    Story(tmp_path).start().steps(5).killed(2).steps(5).end()
    text = shown(summarise(tmp_path), width)
    assert max(len(line) for line in text.splitlines()) == width
    for word in ("10 steps", "rank 2 was killed by SIGKILL", "replace", "0 committed", "ETTR"):
        assert word in " ".join(text.replace("│", " ").split())


def test_it_survives_json(tmp_path: Path) -> None:
    Story(tmp_path).start().steps(5).killed(2).steps(5).end()
    summary = summarise(tmp_path)
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary


def test_two_terms(tmp_path: Path) -> None:
    story = Story(tmp_path).start().steps(7)
    story.close()
    story.wait(4000)
    story.start(resumed_n=4, resumed_step=4).steps(6).end()
    summary = summarise(tmp_path)
    assert (summary.terms, summary.steps, summary.committed_steps_lost) == (2, 10, 3)
    assert summary.buckets_s["down"] == 16
    assert any("ended without a word" in note and "step 4" in note for note in summary.notes)
    assert "4.00 s" in " ".join(summary.notes)


def test_a_run_that_never_ended(tmp_path: Path) -> None:
    story = Story(tmp_path).start().steps(3)
    story.broken(1, story.fault("killed", 1, signal=9)).close()
    summary = summarise(tmp_path)
    assert (summary.outcome, summary.exit_code, summary.steps) == ("unfinished", None, 3)
    assert "no end recorded" in shown(summary)
    assert "not finished" in shown(summary)


def test_a_user_error_names_its_root_cause(tmp_path: Path) -> None:
    story = Story(tmp_path).start().steps(2)
    fault = story.fault("raised", 3, traceback="Traceback ...\nKeyError: 'tokens'")
    story.broken(3, fault, how="report").end("user_error", 1, fault)
    text = shown(summarise(tmp_path))
    assert "root cause" in text and "rank 3 raised KeyError: 'tokens'" in text


def test_a_root_cause_that_says_what_to_do_is_said_whole_and_once(tmp_path: Path) -> None:
    story = Story(tmp_path).start()
    detail = "rank 0 died before its first step: KeyError: 'x'; " + "do this and that " * 20
    fault = story.fault("raised", 0, detail=detail, traceback="Traceback\nKeyError: 'x'")
    story.broken(0, fault, how="report").end("user_error", 1, fault)
    text = " ".join(shown(summarise(tmp_path)).replace("│", " ").split())
    assert f"root cause {detail.strip()}" in text
    assert text.count("KeyError: 'x'") == 2  # the cause, and the incident's line


def test_a_script_that_never_called_init(tmp_path: Path) -> None:
    story = Story(tmp_path)
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
    assert "2 ranks, 9.00 s" in text


def test_notes_are_said_once_and_not_endlessly(tmp_path: Path) -> None:
    story = Story(tmp_path).start().steps(1)
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
    story = Story(run_dir).start().steps(1)
    story.say(Note(t_ns=story.t_ns, worker="", seat=-1, text="[/oops] :bug:"))
    fault = story.fault("raised", 0, detail="[/b]", traceback="KeyError: '[/red]'")
    story.broken(0, fault).end("user_error", 1, fault)
    text = shown(summarise(run_dir), 200)
    for said in (str(run_dir), "[/oops] :bug:", "KeyError: '[/red]'"):
        assert said in text


def test_damage_is_in_the_notes(tmp_path: Path) -> None:
    Story(tmp_path).start().steps(5).end()
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
