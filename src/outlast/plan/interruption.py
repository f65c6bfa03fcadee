"""Ctrl-C, heard where what was done is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, as asyncio.run hears it: where nobody else listens, in the main
    thread, and the second time it is obeyed."""
    heard = threading.Event()

    def hear(_number: int, _frame: FrameType | None) -> None:
        if heard.is_set():
            raise KeyboardInterrupt
        heard.set()

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, hear)
    try:
        yield heard.is_set
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
