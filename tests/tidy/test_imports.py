"""Import rules: one direction between packages, and torch in few of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Source

BASE = {
    "errors": 0, "faults": 0, "atomic_files": 1, "config": 1, "events": 1, "pickle_reader": 1,
    "process_pool": 1, "quantities": 1, "random_state": 1,
    "figure_style": 2, "job_signals": 2, "log_records": 2, "terminal_tables": 2,
    "text_formatting": 2,
}  # fmt: skip
ROOMS = {
    "theory": 2,
    "transport": 2,
    "controller": 3,
    "checkpoint": 4,
    "data": 4,
    "telemetry": 4,
    "node_logs": 4,
    "fleet": 5,
    "health": 5,
    "plan": 5,
    "launch": 5,
    "worker": 5,
    "integrations": 6,
    "testing": 6,
    "web": 6,
}
FLOORS = {**BASE, **ROOMS, "cli": 7, "torch_plugin": 6, "__main__": 8}
TORCH_ROOMS = {"worker", "data", "checkpoint", "integrations", "job_signals", "random_state"}
TORCH_FILES = {
    "src/outlast/launch/torchrun_arguments.py",  # torchrun's own command line
    "src/outlast/torch_plugin.py",  # torch calls it
}
IMPURE = {
    "asyncio", "concurrent", "io", "logging", "multiprocessing", "os", "pathlib", "secrets",
    "select", "selectors", "shutil", "signal", "socket", "subprocess", "sys", "tempfile",
    "threading", "time", "uuid",
}  # fmt: skip


def _imported(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            module = node.module or ""
            if module in {"outlast", "outlast.controller"}:
                yield from ((node, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node, module


def test_imports_point_one_way(package: list[Source]) -> None:
    wrong = []
    for source in package:
        if source.room == "__init__":  # the façade: lazy, and above everything
            continue
        assert source.room in FLOORS, f"{source.path}: give this room its floor"
        for node, module in _imported(source.tree):
            room = module.split(".")[1] if module.startswith("outlast.") else source.room
            own = room == source.room
            if not own and room in FLOORS and FLOORS[room] >= FLOORS[source.room]:
                wrong.append(source.at(node, f"{source.room} imports {module}"))
    assert wrong == []


def test_only_listed_packages_import_torch(package: list[Source]) -> None:
    wrong = [
        source.at(node, f"imports {module}")
        for source in package
        if source.room not in TORCH_ROOMS and source.path not in TORCH_FILES
        for node, module in _imported(source.tree)
        if module.split(".")[0] in {"torch", "torchdata"}
    ]
    assert wrong == []


def test_decisions_are_pure(package: list[Source]) -> None:
    """controller/ and theory/ compute from arguments alone: no clock, file, socket, thread or
    process."""
    wrong = [
        source.at(node, f"{source.room} imports {module}")
        for source in package
        if source.room in {"controller", "theory"}
        for node, module in _imported(source.tree)
        if module.split(".")[0] in IMPURE
    ]
    assert wrong == []


def test_the_package_does_not_import_the_harness(package: list[Source]) -> None:
    wrong = [
        source.at(node, f"imports {module}")
        for source in package
        if source.room not in {"testing", "__main__"}
        for node, module in _imported(source.tree)
        if module.startswith("outlast.testing")
    ]
    assert wrong == []
