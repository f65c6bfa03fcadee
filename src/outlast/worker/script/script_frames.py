"""Frames of the script's own code, and the origin of code and classes.

A frame's variables are written only from the thread that runs it, while it waits for a call of its
own to return. Up to Python 3.12 `f_locals` is a copy that is made anew each time that it is asked
for, and is brought back as a whole; from 3.13 on (PEP 667) it writes through.
"""

from __future__ import annotations

import ctypes
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

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


_WRITES_THROUGH = sys.version_info >= (3, 13)
_bring_back = ctypes.pythonapi.PyFrame_LocalsToFast if not _WRITES_THROUGH else None
if _bring_back is not None:
    _bring_back.argtypes, _bring_back.restype = (ctypes.py_object, ctypes.c_int), None


def own_frames() -> Iterator[types.FrameType]:
    """The frames of the script's own code on this thread's stack, innermost first."""
    frame = sys._getframe(1)  # noqa: SLF001 - a script's locals have no other way in
    while frame is not None:
        if is_own_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def bind_local(frame: types.FrameType, name: str, value: Any) -> None:
    """Give a local variable, or one that inner functions share, a value."""
    frame.f_locals[name] = value
    if _bring_back is not None:
        _bring_back(frame, 0)


def names_in(frame: types.FrameType) -> set[str]:
    """The names of the local variables that are bound now."""
    return set(frame.f_locals)  # its keys() is a list from 3.13 on
