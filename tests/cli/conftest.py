"""Fixture that runs `outlast ckpt`."""

import pytest
from tests.cli.ckpt_command import Ckpt


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ckpt:
    monkeypatch.setenv("COLUMNS", "400")
    return Ckpt(capsys)
