"""Inner groups of generations gone by, until the last of their operations has ended.

Dropping one earlier would block: gloo's destructor waits for operations in flight, up to their
time-out. Never dropping one keeps its threads and descriptors.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from outlast.worker.groups.control import Control
from outlast.worker.groups.inner import InnerGroup
from outlast.worker.groups.works import Works

_REAP_S = 1.0


class _Grave(NamedTuple):
    inners: list[InnerGroup]
    works: Works
    control: Control | None


class Graveyard:
    """Used by the main thread only."""

    def __init__(self) -> None:
        self._graves: list[_Grave] = []

    def bury(self, inners: list[InnerGroup], works: Works, control: Control | None) -> None:
        self._graves.append(_Grave(inners, works, control))

    def reap(self) -> int:
        """Drop every group whose operations have ended, waiting a few seconds at most for all.
        Answers how many groups were left."""
        deadline_s = time.monotonic() + _REAP_S
        self._graves = [grave for grave in self._graves if not _ended(grave, deadline_s)]
        return sum(len(grave.inners) for grave in self._graves)


def _ended(grave: _Grave, deadline_s: float) -> bool:
    if grave.control is not None and grave.control.busy:
        return False
    if grave.works.settle(deadline_s):
        return False
    return all(inner.ended(deadline_s) for inner in grave.inners)
