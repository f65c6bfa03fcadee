"""Traces for Perfetto: every rank's time, whole, and incidents at their places."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.cli.main import main
from outlast.telemetry.run_summary import summarise


def test_a_trace_has_all_time_of_all_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    SyntheticRun(run, world=4, spares=1).start().steps(5).killed(2).steps(5).end().close()
    out = tmp_path / "trace.json"
    assert main(["trace", str(run), "--out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    summary = summarise(run)
    spans = [event for event in events if event["ph"] == "X"]
    of_ranks = [span for span in spans if span["pid"] == 1]
    for rank in range(4):
        lasted_us = sum(span["dur"] for span in of_ranks if span["tid"] == rank)
        assert lasted_us == pytest.approx(1e6 * summary.wall_s)
    steps_us = sum(span["dur"] for span in of_ranks if span["name"] == "step")
    assert steps_us == pytest.approx(1e6 * summary.buckets_s["step"])
    incident, *phases = [span for span in spans if (span["pid"], span["tid"]) == (0, 0)]
    assert "rank 2" in incident["name"] and incident["args"]["rung"] == "replace"
    assert sum(phase["dur"] for phase in phases) == pytest.approx(incident["dur"], rel=1e-3)
    assert {event["ph"] for event in events} <= {"X", "M", "i"}


def test_copies_of_state_have_lanes_by_pairs_of_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    story = SyntheticRun(run, world=4, spares=1).start().steps(5).killed(2).steps(5).killed(2)
    story.steps(2).end().close()
    out = tmp_path / "trace.json"
    assert main(["trace", str(run), "--out", str(out)]) == 0
    events = [one for one in json.loads(out.read_text())["traceEvents"] if one["pid"] == 2]
    names = [one["args"]["name"] for one in events if one["ph"] == "M"]
    assert names[0] == "copies of state" and set(names[1:]) == {"rank 3 to rank 2"}
    first, second = [one for one in events if one["ph"] == "X"]
    assert first["args"]["incident"] == 1 and second["args"]["incident"] == 2
    assert first["dur"] > 0 and first["args"]["bytes"] > 0
    assert first["ts"] + first["dur"] <= second["ts"]


def test_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    SyntheticRun(tmp_path / "run", world=2).start().steps(2).end().close()
    (tmp_path / "trace.json").write_text("mine")
    words = ["trace", str(tmp_path / "run"), "--out", str(tmp_path / "trace.json")]
    assert main(words) == 2 and (tmp_path / "trace.json").read_text() == "mine"
    assert main(["trace", str(tmp_path)]) == 1
