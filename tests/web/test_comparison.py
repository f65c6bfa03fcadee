"""Two runs side by side: answers, waterfalls, curves on common axes, and what differs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from http.client import HTTPResponse
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.telemetry.synthetic_run import SyntheticRun
from tests.web.conftest import serving
from tests.web.test_page_server import get

from outlast.events import Metrics
from outlast.telemetry.run_summary import summarise
from outlast.text_formatting import percentage
from outlast.web.comparison.comparison_page import (
    HEIGHT,
    ComparedRun,
    RunCurve,
    draw_common,
    render_comparison,
)
from outlast.web.comparison.run_settings import differences, read_settings
from outlast.web.page_figures import X
from outlast.web.run_content import RunReading

HOSTILE = '<script>alert("x")</script>'


def started(run_dir: Path, steps: int, *, world: int = 2, plan: object = None) -> SyntheticRun:
    run = SyntheticRun(run_dir, world=world).start().steps(steps)
    values = {"loss": 1.5}
    run.say(Metrics(t_ns=run.t_ns, worker="w1-0", seat=0, step=steps, values=values))
    if plan is not None:
        (run_dir / "plan.json").write_text(json.dumps({"version": 1, "plan": plan}))
    return run


def commit(run_dir: Path, step: int, **origin: str) -> None:
    where = run_dir / "checkpoints" / f"step-{step:09d}"
    where.mkdir(parents=True)
    (where / "commit.json").write_text(json.dumps({"origin": origin, "time_ns": step}))


def compared(*run_dirs: Path) -> str:
    runs = [
        ComparedRun(path.name, RunReading(path).refresh() or "empty", read_settings(path))
        for path in run_dirs
    ]
    return unescape(render_comparison(run_dirs[0].parent, runs))


def test_runs_of_different_length(tmp_path: Path) -> None:
    run = started(tmp_path / "long", 40, plan={"world": 2, "policy": {"name": "default"}})
    run.killed(1).steps(5).end().close()
    started(tmp_path / "short", 7, plan={"world": 2, "policy": {"name": "elastic"}}).close()
    commit(tmp_path / "long", 3, torch="2.12", python="3.11")
    commit(tmp_path / "long", 9, torch="2.13", python="3.11")
    commit(tmp_path / "short", 3, torch="2.14", python="3.11")
    text = compared(tmp_path / "long", tmp_path / "short")
    assert "step 45" in text and "step 7" in text and "1 incident" in text
    for name in ("long", "short"):
        summary = summarise(tmp_path / name)
        assert summary.goodput is not None
        assert f'<td class="number">{percentage(summary.goodput)}</td>' in text
    assert re.search(r"policy\.name</th><td>default</td><td>elastic<", text)
    assert re.search(r"torch</th><td>2\.13</td><td>2\.14<", text)
    assert ">python<" not in text and ">world<" not in text
    first, second = re.findall(r'class="curve run-(\d)" points="([^"]*)"', text)[-2:]
    ends = [float(points.split()[-1].split(",")[0]) for _, points in (first, second)]
    assert ends[0] == X and 0 < ends[1] < 200


def test_a_damaged_run_and_a_live_one(tmp_path: Path) -> None:
    started(tmp_path / "live", 5, plan={"world": 2})
    (tmp_path / "damaged" / "events").mkdir(parents=True)
    (tmp_path / "damaged" / "plan.json").write_text("[" * 100_000)
    text = compared(tmp_path / "live", tmp_path / "damaged")
    assert "empty" in text and "step 5" in text
    assert "damaged: settings are unknown: plan.json cannot be read" in text
    assert "live: versions are unknown: it has no checkpoint" in text
    assert "<td>not known" not in text and "<p>None.</p>" not in text


def test_a_file_outside_of_the_run_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    started(secret, 2, plan={"token": "very-secret"}).close()
    started(tmp_path / "run", 2).close()
    (tmp_path / "run" / "plan.json").symlink_to(secret / "plan.json")
    found = read_settings(tmp_path / "run")
    assert found.settings == {} and "leads out of the run directory" in found.missing[0]
    (secret / "plan.json").write_bytes(b" " * (5 << 20))
    assert "larger than" in read_settings(secret).missing[0]


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    started(tmp_path / "a", 3, plan={HOSTILE: HOSTILE * 1000}).close()
    started(tmp_path / "b", 3, plan={"x": [HOSTILE]}).close()
    runs = [
        ComparedRun(HOSTILE, RunReading(path).refresh() or "", read_settings(path))
        for path in (tmp_path / "a", tmp_path / "b")
    ]
    html = render_comparison(Path(HOSTILE), runs)
    assert "<script>alert" not in html and " style=" not in html and len(html) < 60_000


def test_differences_have_both_sides() -> None:
    found = differences({"a": "1", "b": "2"}, {"b": "3", "c": "4"})
    assert [tuple(one) for one in found] == [("a", "1", None), ("b", "2", "3"), ("c", None, "4")]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 10**9), st.floats(allow_nan=True)), max_size=900),
        min_size=2,
        max_size=2,
    )
)
def test_curves_stay_inside(curves: list[list[tuple[int, float]]]) -> None:
    drawn = draw_common(
        [
            RunCurve(
                np.array([step for step, _ in sorted(points)], dtype=np.int64),
                np.array([value for _, value in sorted(points)], dtype=np.float64),
            )
            for points in curves
        ]
    )
    for points in re.findall(r'points="([^"]*)"', drawn):
        places = [tuple(map(float, place.split(","))) for place in points.split()]
        assert all(0 <= x <= X and 0 <= y <= HEIGHT for x, y in places)
        assert len(places) <= 801


@pytest.mark.process
def test_the_server_compares_two(tmp_path: Path) -> None:
    started(tmp_path / "a b&#%c", 9, plan={"world": 2}).end().close()
    started(tmp_path / "live", 5, plan={"world": 2})
    (tmp_path / "damaged" / "events").mkdir(parents=True)
    with serving(tmp_path) as link:
        index = get(link).body.decode()
        assert index.count('type="checkbox"') == 3 and 'action="/compare"' in index

        def answer(*names: str, **others: str) -> tuple[int, str]:
            pairs = [*(("run", name) for name in names), *others.items()]
            answered = get(link, f"/compare?{urlencode(pairs)}")
            return answered.status, unescape(answered.body.decode())

        status, text = answer("a b&#%c", "live")
        assert status == 200 and "step 9" in text and "step 5" in text and "None." in text
        assert answer("live", "damaged")[0] == 200
        for names, code, why in (
            ((), 400, "choose two runs; the address has 0 values"),
            (("live",), 400, "choose two runs; the address has 1 value"),
            (("live", "damaged", "a b&#%c"), 400, "3 values"),
            (("live", "live"), 400, "the two runs are the same one"),
            (("live", "other"), 404, "there is no run other"),
            (("live", "../live"), 404, "there is no run ../live"),
            (("live", "x" * 9000), 400, "a name has 9,000 characters"),
            (("live", HOSTILE), 404, "there is no run"),
        ):
            status, text = answer(*names)
            assert (status, why in text, 'role="alert"' in text) == (code, True, True), text
            assert len(text) < 20_000
        assert answer("live", strategy="drop")[0] == 400
        assert get(link, "/compare/stream?run=live").status == 400
        assert get(link, "/compare/stream?run=live&run=other").status == 400


def _messages(response: HTTPResponse) -> Iterator[tuple[str, str]]:
    """Yield the events of a stream, with their data."""
    event = "message"
    for line in response:
        key, _, text = line.decode().rstrip("\n").partition(": ")
        if key == "event":
            event = text
        elif key == "data":
            yield event, text
            event = "message"


@pytest.mark.process
def test_the_page_follows_until_both_have_ended(tmp_path: Path) -> None:
    started(tmp_path / "short", 7).end().close()
    run = started(tmp_path / "live", 5)
    with serving(tmp_path) as link, urlopen(f"{link}compare/stream?run=short&run=live") as answer:
        messages = _messages(answer)
        first = json.loads(next(messages)[1])
        assert set(first["parts"]) == {"answers", "waterfall", "curves"}
        page = get(link, "/compare?run=short&run=live").body.decode()
        assert first["parts"]["curves"] in page and "step 5" in first["parts"]["answers"]
        assert "data-stream=" in page
        run.steps(3).end().close()
        *others, (event, text) = messages
        assert (event, text) == ("end", "both have ended")
        parts = {key: html for _, each in others for key, html in json.loads(each)["parts"].items()}
        assert "step 8" in parts["answers"] and parts["curves"] != first["parts"]["curves"]
        assert "data-stream=" not in get(link, "/compare?run=short&run=live").body.decode()
