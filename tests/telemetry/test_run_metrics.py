"""Metrics of a run: names, values, alert rules, and a real Prometheus."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.cli.main import main
from outlast.telemetry.event_store import EventReader
from outlast.telemetry.live_view import LineDisplay
from outlast.telemetry.metrics.metrics_endpoint import LAST_SCRAPE_S, MetricsEndpoint
from outlast.telemetry.metrics.run_metrics import RunMetrics

RULES = Path(__file__).parents[2] / "examples/monitoring/outlast_alerts.yml"
needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="there is no promtool on this machine"
)


def played(run_dir: Path, file: str = "", endpoint: MetricsEndpoint | None = None) -> RunMetrics:
    """Return the metrics of a run whose events a display has shown."""
    story = SyntheticRun(run_dir, world=4, spares=1).start().steps(5).killed(2).steps(5)
    metrics = RunMetrics(
        LineDisplay(None, lines=io.StringIO(), stream=io.StringIO()), file, endpoint
    )
    for event in EventReader(run_dir).poll():
        metrics.event(event)
    rows = dict.fromkeys(story.seats, (10, 10, "running", 2.5))
    metrics.beats(rows)
    return metrics


def values(metrics: RunMetrics) -> dict[str, float]:
    found = {}
    for family in metrics.collect():
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_values_are_those_of_the_board(tmp_path: Path) -> None:
    found = values(played(tmp_path))
    assert found["outlast_ranks"] == 4 and found["outlast_step"] == 10
    assert found["outlast_incidents_total{cause=killed,rung=replace}"] == 1
    assert found["outlast_committed_steps_lost_total"] == 0
    assert found["outlast_training"] == 1 and found["outlast_loss"] == 2.5
    assert found["outlast_generation"] == 2


@needs_promtool
def test_a_file_that_prometheus_reads(tmp_path: Path) -> None:
    file = tmp_path / "run.prom"
    metrics = played(tmp_path / "run", str(file))
    metrics.close()
    words = ["promtool", "check", "metrics"]
    done = subprocess.run(words, input=file.read_bytes(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_the_end_waits_for_a_scrape_where_there_were_two() -> None:
    endpoint = MetricsEndpoint("127.0.0.1", 0)
    assert endpoint.last_scrape_due_s() == 0
    for _ in range(2):
        urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=30).close()
    wait_s = endpoint.last_scrape_due_s()
    assert 0 < wait_s <= LAST_SCRAPE_S
    endpoint.close()


def test_a_port_is_served_and_refused_when_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = MetricsEndpoint("127.0.0.1", 0)
    metrics = played(tmp_path / "run", endpoint=endpoint)
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=30) as answer:
        assert b"outlast_step 10.0" in answer.read()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    assert main(["run", "--run-dir=new", f"--metrics-port={endpoint.port}", "x.py"]) == 2
    assert "nothing was started" in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "new").exists()
    metrics.close()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--metrics-port", "70000"], "is not a port from 0 to 65535"),
        (["--metrics-port", "-1"], "metrics-port"),
        (["--metrics-file", "no/such/run.prom"], "its directory is missing"),
    ],
)
def test_flags_that_cannot_work_are_refused(
    flags: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    assert main(["run", "--nproc-per-node", "1", *flags, "x.py"]) == 2
    assert why in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert [path.name for path in tmp_path.iterdir()] == ["x.py"]


SERIES = {  # alert -> series that fire it, and those that do not
    "OutlastNoCommit": (
        {"outlast_last_commit_timestamp_seconds": "0x40", "outlast_step_seconds": "1x40"},
        {"outlast_last_commit_timestamp_seconds": "0+60x40", "outlast_step_seconds": "1x40"},
    ),
    "OutlastRunFailed": (
        {'outlast_run_outcome{outcome="gave_up"}': "1x40"},
        {'outlast_run_outcome{outcome="done"}': "1x40"},
    ),
    "OutlastLauncherLost": (
        {"up": "1x20 0x20", "outlast_training": "1x20 stale _x20"},
        {
            "up": "1x20 0x20",
            "outlast_training": "1x20 stale _x20",
            'outlast_run_outcome{outcome="done"}': "_x19 1x1 stale _x20",
        },
    ),
    "OutlastCrashLoop": (
        {
            'outlast_incidents_total{cause="killed",rung="replace"}': "_x15 5x20",
            'outlast_incidents_total{cause="killed",rung="restart"}': "_x20 1x20",
        },
        {'outlast_incidents_total{cause="killed",rung="replace"}': "50x20 51x20"},
    ),
    "OutlastNoSpare": (
        {"outlast_spares": "0x40", "outlast_spares_planned": "2x40", "outlast_training": "1x40"},
        {"outlast_spares": "0x40", "outlast_spares_planned": "0x40", "outlast_training": "1x40"},
    ),
    "OutlastRanksAbsent": ({"outlast_ranks_absent": "2x40"}, {"outlast_ranks_absent": "2x20 0x20"}),
    "OutlastCheckpointTooOld": (
        {
            'outlast_checkpoint_timestamp_seconds{tier="disk"}': "-7200x40",
            "outlast_training": "1x40",
        },
        {'outlast_checkpoint_timestamp_seconds{tier="disk"}': "0x40", "outlast_training": "1x40"},
    ),
    "OutlastSaveFailed": (
        {'outlast_checkpoint_failures_total{tier="disk"}': "0x30 1x10"},
        {'outlast_checkpoint_failures_total{tier="disk"}': "1x40"},
    ),
    "OutlastGoodputLow": (
        {"outlast_goodput_ratio": "0.5x40", "outlast_step": "5000x40"},
        {"outlast_goodput_ratio": "0.5x40", "outlast_step": "10x40"},
    ),
    "OutlastBadNode": (
        {'outlast_findings_total{check="gpu",severity="drain"}': "_x30 1x10"},
        {'outlast_findings_total{check="gpu",severity="warn"}': "0x30 1x10"},
    ),
    "OutlastNodeCheckFailed": (
        {'outlast_check_severity{profile="periodic",severity="drain"}': "0x20 1x20"},
        {'outlast_check_severity{profile="periodic",severity="warn"}': "1x40"},
    ),
    "OutlastNodeCheckUnknown": (
        {'outlast_check_severity{profile="periodic",severity="unknown"}': "1x100"},
        {'outlast_check_severity{profile="periodic",severity="unknown"}': "1x50 0x50"},
    ),
    "OutlastNodeCheckStale": (
        {'outlast_check_timestamp_seconds{profile="periodic"}': "-3600x40"},
        {'outlast_check_timestamp_seconds{profile="prolog"}': "-3600x40"},
    ),
    "OutlastLemon": (
        {'outlast_fleet_lemon_failures{cluster="c",node="n7"}': "7x40"},
        {'outlast_fleet_lemons{cluster="c"}': "0x40"},
    ),
}


@needs_promtool
def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    cases = []
    for alert, pair in SERIES.items():
        for fires, series in zip((True, False), pair, strict=True):
            lines = "\n".join(
                f"      - series: '{_labelled(name)}'\n        values: '{text}'"
                for name, text in series.items()
            )
            check = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
            at = "90m" if alert == "OutlastNodeCheckUnknown" else "35m"
            samples = "[{labels: '{}', value: 1}]" if fires else "[]"
            cases.append(
                f"  - interval: 1m\n    input_series:\n{lines}\n    promql_expr_test:\n"
                f"      - expr: '{check}'\n        eval_time: {at}\n"
                f"        exp_samples: {samples}\n"
            )
    tests = tmp_path / "tests.yml"
    shutil.copy(RULES, tmp_path / "outlast_alerts.yml")
    tests.write_text("rule_files: [outlast_alerts.yml]\ntests:\n" + "".join(cases))
    words = ["promtool", "test", "rules", str(tests)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.split(": ")[1] for line in RULES.read_text().splitlines() if "- alert:" in line]
    assert names == list(SERIES)


def test_each_panel_says_what_it_shows_and_in_which_unit() -> None:
    paths = sorted(RULES.parent.glob("*_dashboard.json"))
    assert len(paths) == 3
    for path in paths:
        board = json.loads(path.read_text())
        panels = board["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert board["uid"].replace("-", "_") + "_dashboard.json" == path.name
        for panel in panels:
            assert panel["title"] and panel["description"] and panel["targets"], panel
            assert panel["fieldConfig"]["defaults"]["unit"], panel


def _labelled(series: str) -> str:
    name, _, labels = series.partition("{")
    return name + '{job="outlast",instance="a"' + (f",{labels}" if labels else "}")
