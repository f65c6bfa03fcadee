"""Objects of the template, which collections of garbage in forked workers skip.

A collection that visits the objects of torch copies their pages, and takes a quarter of a second.
At its exit an interpreter collects several times. A frozen object is never found to be garbage,
and neither is what it refers to. A file that the script has left open, for example, could stay in
a cache of a library, and its buffer be lost.

| object                                     | at a worker's exit                              |
|--------------------------------------------|-------------------------------------------------|
| of the template                            | frozen, unless an object below has a finalizer  |
| `__main__` and its namespace               | collected, as without a template                |
| of the script                              | collected, as without a template                |
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import socket
import sys


def freeze() -> None:
    """Collect garbage, and freeze all objects but `__main__`, which will be the script's."""
    api = ctypes.PyDLL(None)
    main = sys.modules["__main__"]
    tracked = [each for each in (main, vars(main)) if gc.is_tracked(each)]
    for each in tracked:
        api.PyObject_GC_UnTrack(ctypes.py_object(each))
    gc.collect()
    gc.freeze()
    for each in tracked:
        api.PyObject_GC_Track(ctypes.py_object(each))


def unfreeze_at_exit() -> None:
    """Have this process unfreeze the objects at its exit if the script has finalizers to run.

    Called before the script registers functions with `atexit`, so that they are called earlier.
    """
    atexit.register(_unfreeze_for_finalizers)


def _unfreeze_for_finalizers() -> None:
    has_finalizer: dict[type, bool] = {}
    for each in gc.get_objects():  # without the frozen ones
        kind = type(each)
        if kind not in has_finalizer:
            has_finalizer[kind] = any("__del__" in vars(base) for base in kind.__mro__)
        if has_finalizer[kind] and not _is_closed(each):
            gc.unfreeze()
            return


def _is_closed(each: object) -> bool:
    if type(each) is socket.socket:
        return each.fileno() < 0
    return type(each).__module__ == "_io" and isinstance(each, io.IOBase) and each.closed
