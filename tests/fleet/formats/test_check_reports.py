"""Ingestion of `outlast check --json` reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.whole_log import read_whole

from outlast.cli.main import main
from outlast.fleet.formats import hardware_logs
from outlast.fleet.lake import Lake
from outlast.health.node_report import NodeReport, NotApplicable
from outlast.log_records import Finding, Severity

T_NS = 1_715_940_000 * 10**9


def finding(node: str, severity: Severity = "drain", t_ns: int = T_NS, **other: str) -> Finding:
    said = {"cluster": "", "check": "gpu", "code": "", "device": "0", "detail": "hot", **other}
    return Finding(t_ns=t_ns, node=node, symptom="thermal", severity=severity, **said)


def line(*found: Finding, absent: int = 0) -> str:
    import msgspec

    report = NodeReport(
        cluster="", node="n1", profile="periodic", t_ns=T_NS, took_s=0.1, severity="drain",
        findings=found, not_applicable=tuple(NotApplicable("x", "", "no") for _ in range(absent)),
    )  # fmt: skip
    return msgspec.json.encode(report).decode() + "\n"


def summary(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["fleet", "ingest", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_output_of_check_is_ingested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, log, lake = tmp_path / "check.toml", tmp_path / "checks.jsonl", tmp_path / "lake"
    texts = []
    for node in ("n1", "n2"):
        settings.write_text(f'node = "{node}"\n[memory]\ntotal_gib = 1e6\n')
        assert main(["check", "--only", "memory", "--settings", str(settings), "--json"]) == 1
        texts.append(capsys.readouterr().out)
    log.write_text("".join(texts))
    found = summary(capsys, lake, log, "--cluster", "rsc")["read"][0]["source"]
    assert found["format"] == "check" and found["rejects"] == {}
    findings = Lake.open(lake).tables().findings.filter(check="memory", severity="drain").collect()
    assert sorted(findings["node"]) == ["n1", "n2"] and set(findings["cluster"]) == {"rsc"}
    (tmp_path / "one").write_text(json.dumps(json.loads(texts[0]), indent=2, sort_keys=True))
    again = summary(capsys, lake, tmp_path / "one", "--cluster", "rsc")
    records, known, _ = again["added"]["findings"]
    assert records == known, "one report over several lines says the same"


def test_each_row_has_its_place(tmp_path: Path) -> None:
    log = tmp_path / "checks.jsonl"
    well = [finding("n1", "healthy"), finding("n1", "unknown"), finding("n1")]
    wrong = [finding(""), finding("n1", t_ns=0), finding("n1", t_ns=2**64)]
    strange = line(finding("n1")).replace('"thermal"', '"dread"')
    newer = line(finding("n1")).replace('"version":1', '"version":2', 1)
    deep = '{"version":1,"findings":' + "[" * 10_000 + "\n"
    log.write_text(line(*well, *wrong, absent=2) + strange + newer + deep + line())
    reading = hardware_logs.read_check_reports(log, "rsc")
    whole = read_whole(reading)
    assert list(whole.tables["findings"]["severity"]) == ["unknown", "drain"]
    assert reading.totals.skipped == {
        "healthy findings": 1,
        "check that does not apply to its node": 2,
    }
    assert reading.totals.rejects == {
        hardware_logs.NO_NODE: 1,
        hardware_logs.NO_TIME: 2,
        hardware_logs.NO_FINDING: 1,
        hardware_logs.NEWER: 1,
        hardware_logs.NO_REPORT: 1,
    }


def test_a_repeated_held_finding_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "checks.jsonl"
    held = (f"hot ({ago} s ago; held until quiet for 1800 s)" for ago in (60, 360))
    log.write_text(line(finding("n1")) + "".join(line(finding("n1", detail=d)) for d in held))
    assert summary(capsys, tmp_path / "lake", log, "--as", "check")["rows"] == {"findings": 1}
