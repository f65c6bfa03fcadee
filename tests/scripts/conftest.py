"""Table of the catalogue's results, printed and written as JSON after all tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ARTEFACT = "runs/scripts.json"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print script x way, and write the same to ARTEFACT."""
    rows: dict[str, dict[str, str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                told = dict(report.user_properties)
                if "script" in told:
                    row = rows.setdefault(str(told["script"]), {"kind": str(told["kind"])})
                    row[str(told["way"])] = _result(report, told)
    if not rows:
        return
    terminalreporter.section("scripts")
    for name, row in sorted(rows.items()):
        results = ", ".join(f"{way} {result}" for way, result in row.items() if way != "kind")
        terminalreporter.write_line(f"{name:<28} {results}")
    path = Path(terminalreporter.config.rootpath) / ARTEFACT
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(rows, indent=2, sort_keys=True) + "\n")


def _result(report: pytest.TestReport, told: dict[str, Any]) -> str:
    if hasattr(report, "wasxfail") and not report.passed:
        return f"FAILED as expected: {report.wasxfail}"
    return str(told["holds"]) if report.passed else "FAILED"
