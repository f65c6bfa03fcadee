"""Content and figures of a run's page."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.cli.main import main
from outlast.errors import EXIT_USAGE
from outlast.events import CheckpointSaved, LoopBegun, Metrics, Note
from outlast.telemetry.event_store import read_events
from outlast.telemetry.history import growing_account
from outlast.telemetry.history.run_history import read_history
from outlast.telemetry.run_summary import summarise
from outlast.web import page_figures
from outlast.web.page_figures import TimeAxis
from outlast.web.page_templates import content_policy
from outlast.web.run_content import RunContent, content
from outlast.web.run_page import PARTS, render_page, render_parts

HOSTILE = '<script>alert("x")</script>\x1b[31m&amp;'


def read(run_dir: Path, *, after_s: float = 5.0, price: float = 0.0) -> RunContent:
    history = read_history(run_dir)
    now_ns = read_events(run_dir)[-1].t_ns + round(after_s * 1e9)
    return content(history, run_dir, now_ns=now_ns, life="running", price_per_hour=price)


def answer(page: RunContent, key: str) -> tuple[str, str]:
    (one,) = [one for one in page.answers if one.key == key]
    return one.figure, " | ".join(one.lines)


def test_the_figures_are_those_of_the_summary(tmp_path: Path) -> None:
    SyntheticRun(tmp_path, world=4, spares=1).start().steps(5).killed(2).steps(5).end()
    summary = summarise(tmp_path)
    page = read(tmp_path)
    assert page.summary == summary
    assert answer(page, "training")[0] == "step 10"
    assert answer(page, "speed")[0] == f"ETTR {100 * summary.ettr:.1f} %"
    assert answer(page, "broken")[0] == "1 incident"
    assert (
        "rank 2" in answer(page, "broken")[1]
        and "0 committed steps lost" in answer(page, "broken")[1]
    )
    rows = page_figures.waterfall(page.totals)
    assert sum(row.width for row in rows) == pytest.approx(1.0)
    assert {row.name: row.seconds for row in rows} == pytest.approx(
        {name: s / 4 for name, s in summary.buckets_s.items() if s or name == "step"}
    )


def test_a_quiet_run_is_not_training(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2).start().steps(5)
    story.say(
        LoopBegun(t_ns=story.t_ns, worker="w1-0", seat=0, until=100, epochs=None, length=None)
    )
    fresh, quiet = read(tmp_path, after_s=1), read(tmp_path, after_s=4000)
    assert fresh.answers[0].level == "good" and "computing" in answer(fresh, "training")[1]
    assert (
        quiet.answers[0].level == "bad" and "no commit for 1 h 06" in answer(quiet, "training")[1]
    )
    assert answer(fresh, "finish")[0].startswith("in ")
    assert " UTC</time>" in render_parts(fresh)["answers"]
    assert "$" in answer(read(tmp_path, price=3.5), "finish")[1]


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2).start().steps(3)
    story.say(Note(t_ns=story.t_ns, worker="w1-0", seat=0, text=HOSTILE))
    story.say(
        CheckpointSaved(t_ns=story.t_ns, n=3, step=3, path=HOSTILE, size_bytes=1, seconds=0.1)
    )
    story.killed(1).steps(2).end()
    page = render_page(read(tmp_path), HOSTILE)
    assert page.count("<script>") == 3 and "&lt;script&gt;alert" in page
    assert set(render_parts(read(tmp_path))) == set(PARTS)


def test_a_page_loads_nothing(tmp_path: Path) -> None:
    SyntheticRun(tmp_path, world=2).start().steps(3).end()
    page = render_page(read(tmp_path), "run")
    assert "unsafe" not in content_policy() and "default-src 'none'" in unescape(page)
    assert re.findall(r"(?:src|href)=\"(?!#)", page) == []
    assert re.findall(r"https?://", page) == []
    assert " style=" not in page and not re.search(r"\son\w+=", page)


@example([(0, 0.0), (1, 5e-324)])
@given(st.lists(st.tuples(st.integers(0, 10**12), st.floats(allow_nan=True)), max_size=2000))
def test_a_curve_stays_inside(points: list[tuple[int, float]]) -> None:
    axis = TimeAxis(0, 10**12, (), (0, 10**12))
    points.sort(key=lambda point: point[0])
    t_ns, values = np.array(points).reshape(-1, 2).T
    drawn = page_figures.curve(t_ns.astype(np.int64), values, axis, "x", "s")
    places = [
        tuple(map(float, place.split(",")))
        for dots in re.findall(r'points="([^"]*)"', drawn)
        for place in dots.split()
    ]
    assert all(0 <= x <= page_figures.X and 0 <= y <= page_figures.CURVE_PX for x, y in places)
    assert len(places) <= 2 * page_figures.POINTS_MAX


def test_many_ranks_share_rows(tmp_path: Path) -> None:
    SyntheticRun(tmp_path, world=300).start().steps(2).end()
    drawn = page_figures.timeline(read(tmp_path).times, TimeAxis(0, 1, (), (0, 1)))
    rows = set(re.findall(r"M[^ ]+ ([0-9.e+-]+)h", drawn))
    assert len(rows) <= growing_account.ROWS_MAX


def test_losses_that_are_no_numbers(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2).start().steps(3)
    for step, loss in enumerate((float("nan"), float("inf"), 1e308, -1e308)):
        values = {"loss": loss}
        story.say(Metrics(t_ns=story.t_ns + step, worker="w1-0", seat=0, step=step, values=values))
    assert "<polyline" in render_parts(read(tmp_path))["curves"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["no-such"], "cannot be read"),
        (["."], "no run directory and holds none"),
        (["run", "--port", "99999"], "--port 99999 is not in 0 to 65535"),
        (["run", "--price-per-hour", "-1"], "is negative"),
        (["run", "--export", "here.html"], "exists"),
        ([], "no run directory was given, and runs/ holds none"),
        (["run", "--plan"], "the pages of one have a link to the planner"),
        (["run", "--query", "step=3", "--export", "x.html"], "--query is of a lake and of --plan"),
        (["run", "--query", "step=3"], "--query is of --export"),
        (["--plan", "--query", "gpus=4"], "--query is of --export"),
        (["--plan", "--query", "gpus=luck", "--export", "x.html"], "--gpus luck"),
        (["--plan", "--query", "luck=1", "--export", "x.html"], "'luck' is unknown"),
        (["--plan", "--query", "rates=x", "--export", "x.html"], "rates names a file"),
        (["--plan", "--export", "here.html"], "exists"),
        (["--plan", "--price-per-hour", "2"], "--price-per-hour is of a run"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    words: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.html").touch()
    if "run" in words:
        SyntheticRun(tmp_path / "run", world=2).start().steps(3).end()
    assert main(["view", *words]) in (EXIT_USAGE, 1)
    assert why in " ".join(capsys.readouterr().err.replace("│", " ").split())
