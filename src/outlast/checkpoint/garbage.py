"""Python's garbage collector, kept from looking through all of torch's objects during a save."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let no collection begin inside. A save of many tensors makes many small objects, of which
    none are garbage in cycles; a look through a large script's objects takes 100 ms and more."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
