"""Origin of code and classes: the script, or a library."""

from __future__ import annotations

import site
import sys
import sysconfig
from functools import cache
from pathlib import Path

import outlast


@cache
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {sysconfig.get_paths()[name] for name in names}
    found.update(site.getsitepackages())
    found.add(site.getusersitepackages())
    found.add(str(Path(outlast.__file__).parent))
    return tuple(each.rstrip("/") + "/" for each in sorted(found))


@cache
def is_own_file(name: str) -> bool:
    """Return whether a file of this name is the script's, or a module's beside it."""
    if name.startswith("<frozen"):
        return False
    return not name.startswith(_libraries()) and "/site-packages/" not in name


@cache
def is_own_class(kind: type) -> bool:
    """Return whether the script, or a module beside it, defines this class."""
    if kind.__module__ == "__main__":
        return True
    module = sys.modules.get(kind.__module__)
    name = getattr(module, "__file__", None)
    return isinstance(name, str) and is_own_file(name)
