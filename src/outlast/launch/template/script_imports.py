"""Static detection of the modules that a template loads for a script.

A template pays off only if the script imports torch, `outlast` or an installed package that
requires torch. Imports are followed through the script's own modules.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

_FILES_MAX = 200
_FILE_BYTES_MAX = 1 << 20
TORCH = "torch"
WORKER = ("outlast.worker.session", "outlast.worker.worker_checkpointing")
COMPILER = "torch._dynamo"  # a worker imports it with its first optimizer


def template_modules(script: Path, script_dir: Path) -> tuple[str, ...]:
    """Return the modules for a template to import; empty if workers should be spawned.

    Scripts that set environment variables do so for later imports. A forked worker would restart
    at such an import and execute the code before it twice.
    """
    names, sets_variables = _imports(script, script_dir)
    uses_torch = names & {"outlast", TORCH} or any(map(_requires_torch, names))
    if sets_variables or not uses_torch:
        return ()
    return (TORCH, *(WORKER if "outlast" in names else ()), COMPILER)


def module_file(name: str, search_path: Sequence[str]) -> Path | None:
    """Return the file that `python -m name` runs, or None if not found."""
    path: Sequence[str] | None = search_path
    spec = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:count]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.machinery.PathFinder.find_spec(f"{name}.__main__", path)
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _imports(script: Path, script_dir: Path) -> tuple[set[str], bool]:
    """Return the installed packages (top-level names) that the script's own files import, and
    whether those files may set environment variables.

    "outlast" is included only for imports of the package itself, such as `import outlast`.
    """
    names: set[str] = set()
    sets_variables = False
    roots, files = {script_dir}, [script]
    if script.parent != script_dir:  # run as a module: parent packages are executed first
        packages = takewhile(Path.is_file, (each / "__init__.py" for each in script.parents))
        files += (inits := list(packages))
        roots |= {each.parent.parent for each in inits[-1:]}
    read = set[Path]()
    while files and len(read) < _FILES_MAX:
        file = files.pop()
        if file in read:
            continue
        read.add(file)
        tree = _parsed(file)
        sets_variables |= any(map(_sets_variables, ast.walk(tree)))
        files += _siblings(tree, file)
        for name in _names(tree):
            top = name.partition(".")[0]
            if own := [file for root in roots for file in _own_files(name, root)]:
                files += own
            elif name == "outlast" or (top != "outlast" and top not in sys.stdlib_module_names):
                names.add(top)
    return names, sets_variables


def _parsed(file: Path) -> ast.Module:
    """Return a file's syntax tree; an empty module if it cannot be read or parsed."""
    try:
        if file.stat().st_size <= _FILE_BYTES_MAX:
            return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        pass
    return ast.Module([], [])


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a module imports; a name may also be a module's attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _own_files(name: str, root: Path) -> list[Path]:
    """Return the script's own files, if any, that an import of this name executes."""
    parts = name.split(".")
    files = [root.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
    return _existing(files)


def _siblings(tree: ast.Module, file: Path) -> list[Path]:
    """Return the files that a file's relative imports execute."""
    files: list[Path] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(file.parents):
            folder = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            files += (folder, *(folder / alias.name for alias in node.names))
    return _existing(files)


def _existing(modules: Iterable[Path]) -> list[Path]:
    """Return the existing files of modules and packages."""
    files = (each for at in modules for each in (at.with_name(f"{at.name}.py"), at / "__init__.py"))
    return [file for file in files if file.is_file()]


def _sets_variables(node: ast.AST) -> bool:
    """Return whether the node may set an environment variable; read accesses do not count."""
    match node:
        case ast.Attribute(attr="putenv" | "unsetenv"):
            return True
        case ast.Subscript(value=ast.Attribute(attr="environ"), ctx=ast.Store() | ast.Del()):
            return True
        case ast.Subscript(value=ast.Name(id="environ"), ctx=ast.Store() | ast.Del()):
            return True
        case ast.Attribute(value=ast.Attribute(attr="environ") | ast.Name(id="environ"), attr=name):
            return name not in ("get", "copy", "items", "keys", "values")
    return False


def _requires_torch(name: str) -> bool:
    try:
        requirements = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(re.match(r"torch\b(?![\w.-])", requirement) for requirement in requirements)
