"""Inner groups of earlier generations, kept until their last operation has ended.

Dropping one earlier would block: gloo's destructor waits for operations in flight, up to their
time-out, and a wait that raised does not always mean that gloo's own thread is through. So a thread
drops them, and nobody waits for it longer than a second. Never dropping one keeps its threads and
descriptors.

A thread that comes back from such a destructor while the interpreter ends would end the process by
SIGABRT: C++ must not be unwound there. So the process waits for it, for some seconds, before.
"""

from __future__ import annotations

import atexit
import dataclasses
import threading
import time

from outlast.worker.groups.control_group import ControlGroup
from outlast.worker.groups.inner_group import InnerGroup
from outlast.worker.groups.pending_works import PendingWorks

_REAP_S = 1.0
_LEAVE_S = 5.0  # one that hangs for longer does not come back while the interpreter ends


@dataclasses.dataclass
class _SeveredGroup:
    inners: list[InnerGroup]
    works: PendingWorks
    control: ControlGroup | None
    dropper: threading.Thread | None = None

    def is_gone(self, deadline_s: float) -> bool:
        if self.dropper is None:
            if not self._has_ended(deadline_s):
                return False
            if self.control is not None:  # it holds an inner group, too
                self.control.let_go()
            self.dropper = threading.Thread(
                target=self.inners.clear, name="outlast-drop", daemon=True
            )
            self.dropper.start()
        self.dropper.join(max(0.0, deadline_s - time.monotonic()))
        return not self.dropper.is_alive()

    def _has_ended(self, deadline_s: float) -> bool:
        if self.control is not None and self.control.busy:
            return False
        if self.works.settle(deadline_s):
            return False
        return all(inner.ended(deadline_s) for inner in self.inners)


class SeveredGroups:
    """Used by the main thread only."""

    def __init__(self) -> None:
        self._graves: list[_SeveredGroup] = []
        atexit.register(self.leave)

    def keep(
        self, inners: list[InnerGroup], works: PendingWorks, control: ControlGroup | None
    ) -> None:
        """Keep severed groups until their last work has ended, then close them."""
        self._graves.append(_SeveredGroup(inners, works, control))

    def reap(self) -> int:
        """Drop every generation whose operations have ended, waiting a second at most for all.
        Answers how many generations were left."""
        deadline_s = time.monotonic() + _REAP_S
        self._graves = [grave for grave in self._graves if not grave.is_gone(deadline_s)]
        return len(self._graves)

    def leave(self) -> None:
        """Wait for what is being dropped, before the interpreter ends."""
        deadline_s = time.monotonic() + _LEAVE_S
        for grave in self._graves:
            if grave.dropper is not None:
                grave.dropper.join(max(0.0, deadline_s - time.monotonic()))
