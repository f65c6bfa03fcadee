"""`outlast plan` run in the test's process."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from outlast.cli.main import main


class Said(NamedTuple):
    """Result of a command; `err` is one line, without its frame."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def named(self, name: str) -> dict[str, Any]:
        """Return the quantity of this name."""
        (found,) = [one for one in self.json["quantities"] if one["name"] == name]
        return found


class Plan:
    """Runs `outlast plan ...` with a width at which no line is folded."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Said:
        code = main(["plan", *arguments])
        out, err = self._capsys.readouterr()
        return Said(code, out, " ".join(err.replace("│", " ").split()))
