"""A work that knows when its owner has waited for it.

Handed out where that moment matters: while set-up is recorded (results are captured then, so that
no order of operations changes), and for gloo's reduce-scatter, whose own work never says that it
has completed and writes its output only in `wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed as dist


class WaitedWork(dist.Work):
    """Passes everything on to `work`; calls `ended` once the first wait has ended well."""

    def __init__(self, work: dist.Work, ended: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._work = work
        self._ended = ended
        self._waited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            done = self._work.wait(timeout) if timeout else self._work.wait()
        finally:
            self._waited = True
        if self._ended is not None:
            self._ended()
            self._ended = None
        return done

    def is_completed(self) -> bool:
        return self._waited or self._work.is_completed()

    def synchronize(self) -> None:
        self._work.synchronize()

    def get_future(self) -> Any:
        return self._work.get_future()

    def result(self) -> Any:
        return self._work.result()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()  # noqa: SLF001 - torch's own name for it
