"""The frames that the script's own code runs in, and their local variables.

A frame's variables are written only from the thread that runs it, while it waits for a call of its
own to return. Up to Python 3.12 `f_locals` is a copy that is made anew each time that it is asked
for, and is brought back as a whole; from 3.13 on (PEP 667) it writes through.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Iterator
from typing import Any

from outlast.worker.script.origins import is_own_file

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
