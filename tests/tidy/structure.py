"""Figures of the package's structure: sizes, names, docstrings, import cycles (`make check`)."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
FILE_NAMES_TWICE = {"__init__.py", "__main__.py"}
NAMESAKES = ("cli/", "health/checks/", "plan/figures/")  # one file a command, check or figure
QUESTION = re.compile(r"(What|How|Who|Whom|Whose|Which|Whether|When|Where)\b")
BANNED = re.compile(
    r"_?(said|told|asked|held|seen|gone|left|made|known_by|of_what|otherwise|again_and_again|heard"
    r"|graveyard|bury|Remains|Grave|Said|Told|Held|Asked)"
)
PARAMETERS_MAX = 8
MANY_PARAMETERS = {"Checkpointer.__init__"}  # settings of users, by keyword, all with defaults
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def modules() -> dict[str, Path]:
    """Return the path of every module by its dotted name."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def figures() -> dict[str, int]:
    """Return every figure by its name."""
    paths = modules()
    texts = {name: path.read_text() for name, path in paths.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    return {
        "modules": len(paths),
        "folders of more than 16 modules": sum(many > 16 for many in _folders().values()),
        "file names twice": len(_names_twice(paths)),
        "public class names twice": len(_classes_twice(trees)),
        "docstrings that begin with a question": sum(map(_questions, trees.values())),
        "banned names": sum(map(_banned, trees.values())),
        "fmt: skip": sum(text.count("# fmt: skip") for text in texts.values()),
        "import cycles": len(cycles(trees)),
        "public names without docstring, %": _undocumented_percent(trees),
        "lines": sum(text.count("\n") for text in texts.values()),
        "functions of more than 70 lines": sum(map(_long_functions, trees.values())),
        "functions of more than 8 parameters": sum(
            map(_wide_functions, (trees[name] for name in trees if ".cli." not in f".{name}."))
        ),
    }


def _folders() -> Counter[Path]:
    inside = (path for path in SRC.rglob("*.py") if path.name != "__init__.py")
    return Counter(path.parent for path in inside)


def _names_twice(paths: dict[str, Path]) -> list[str]:
    counted = Counter(
        path.name
        for path in paths.values()
        if path.name not in FILE_NAMES_TWICE
        and not str(path.relative_to(SRC / "outlast")).startswith(NAMESAKES)
    )
    return [name for name, many in counted.items() if many > 1]


def _classes_twice(trees: dict[str, ast.Module]) -> list[str]:
    counted = Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, many in counted.items() if many > 1)


@cache
def _nodes(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def _questions(tree: ast.Module) -> int:
    documented = (n for n in _nodes(tree) if isinstance(n, Definition | ast.Module))
    return sum(bool(QUESTION.match(ast.get_docstring(node) or "")) for node in documented)


def _banned(tree: ast.Module) -> int:
    names: set[str] = set()
    for node in _nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, Definition):
            names.add(node.name)
    return sum(bool(BANNED.fullmatch(name)) for name in names)


def _is_public(node: ast.AST) -> bool:
    return isinstance(node, Definition) and not node.name.startswith("_")


def _undocumented_percent(trees: dict[str, ast.Module]) -> int:
    public: list[Definition] = []
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, Definition) and _is_public(node):
                public.append(node)
                if isinstance(node, ast.ClassDef):
                    public += [m for m in node.body if isinstance(m, Definition) and _is_public(m)]
    bare = sum(ast.get_docstring(node) is None for node in public)
    return round(100 * bare / len(public))


def _long_functions(tree: ast.Module) -> int:
    return sum(
        (node.end_lineno or 0) - node.lineno + 1 > 70
        for node in _nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def _wide_functions(tree: ast.Module) -> int:
    wide = 0
    for scope in _nodes(tree):
        if not isinstance(scope, Definition | ast.Module):
            continue
        for node in scope.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(each.arg not in ("self", "cls") for each in parameters)
                name = f"{getattr(scope, 'name', '')}.{node.name}"
                wide += count > PARAMETERS_MAX and name not in MANY_PARAMETERS
    return wide


def cycles(trees: dict[str, ast.Module]) -> list[set[str]]:
    """Return the groups of modules that import each other, lazily or not (Tarjan 1972)."""
    imports = {name: set(_imports(tree, trees)) - {name} for name, tree in trees.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in imports[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = set(stack[stack.index(name) :])
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(group)

    for name in imports:
        if name not in index:
            visit(name)
    return found


def _imports(tree: ast.Module, known: dict[str, ast.Module]) -> Iterator[str]:
    typing_only = {
        id(inner)
        for node in _nodes(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in _nodes(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from (
                    [inner] if inner in known else [node.module or ""] * (node.module in known)
                )


def main() -> None:
    """Print every figure."""
    for name, value in figures().items():
        print(f"{name:40} {value:>7,}")


if __name__ == "__main__":
    main()
