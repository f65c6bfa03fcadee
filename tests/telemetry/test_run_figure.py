"""Run figure: complete, small, deterministic, and equal to the accounts."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="the extra `figures` is not installed")

from tests.telemetry.synthetic_run import SyntheticRun

from outlast.errors import RunDirError, UsageError
from outlast.telemetry import run_figure
from outlast.telemetry.history.run_history import read_history
from outlast.telemetry.history.time_buckets import BUCKETS, CODES, Span
from outlast.telemetry.history.time_claims import Claims
from outlast.telemetry.lane_columns import COLOUR, COLUMNS, columns
from outlast.telemetry.run_figure import apart, report
from outlast.telemetry.time_accounting import account


def _twins(tmp_path: Path) -> list[tuple[Path, str]]:
    SyntheticRun(tmp_path / "plain", spares=0).start().steps(30).phase("eval").end()
    SyntheticRun(tmp_path / "hurt").start().steps(10).killed(2).steps(20).phase("eval").end()
    return [(tmp_path / "plain", "undisturbed"), (tmp_path / "hurt", "killed once")]


def test_a_report_is_written_the_same_each_time(tmp_path: Path) -> None:
    runs = _twins(tmp_path)
    report(runs, tmp_path / "a.svg")
    report(runs, tmp_path / "b.svg")
    data = (tmp_path / "a.svg").read_bytes()
    assert data == (tmp_path / "b.svg").read_bytes()
    assert ET.fromstring(data).tag.endswith("svg")
    for bucket in ("step", "lost", "recovery", "start"):
        assert COLOUR[bucket] in data.decode()


def test_equal_runs_are_called_equal_and_others_are_not(tmp_path: Path) -> None:
    runs = [run_figure._read(*run) for run in _twins(tmp_path)]
    assert run_figure._difference(runs) == (
        "largest difference of any rank's loss: 0 (equal to the last bit, 120 values)"
    )
    runs[1].losses[3, 7] += 1e-9
    del runs[1].losses[0, 1]
    said = run_figure._difference(runs)
    assert "1e-09" in said and "equal" not in said and "1 only in one run" in said


def test_a_long_run_makes_a_small_file(tmp_path: Path) -> None:
    SyntheticRun(tmp_path / "run").start().steps(3000).end()
    lane = account(read_history(tmp_path / "run")).lanes[0]
    assert len(lane.spans) > 6000
    report([(tmp_path / "run", "long")], tmp_path / "report.svg")
    assert (tmp_path / "report.svg").stat().st_size < 400_000


def test_many_incidents_and_long_errors_still_fit(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path / "run").start().steps(3)
    for k in range(40):
        fault = story.fault("raised", k % 4, traceback="ValueError: " + "long " * 100)
        story.broken(k % 4, fault, how="report").decide(rung="retry").heal().steps(1)
    story.end()
    run = run_figure._read(tmp_path / "run", "x")
    key = run_figure._key([run])
    assert max(map(len, key)) < 150 and key[-1] == "... and 24 more incidents"
    report([(tmp_path / "run", "x")], tmp_path / "report.svg")


def test_a_run_without_losses_is_drawn(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path / "run").start()
    story.wait(100)
    story.end("interrupted", 4)
    report([(tmp_path / "run", "x"), (tmp_path / "run", "y")], tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing was drawn"):
        report([], tmp_path / "report.svg")
    with pytest.raises(RunDirError):
        report([(tmp_path, "x")], tmp_path / "report.svg")


@given(
    wanted=st.lists(st.floats(0, 100), max_size=20).map(sorted),
    gap=st.floats(0.1, 20),
)
def test_numbers_do_not_touch_and_stay_inside(wanted: list[float], gap: float) -> None:
    found = apart(wanted, gap, 100)
    kept = min(gap, 100 / max(1, len(wanted)))
    assert all(b - a >= kept - 1e-6 for a, b in pairwise(found))
    assert all(-1e-6 <= place <= 100 for place in found)


def test_a_short_recovery_stays_visible() -> None:
    width = 1_000_000 // COLUMNS + 1
    edges = np.array([0, 5 * width, 5 * width + width // 3, 1_000_000])
    codes = np.array([CODES["step"], CODES["recovery"], CODES["step"]], np.uint8)
    drawn = columns(Claims(edges[:-1], edges[1:], codes), 0, 1_000_000)
    assert Span(5 * width, 6 * width, "recovery") in drawn
    assert [span.bucket for span in drawn] == ["step", "recovery", "step"]


def test_every_bucket_has_its_own_colour() -> None:
    assert set(COLOUR) == set(BUCKETS)
    assert len(set(COLOUR.values())) == len(COLOUR)
