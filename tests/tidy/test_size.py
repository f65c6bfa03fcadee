"""Sizes of files and functions, and types of every name."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Source

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
EXAMPLE_LINES_MAX = 150

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(source: Source) -> list[Function]:
    return [node for node in ast.walk(source.tree) if isinstance(node, Function)]


def test_files_are_small(everything: list[Source]) -> None:
    for source in everything:
        limit = EXAMPLE_LINES_MAX if source.room == "examples" else FILE_LINES_MAX
        lines = len(source.text.splitlines())
        assert lines < limit, f"{source.path} has {lines} lines: it holds more than one idea"


def test_functions_are_small(everything: list[Source]) -> None:
    long = [
        source.at(node, f"{node.name} has {length} lines")
        for source in everything
        for node in _functions(source)
        if (length := (node.end_lineno or 0) - node.lineno + 1) >= FUNCTION_LINES_MAX
    ]
    assert long == []


def test_everything_is_typed(package: list[Source]) -> None:
    bare = []
    for source in package:
        for node in _functions(source):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            given += filter(None, [node.args.vararg, node.args.kwarg])
            untyped = [
                a.arg for a in given if a.annotation is None and a.arg not in {"self", "cls"}
            ]
            if untyped or node.returns is None:
                bare.append(source.at(node, f"{node.name}: {untyped or 'its result'}"))
    assert bare == []


def test_files_have_docstrings(package: list[Source]) -> None:
    silent = [s.path for s in package if s.text.strip() and not ast.get_docstring(s.tree)]
    assert silent == []


def test_no_room_for_leftovers(everything: list[Source]) -> None:
    """If a name needs one of these words, the idea is missing."""
    names = {"util", "utils", "helper", "helpers", "misc", "common"}
    assert [s.path for s in everything if set(s.path.removesuffix(".py").split("/")) & names] == []
