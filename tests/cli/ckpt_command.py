"""Checkpoints for `outlast ckpt`, and the command run in the test's process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.checkpoint.checkpoint_maker import make

from outlast.checkpoint.format.manifests import SavePoint
from outlast.cli.main import main


def place(step: int) -> SavePoint:
    return SavePoint(step, step, "a1")


def checkpoint(root: Path, step: int, *, world: int = 2, **tensors: Any) -> Path:
    """Write a checkpoint, by default 40 kB in chunks of 4096 bytes; return its directory."""
    numbers = np.random.default_rng(step)
    given = tensors or {
        "model.0.weight": numbers.standard_normal((60, 80), np.float32),
        "model.1.weight": numbers.standard_normal((60, 80), np.float32),
        "model.1.bias": numbers.standard_normal(80, np.float32),
    }
    return make(root, place(step), given, world, chunk_bytes=4096, time_ns=step)


def flip(path: Path, at: int) -> None:
    """Flip one bit of the byte `at`."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def tree(root: Path) -> dict[str, bytes]:
    """Return all paths below a directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


class Said(NamedTuple):
    """Result of one command; `err` is one line, without its frame."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Ckpt:
    """Runs `outlast ckpt ...` with a width at which no line is folded."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object) -> Said:
        code = main(["ckpt", *map(str, words)])
        captured = self._capsys.readouterr()
        err = " ".join(captured.err.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
        assert "Traceback" not in captured.err
        return Said(code, captured.out, err)
