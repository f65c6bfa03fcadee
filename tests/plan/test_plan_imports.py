"""Imports of `outlast plan` at a cold start."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "numba", "scipy", "matplotlib", "pyarrow"}
ASKED = """
import contextlib, io, json, sys
from outlast.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    codes = [main(["plan", *one.split()]) for one in sys.argv[1:]]
print(json.dumps([codes, sorted(sys.modules)]))
"""


def loaded(*asked: str) -> set[str]:
    """The modules of a process that was asked these, all of which it answered."""
    done = subprocess.run(
        [sys.executable, "-c", ASKED, *asked],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    codes, modules = json.loads(done.stdout)
    assert codes == [0] * len(asked), done.stderr
    return set(modules)


@pytest.mark.process
def test_help_needs_no_markdown_and_no_question() -> None:
    """Markdown's parser took a third of its time."""
    modules = loaded("--help")
    assert not modules & (HEAVY | {"rich.markdown", "msgspec"})
    assert not any(one.startswith(("outlast.plan.", "outlast.theory")) for one in modules)


@pytest.mark.process
def test_listings_load_no_reproduced_document() -> None:
    modules = loaded("fields", "presets")
    assert not any(name.startswith("outlast.plan.reproduce") for name in modules)


@pytest.mark.process
def test_theory_needs_no_numerical_library() -> None:
    asked = [f"{name} --gpus 1024" for name in ("interval", "ettr", "replicas", "spares")]
    assert not loaded(*asked, "presets", "fields", "interval --help") & HEAVY
