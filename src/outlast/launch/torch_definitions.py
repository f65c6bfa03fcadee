"""Functions and classes of torch, compiled from its source files without an import of torch.

The launcher needs torchrun's parser and nothing else of torch, whose import takes longer than all
the rest of a launcher's start. A definition may use builtins, the standard library, constants of
its module, and other such definitions of torch. Others are imported as usual.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


class TorchDefinitions:
    """Definitions of the installed torch, each compiled once."""

    def __init__(self) -> None:
        self._trees: dict[str, ast.Module] = {}
        self._values: dict[tuple[str, str], Any] = {}

    def get(self, module: str, name: str) -> Any:
        """Return a function or class; import torch if it cannot be compiled alone."""
        try:
            return self._value(module, name)
        except (LookupError, OSError, SyntaxError):  # of a torch with another source
            return getattr(importlib.import_module(module), name)

    def _value(self, module: str, name: str) -> Any:
        key = (module, name)
        if key not in self._values:
            self._values[key] = self._evaluate(module, name)
        return self._values[key]

    def _evaluate(self, module: str, name: str) -> Any:
        tree = self._tree(module)
        for node in tree.body:
            match node:
                case ast.FunctionDef(name=found) | ast.ClassDef(name=found) if found == name:
                    return self._compiled(module, node)
                case ast.Assign(targets=[ast.Name(id=found)], value=ast.Constant(value=value)) if (
                    found == name
                ):
                    return value
                case ast.Import(names=names):
                    for alias in names:
                        if (alias.asname or alias.name) == name and _is_standard(alias.name):
                            return importlib.import_module(alias.name)
                case ast.ImportFrom(module=str(source), names=names, level=0):
                    for alias in names:
                        if (alias.asname or alias.name) == name:
                            return self._imported(source, alias.name)
        raise LookupError(f"{module} does not define {name} by itself")

    def _imported(self, module: str, name: str) -> Any:
        if _is_standard(module):
            return getattr(importlib.import_module(module), name)
        return self._value(module, name)

    def _compiled(self, module: str, node: ast.FunctionDef | ast.ClassDef) -> Any:
        namespace: dict[str, Any] = {"__name__": module}
        for name in sorted(_free_names(node)):
            namespace[name] = self._value(module, name)
        code = compile(ast.Module([node], []), str(_file(module)), "exec", dont_inherit=True)
        exec(code, namespace)  # noqa: S102 - torch's own source
        return namespace[node.name]

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            self._trees[module] = ast.parse(_file(module).read_bytes())
        return self._trees[module]


def _free_names(definition: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Return the names that a definition takes from its module."""
    used: set[str] = set()
    bound = set(vars(builtins))
    for node in ast.walk(definition):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name.partition(".")[0])
    return used - bound


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _file(module: str) -> Path:
    """Return a module's source file. Raises LookupError if there is none."""
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top)  # imports nothing, unlike that of a submodule
    folders = (spec and spec.submodule_search_locations) or ()
    for folder in folders:
        path = Path(folder, *parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    raise LookupError(f"{module} has no source file")
