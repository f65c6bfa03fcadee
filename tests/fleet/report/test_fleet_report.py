"""Fleet report: figures of the analyses, escaped text, and notes on sparse data."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from outlast.cli.fleet.analysis_commands import Drawer
from outlast.cli.main import main
from outlast.errors import EXIT_USAGE, EXIT_USER_ERROR, OutlastError
from outlast.fleet.analysis import failure_attribution, failure_rates, job_runs, lemons
from outlast.fleet.analysis.failure_attribution import worst_nodes
from outlast.fleet.record_tables import DAY_NS, Tables, tables
from outlast.fleet.report import report_figures
from outlast.fleet.report.fleet_report import DrawnReport, build_report, render_page
from outlast.fleet.report.report_sections import ReportColumn
from outlast.fleet.synth.ground_truth import GroundTruth
from outlast.fleet.synth.synthetic_cluster import make_cluster
from outlast.log_records import Finding, JobEnded

HOSTILE = "<script>alert(1)</script>\"'&\u202e"


@pytest.fixture(scope="module")
def small() -> tuple[Tables, GroundTruth]:
    return make_cluster("rsc1", 10, seed=3, nodes=128)


@pytest.fixture(scope="module")
def whole(small: tuple[Tables, GroundTruth]) -> DrawnReport:
    return build_report(small[0], "a cluster")


class Page(HTMLParser):
    """Tags and attributes of a page, and the texts of its headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.headings: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "h2":
            self.headings.append(data)


def test_figures_are_those_of_the_analyses(
    small: tuple[Tables, GroundTruth], whole: DrawnReport
) -> None:
    found = failure_attribution.attribute_failures(small[0])
    rows = {one.key: one.rows for one in whole.report.sections}
    rate = failure_rates.failure_rate(small[0], found)
    assert whole.report.headlines[0].figure == f"{rate.per_1000_node_days:.2f}"
    of_states = job_runs.jobs_by_state(small[0], found)
    assert sum(one["jobs"] for one in rows["states"]) == of_states["jobs"].sum()
    ranking = lemons.rank_lemons(small[0], worst_nodes(found).collect().lazy())
    called = [one["node"] for one in rows["lemons"] if one["called"]]
    assert called == ranking.filter("lemon")["node"].to_list()
    assert all(
        set(row) == {c.key for c in one.columns}
        for one in whole.report.sections
        for row in one.rows
    )
    assert {one.section.key for one in whole.sections if one.draw} >= {
        "states",
        "causes",
        "sizes",
        "mttf",
    }


def hostile() -> Tables:
    """Names as a user may give them, in every field that a page shows."""
    hour = 3600 * 10**9
    jobs = [
        JobEnded(
            t_ns=(k + 1) * hour, cluster=HOSTILE, job=HOSTILE, attempt=k, name=HOSTILE,
            user=HOSTILE, account="", partition=HOSTILE, qos=HOSTILE, state="NODE_FAIL",
            exit_code=1, signal=0, submit_ns=k * hour, eligible_ns=k * hour, start_ns=k * hour + 1,
            nodes=1, gpus=8, hosts="n1", excluded="", failed_node="n1", priority=1, restarts=k,
        )
        for k in range(60)
    ]  # fmt: skip
    findings = [
        Finding(
            t_ns=one.t_ns, cluster=HOSTILE, node="n1", check=HOSTILE, symptom="pcie",
            severity="now", code=HOSTILE, device="", detail=HOSTILE,
        )
        for one in jobs
    ]  # fmt: skip
    return tables([*jobs, *findings], 0, 4 * DAY_NS)


def test_names_in_the_page_are_escaped(whole: DrawnReport) -> None:
    bad = build_report(hostile(), HOSTILE)
    shown = [value for one in bad.report.sections for row in one.rows for value in row.values()]
    assert HOSTILE in shown
    for one in (whole, bad):
        shown = Page(render_page(one, {"states": "<svg></svg>"}))
        assert shown.headings == [each.title for each in one.report.sections]
        assert not {"script", "img", "iframe", "object", "link", "form"} & set(shown.tags)
        for name, value in shown.attributes:
            assert not name.startswith("on") and "javascript:" not in (value or "")
            assert name not in ("src", "action") and (name != "href" or (value or "")[:1] == "#")
    assert "<script>" not in render_page(bad, {})


def test_small_samples_are_noted(whole: DrawnReport) -> None:
    nothing = build_report(tables([], 0, DAY_NS), "nothing")
    text = " ".join(nothing.report.notes)
    assert "no job is in this window" in text and "too short" in text
    assert not [one for one in nothing.sections if one.draw]
    assert "None." in render_page(nothing, {})
    few = build_report(
        tables([one for one in _jobs(hostile()) if one.attempt < 3], 0, DAY_NS), "few"
    )
    text = " ".join(few.report.notes)
    assert "rests on 0 failures" in text and "no health findings" in text


