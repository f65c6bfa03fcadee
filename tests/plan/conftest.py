"""Fixture that runs `outlast plan`."""

import pytest
from tests.plan.plan_command import Plan


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("COLUMNS", "300")
    return Plan(capsys)
