"""The works that were handed out in one generation and may still run."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed as dist

from outlast.errors import PhaseError
from outlast.worker.groups.waited import AnySourceWork, WaitedWork

PENDING_MAX = 65_536
_REDUCE_SCATTER = {"reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"}
# gloo's works of these complete only through their owner's wait, which also raises their errors;
# a second wait on a receive would block for another message.
OWNED = frozenset({"send", "recv", "recv_anysource"} | _REDUCE_SCATTER)


def trackable(
    op: str, work: dist.Work, *, on_cpu: bool, ended: Callable[[], None] | None
) -> dist.Work:
    """The work to hand out: itself wherever its end can be seen and nobody asks to hear of it."""
    if on_cpu and op == "recv_anysource":
        return AnySourceWork(work, ended)
    if ended is not None or (on_cpu and op in _REDUCE_SCATTER):
        return WaitedWork(work, ended)
    return work


def _ended(op: str, work: dist.Work) -> bool:
    if work.is_completed() or op in OWNED:
        return work.is_completed()
    # gloo completes a work's future a moment before the work says so; DDP waits for the future.
    return work.get_future().done()


class Works:
    """Bounded; completed works are let go at the next collective, so that they keep no memory."""

    def __init__(self, on_failure: Callable[[BaseException], object]) -> None:
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._pending: deque[tuple[str, dist.Work]] = deque()
        self._failed = 0

    def prune(self) -> None:
        """Before the next collective: let go of what has ended, report what has failed."""
        with self._lock:
            errors = self._prune_head()
        self._report(errors)

    def add(self, op: str, work: dist.Work) -> None:
        """Raises PhaseError when absurdly many operations are in flight."""
        with self._lock:
            if len(self._pending) < PENDING_MAX:
                self._pending.append((op, work))
                return
        raise PhaseError(
            f"{PENDING_MAX} collectives of one phase are in flight; wait for the works that"
            " async_op=True, isend and irecv return"
        )

    def give_up(self) -> None:
        """The connections are cut: end the waits that this does not end."""
        for _, work in list(self._pending):
            if isinstance(work, AnySourceWork):
                work.give_up()

    def forget_failures(self) -> None:
        """A new phase begins."""
        with self._lock:
            self._failed = 0

    def unfinished(self) -> int:
        """Works that have not completed, or that ended in an error. On CUDA waits for the device
        first: the host runs ahead of it."""
        left = self._count()
        if left and torch.cuda.is_available():
            torch.cuda.synchronize()
            left = self._count()
        return left

    def running(self) -> int:
        """Works that have not ended; nothing is waited for, reported or let go."""
        with self._lock:
            return sum(not _ended(op, work) for op, work in self._pending)

    def settle(self, deadline_s: float) -> int:
        """After the connections are cut: let each pending work end, until `deadline_s` on the
        monotonic clock. Answers how many still run; those were never cut."""
        for op, work in list(self._pending):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or work.is_completed():
                continue
            try:
                work.wait(timedelta(seconds=left_s))
            except RuntimeError:
                # Ended in an error, as cut operations do. Owned works say so only by raising; a
                # collective that merely timed out is still counted below.
                if op in OWNED:
                    with self._lock:
                        self._pending = deque(kept for kept in self._pending if kept[1] is not work)
        return sum(not work.is_completed() for _, work in list(self._pending))

    def _count(self) -> int:
        errors: list[BaseException] = []
        with self._lock:
            for _ in range(len(self._pending)):
                errors += self._prune_head()
                self._pending.rotate(-1)
            count = len(self._pending) + self._failed
        self._report(errors)
        return count

    def _prune_head(self) -> list[BaseException]:
        errors: list[BaseException] = []
        while self._pending and _ended(*self._pending[0]):
            op, work = self._pending.popleft()
            if op in OWNED:
                continue  # its owner has waited, and heard of any error
            try:
                work.wait()
            except RuntimeError as error:
                self._failed += 1
                errors.append(error)
        return errors

    def _report(self, errors: list[BaseException]) -> None:
        for error in errors:
            self._on_failure(error)
