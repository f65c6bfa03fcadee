"""Extras install all imports of their packages: `outlast[fleet]` suffices for Fleet."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Source

BESIDE = {"figures": {"matplotlib"}}  # what is drawn is an extra of its own, and said to be


def _brought(root: Path, *extras: str) -> set[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return {re.split(r"[^\w-]", line)[0] for line in lines}


def _third_party(source: Source) -> set[str]:
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found - sys.stdlib_module_names - {"outlast"}


@pytest.mark.parametrize(
    ("extra", "rooms"), [("fleet", {"fleet", "node_logs"}), ("plan", {"plan"})]
)
def test_an_extra_brings_what_its_rooms_import(
    package: list[Source], root: Path, extra: str, rooms: set[str]
) -> None:
    command = f"src/outlast/cli/{extra}/"
    ours = [one for one in package if one.room in rooms or one.path.startswith(command)]
    assert len(ours) > 5
    needed = set().union(*(_third_party(source) for source in ours))
    drawn = BESIDE["figures"] & _brought(root, "figures")
    optional = {"distributed", "dask"}  # plan on many machines: an extra that says so when missing
    assert needed - _brought(root, extra) - drawn - optional == set()
