"""Table of the catalogue's results, printed and written as JSON after all tests."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from tests.scripts.script_catalogue import Script

ARTEFACT = "runs/scripts.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--share`."""
    parser.addoption(
        "--share", metavar="K/N", default="1/1", help="only every N-th script of the catalogue"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the scripts of share K of N; shares are disjoint, and their union is the catalogue."""
    share, shares = map(int, config.getoption("--share", "1/1").split("/"))
    if not 1 <= share <= shares:
        raise pytest.UsageError(f"--share {share}/{shares}: K is from 1 to N")
    others = {item for item in items if _share_of(item, shares) not in (None, share)}
    if others:
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


def _share_of(item: pytest.Item, shares: int) -> int | None:
    script = getattr(item, "callspec", None) and item.callspec.params.get("script")
    return zlib.crc32(script.name.encode()) % shares + 1 if isinstance(script, Script) else None


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
