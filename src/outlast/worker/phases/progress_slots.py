"""Progress slots that a worker writes around its phases for its successor (docs/protocol.md).

`before:n` at the start of phase n+1. `after:n+1` before its vote, or, where something of the rank's
own may still change, with its end. `result:n+1` at its end.
"""

from __future__ import annotations

from collections.abc import Callable

from outlast.checkpoint.format import codec
from outlast.transport.worker_page import Page
from outlast.worker.phases.attempt import PhaseAttempt
from outlast.worker.phases.script_progress import ScriptProgress
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_status import WorkerStatus

POSITION_BYTES_NOTED = 1 << 20


class ProgressSlots:
    """One worker's."""

    def __init__(
        self,
        page: Page,
        place: ScriptProgress,
        moment: WorkerStatus,
        protected: Callable[[], ProtectedState],
        note_once: Callable[[str, str], None],
    ) -> None:
        self._page, self._place, self._moment = page, place, moment
        self._protected, self._note_once = protected, note_once
        self._before_n = -1

    def write_before(self, own: bytes) -> None:
        """The state that the next phase begins with, once."""
        n = self._moment.n
        if self._before_n == n:
            return
        slot = self._place.slot(n, self._moment.step, own).pack()
        if len(slot) > POSITION_BYTES_NOTED:
            self._note_once(
                f"this rank's own state and data position take more than 1 MiB ({len(slot)} bytes"
                f" now, {len(own)} of them state) and are written down twice a phase",
                "position",
            )
        self._page.put("before", n, slot)
        self._before_n = n

    def forget_before(self) -> None:
        """The next attempt begins with more than the slot holds."""
        self._before_n = -1

    def write_after(self, attempt: PhaseAttempt, *, aside: bool) -> None:
        """Write what is known before the vote of phase n+1: the slot, where that is all."""
        protected, n = self._protected(), self._moment.n + 1
        own = protected.own_state(attempt.choices, whole=not attempt.is_gated)
        if not attempt.waits:
            self._put_after(attempt, own, aside=aside)
            return
        attempt.buffers = codec.encode(protected.buffers.own())
        self._page.drop("after", n)  # an attempt that was refused may have left one

    def write_end(self, attempt: PhaseAttempt, result: bytes | None, *, aside: bool) -> None:
        """Write what phase n+1 has returned, None where nobody can write it down, and what
        waited."""
        protected, n = self._protected(), self._moment.n + 1
        if result is not None:
            self._page.put("result", n, result)
        if attempt.is_gated:
            changed = attempt.waits and attempt.buffers != codec.encode(protected.buffers.own())
            protected.local.completed(attempt.key, has_changed_buffers=changed)
        if attempt.waits:
            self._put_after(attempt, protected.own_state(attempt.choices), aside=aside)

    def _put_after(self, attempt: PhaseAttempt, own: bytes, *, aside: bool) -> None:
        n, step = self._moment.n + 1, self._moment.step + (attempt.kind == "step")
        slot = self._place.slot(n, step, own, reports=attempt.reports, aside=aside)
        self._page.put("after", n, slot.pack())
