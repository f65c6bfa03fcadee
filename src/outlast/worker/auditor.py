"""Audit reports of this rank, and its votes, which wait for the controller's answer.

After the first step of every generation all state is digested. The rank votes on no phase before
the answer, so that gradients of a rank with wrong state are never applied. Every `every` steps one
of PARTS parts is digested without waiting. All state is digested again at the loop's end and after
the first phase of a generation that opens later. The process waits for the answer before exit.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from outlast.controller.fault_spec import Where
from outlast.errors import GroupError
from outlast.transport import messages
from outlast.worker.groups import GroupRegistry
from outlast.worker.state.audited_state import (
    WHOLE,
    AuditedPart,
    collect,
    digest_kinds,
    digest_names,
    flip_bit,
    replica_set,
)
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_status import WorkerStatus

PARTS = 8
AGAIN_S = 2.0  # interval of repeats: a report or its answer may be lost
_KEPT = 2  # audits whose names can still be requested


class AuditOwner(Protocol):
    """The worker whose state is audited, as Auditor uses it."""

    def protected_state(self) -> ProtectedState:
        """Return the protected state. Raises PhaseError if there is none yet."""
        ...

    def try_send(self, body: messages.WorkerBody) -> None:
        """Send a message to the controller; drop it if the agent is lost."""

    def report_trouble(self, error: BaseException) -> None:
        """Report a transport error, which ends this generation."""

    def reach(self, where: Where) -> None:
        """Fire injected faults that are due at `where`."""

    def note(self, text: str) -> None:
        """Add a note for the user to the run's events."""


class Auditor:
    """Auditor of one worker. `every`: committed steps between audits of a part; 0: no audits."""

    def __init__(
        self,
        status: WorkerStatus,
        groups: GroupRegistry,
        owner: AuditOwner,
        *,
        every: int,
        patience_s: float,
    ) -> None:
        self._status, self._groups, self._owner = status, groups, owner
        self._every, self._patience_s = every, patience_s
        self._generation = 0  # newest one with an audited first step
        self._whole_n = -1  # the newest phase after which all of the state was reported
        self._is_behind_loop = False
        self._set = b""
        self._names: dict[int, dict[str, dict[str, bytes]]] = {}  # by n
        self._pending: messages.Audited | None = None  # report without an answer
        self._answered = threading.Event()

    def flip(self, pattern: str) -> None:
        """Flip a bit of the first tensor whose name matches (`--fault flip`)."""
        flip_bit(self._owner.protected_state(), pattern)

    def completed(self, kind: str) -> None:
        """Report due digests after a complete phase."""
        status = self._status
        self._pending = None
        if kind == "step":
            self._owner.reach("committed")
        if self._groups.world < 2 or not status.is_open:
            return
        if kind == "eval" and self._is_behind_loop and self._generation != status.opened:
            self._generation = status.opened
            self._report(WHOLE)
        if kind != "step":
            return
        if self._generation != status.opened:
            self._generation = status.opened
            self._report(WHOLE)
        elif self._every and status.step % self._every == 0:
            self._report(AuditedPart(status.step // self._every % PARTS, PARTS))

    def loop_ended(self, stands: bool) -> None:
        """Report the state after the loop's last step, unless it has been reported.

        No-op in a replay walk (not `stands`), since the step may be incomplete on other ranks.
        """
        status, self._is_behind_loop = self._status, True
        if (
            not stands
            or self._groups.world < 2
            or not status.is_open
            or self._generation != status.opened
        ):
            return
        if self._whole_n != status.n:
            self._report(WHOLE)

    def finish(self) -> None:
        """Wait, with a deadline, for the answer to the report at the loop's end."""
        if report := self._overdue():
            self._owner.note(f"no answer to the audit of step {report.step}, the last one")

    def before_vote(self) -> None:
        """Wait for the answer that the state at the phase's start equals that of its replicas."""
        if report := self._overdue():
            detail = f"no answer to the audit of step {report.step} in {self._patience_s:.0f} s"
            self._owner.report_trouble(GroupError(detail))

    def _overdue(self) -> messages.Audited | None:
        """Wait for an answer; return the report if none arrives in time."""
        report = self._pending
        if report is None or report.generation != self._status.opened:
            return None
        until_s = time.monotonic() + self._patience_s
        while not self._answered.wait(AGAIN_S):
            if not self._status.is_open:
                return None  # the vote will fail
            if time.monotonic() > until_s:
                return report
            self._owner.try_send(report)
        self._pending = None
        return None

    # --- the reader thread ---

    def hear(self, body: messages.AuditRequest | messages.AuditAgreed) -> None:
        """Handle the controller's request or answer."""
        if isinstance(body, messages.AuditRequest):
            names = self._names.get(body.n, {})
            request = {kind: names.get(kind, {}) for kind in body.kinds}
            self._owner.try_send(
                messages.AuditNamed(generation=body.generation, n=body.n, names=request)
            )
        elif self._pending is not None and body.n == self._pending.n:
            self._answered.set()

    def wake(self) -> None:
        """Wake the main thread, since the generation has closed."""
        self._answered.set()

    def _report(self, part: AuditedPart) -> None:
        status, protected = self._status, self._owner.protected_state()
        self._set = self._set or replica_set(protected)
        mine = self._set if protected.local.has_replicas else f"rank {self._groups.seat}".encode()
        names = digest_names(collect(protected, part))
        self._names = {n: self._names[n] for n in sorted(self._names)[1 - _KEPT :]}
        self._names[status.n] = names
        report = messages.Audited(
            generation=status.opened,
            n=status.n,
            step=status.step,
            replica_set=mine,
            kinds=digest_kinds(names),
            part=part.number,
            parts=part.parts,
        )
        if part == WHOLE:
            self._whole_n = status.n
            self._answered.clear()
            self._pending = report
        self._owner.try_send(report)
