"""Parsed sources and documents of the repository."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Source(NamedTuple):
    """One Python file. `room` is its folder under src/outlast, or its stem for the base files."""

    path: str
    room: str
    text: str
    tree: ast.Module

    def at(self, node: ast.AST, what: str) -> str:
        """Return one line of a failure message."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {what}"


def _read(path: Path) -> Source:
    text = path.read_text()
    inside = path.relative_to(ROOT)
    room = inside.parts[2].removesuffix(".py") if inside.parts[0] == "src" else inside.parts[0]
    return Source(str(inside), room, text, ast.parse(text))


def _all(*folders: str) -> list[Source]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [_read(path) for path in paths]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def package() -> list[Source]:
    """Return the sources that are installed: src/outlast."""
    found = _all("src/outlast")
    assert len(found) >= 9, "the sources were not found, so nothing would be checked"
    return found


@pytest.fixture(scope="session")
def tests() -> list[Source]:
    return _all("tests")


@pytest.fixture(scope="session")
def everything(package: list[Source], tests: list[Source]) -> list[Source]:
    return package + tests + _all("examples", "benchmarks", "conformance")


@pytest.fixture(scope="session")
def documents() -> list[Path]:
    found = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("conformance/*.md"),
    ]
    assert ROOT / "README.md" in found
    return sorted(found)
