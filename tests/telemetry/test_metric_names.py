"""Names, types and labels of all metrics, which a golden file freezes, and Grafana's own models."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from tests.telemetry.test_run_metrics import RULES, played

from outlast.fleet.report.fleet_report import FleetReport
from outlast.fleet.report.report_metrics import report_metrics
from outlast.health.check_metrics import check_metrics
from outlast.health.node_report import NodeReport
from outlast.telemetry.run_board import RunBoard

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
GOLDEN = Path(__file__).with_name("golden") / "metrics.txt"
BOARDS = sorted(RULES.parent.glob("*_dashboard.json"))
UNMODELLED = {"definition", "titleFormat"}  # fields of queries, which Grafana has for each source


def lines(families: Iterable[Metric]) -> list[str]:
    """Return `NAME{LABELS} TYPE` for each family."""
    found = []
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ",".join(getattr(family, "_labelnames", ()))
        found.append(f"{name}{{{labels}}} {family.type}" if labels else f"{name} {family.type}")
    return found


def run_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Metric]:
    """Return all families of a run, with those that are missing while their value is unknown."""
    metrics = played(tmp_path)
    metrics.feed.board.steps_total = 20
    monkeypatch.setattr(RunBoard, "steps_per_s", lambda _: 10.0)
    return list(metrics.collect())


def node_families() -> list[Metric]:
    report = NodeReport(
        cluster="c", node="n7", profile="periodic", t_ns=1, took_s=0.5, severity="unknown",
        findings=(), not_applicable=(),
    )  # fmt: skip
    return check_metrics(report)


def fleet_families() -> list[Metric]:
    report = FleetReport(
        version="1", source="lake", cluster="c", since_ns=0, until_ns=1, records={},
        headlines=[], sections=[], notes=[],
    )  # fmt: skip
    return report_metrics(report)


def test_names_are_those_of_the_golden_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = lines([*run_families(tmp_path, monkeypatch), *node_families(), *fleet_families()])
    assert sorted(found) == GOLDEN.read_text().splitlines()
    page = PAGE.read_text()
    for line in found:
        assert f"`{line.split()[0].partition('{')[0]}" in page, line


def test_alerts_and_dashboards_use_names_of_the_golden_file() -> None:
    known = {re.split(r"[{ ]", line)[0] for line in GOLDEN.read_text().splitlines()}
    for path in (RULES, *BOARDS):
        used = set(re.findall(r"\boutlast_(?!alerts)\w+", path.read_text()))
        assert used and used - known == set(), path.name


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_grafanas_models_know_every_field_of_a_dashboard(path: Path) -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = importlib.import_module("grafana_foundation_sdk.cog.encoder")
    importlib.import_module("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    board = models.Dashboard.from_json(json.loads(path.read_text()))
    assert differences(
        json.loads(path.read_text()), json.loads(encoder.JSONEncoder().encode(board))
    ) <= {f".{name}" for name in UNMODELLED}


def differences(ours: object, theirs: object, name: str = "") -> set[str]:
    """Return the names of fields that are missing, or different, after a reading."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        missing = {f".{key}" for key in ours if key not in theirs}
        pairs = [(value, theirs[key], key) for key, value in ours.items() if key in theirs]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        missing = set()
        pairs = [(one, other, name) for one, other in zip(ours, theirs, strict=True)]
    else:
        return set() if ours == theirs else {name}
    return missing.union(*(differences(one, other, key) for one, other, key in pairs))
