"""Crash loops: the same failure of a group, shortly after each start."""

from __future__ import annotations

import re

from outlast.events import Fault

EARLY_S = 60.0  # a group that lived longer had begun to work
_VARYING = re.compile(r"0x[0-9a-fA-F]+|[0-9]+")  # addresses, ports, pids, times


class CrashLoopGuard:
    """Counter of equal failures in a row, each within EARLY_S of the group's start."""

    def __init__(self, attempts_max: int) -> None:
        self._attempts_max = attempts_max
        self._last: tuple[object, ...] | None = None
        self._count = 0

    def objection(self, cause: Fault, lived_s: float) -> str:
        """Count a failure; return the reason to give up, or ""."""
        key = _failure(cause) if lived_s < EARLY_S else None
        self._count = self._count + 1 if key is not None and key == self._last else 1
        self._last = key
        if key is None or self._count < self._attempts_max:
            return ""
        return (
            f"the same failure ended {self._count} attempts in a row, each within {EARLY_S:g} s of"
            " its start (--limit attempts_max=COUNT)"
        )


def _failure(cause: Fault) -> tuple[object, ...]:
    line = cause.traceback.strip().rpartition("\n")[2]
    return cause.kind, cause.signal, cause.exit_code, _VARYING.sub("#", line)