def _jobs(of: Tables) -> list[JobEnded]:
    return [JobEnded(**row) for row in of.jobs.collect().to_dicts()]


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (None, "share", ""), (0.0123, "share", "1.23 %"), (1.0, "share", "100 %"),
        (1234567, "count", "1,234,567"), (float("inf"), "hours", "never"), (7.66, "hours", "7.7"),
        (3e-9, "p", "3e-09"), (12.345, "times", "12.3"), (float("nan"), "times", ""),
        ("a", "", "a"),
    ],
)  # fmt: skip
def test_cells(value: object, unit: str, said: str) -> None:
    from outlast.fleet.report.fleet_report import format_cell

    assert format_cell(value, ReportColumn("key", "said", unit)) == said  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the logs that a site would have."""
    site = tmp_path_factory.mktemp("site")
    small = ["--shape", "rsc1", "--days", "6", "--seed", "2", "--nodes", "48"]
    assert main(["fleet", "synth", str(site / "logs"), *small]) == 0
    logs, there = site / "logs", site / "lake"
    assert main(["fleet", "ingest", str(there), str(logs / "sacct.txt")]) == 0
    for name in ("health.jsonl", "outages.csv", "nodes.csv"):
        mapping = str(logs / name.replace(".jsonl", ".toml").replace(".csv", ".toml"))
        assert main(["fleet", "ingest", str(there), str(logs / name), "--mapping", mapping]) == 0
    return there


def test_the_command(lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    capsys.readouterr()
    assert main(["fleet", "report", str(lake), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = [one["key"] for one in found["sections"]]
    assert keys[:4] == ["lemons", "parts", "goodput", "ettr"] and found["records"]["jobs"] > 0
    text = out.read_text()
    assert Page(text).headings == [one["title"] for one in found["sections"]]
    assert text.count("<svg") >= 3 and "mathdefault" not in text
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "two figures of a page share an identifier"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert main(["fleet", "report", str(lake), "--out", str(tmp_path / "b.html")]) == 0
    said = capsys.readouterr().out
    assert all(one["figure"] in said for one in found["headlines"]) and "written to" in said
    part = ["--since", "2024-06-02", "--until", "2024-06-04", "--json"]
    assert main(["fleet", "report", str(lake), *part]) == 0
    cut = json.loads(capsys.readouterr().out)
    assert 0 < cut["records"]["jobs"] < found["records"]["jobs"]


def test_ettr_without_lemons_is_higher(
    small: tuple[Tables, GroundTruth], whole: DrawnReport
) -> None:
    (lemons, otherwise) = (
        one.section for one in whole.sections if one.section.key in ("lemons", "whatif")
    )
    assert any(row["called"] for row in lemons.rows) and otherwise.rows
    assert all(row["without the lemons"] > row["as it is"] for row in otherwise.rows)
    quiet = build_report(small[0]._replace(jobs=small[0].jobs.head(100)), "few jobs").report
    (without,) = [one for one in quiet.sections if one.key == "whatif"]
    assert "without the lemons" not in [column.key for column in without.columns]


def _killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_drawing_process_is_an_error(
    lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report_figures, "draw_states", _killed)
    out = tmp_path / "x.html"
    assert main(["fleet", "report", str(lake), "--out", str(out)]) == EXIT_USER_ERROR
    assert "the process that draws the figures was killed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_dead_drawing_process_is_an_error_at_the_next_figure(whole: DrawnReport) -> None:
    told = next(one for one in whole.sections if one.draw)._replace(draw=_killed)
    with Drawer() as drawer:
        drawer.take(told)
        with pytest.raises(OutlastError, match="the process that draws the figures was killed"):
            drawer.drawn()
        with pytest.raises(OutlastError, match="the process that draws the figures was killed"):
            drawer.take(told)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], EXIT_USAGE, "--out report.html, or --json"),
        (["--out", "x.png"], EXIT_USAGE, "must end in .html"),
        (["--out", "here.html"], EXIT_USAGE, "exists already"),
        (["--out", "no/x.html"], EXIT_USAGE, "no directory"),
        (
            ["--json", "--since", "2030-01-01"],
            EXIT_USAGE,
            "--since 2030-01-01 is not before --until 2024-06-07",
        ),
        (["--json", "--since", "yesterday"], EXIT_USAGE, "not a date or time"),
    ],
)
def test_invalid_arguments(
    lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int,
    said: str, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.html").touch()
    assert main(["fleet", "report", str(lake), *words]) == code
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["here.html"]


@pytest.mark.process
def test_a_browser_shows_it_without_a_complaint(whole: DrawnReport, tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("there is no Chromium on this machine")
    path = tmp_path / "page.html"
    path.write_text(render_page(whole, _drawn(whole)), encoding="utf-8")
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.count("<h2>") == len(whole.sections) and done.stdout.count("<svg") >= 4
    assert "CONSOLE" not in done.stderr


def _drawn(whole: DrawnReport) -> dict[str, str]:
    from outlast import figure_style

    def of(draw: Callable[..., None], key: str) -> str:
        return figure_style.svg(draw, key)

    return {one.section.key: of(one.draw, one.section.key) for one in whole.sections if one.draw}
