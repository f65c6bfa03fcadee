"""Pending works of one generation, and groups of earlier generations that still have some.

A group dropped before its last operation has ended would block: gloo's destructor waits for
operations in flight, up to their time-out, and a wait that raised does not always mean that gloo's
own thread has finished. A thread drops such groups, and no caller waits for it longer than a
second. A group that is never dropped keeps its threads and descriptors.

A thread that returns from such a destructor while the interpreter ends would end the process by
SIGABRT: C++ must not be unwound there. So the process first waits for it, for some seconds.
"""

from __future__ import annotations

import atexit
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import distributed as dist

from outlast.errors import PhaseError
from outlast.worker.groups.control_group import ControlGroup
from outlast.worker.groups.inner_group import InnerGroup
from outlast.worker.groups.work_handles import AnySourceWork, SeverableWork, WaitedWork
from outlast.worker.sentinels.own_time import OwnTime

Ended = Callable[[], None] | None  # to be called after a work's first successful wait
PENDING_MAX = 65_536
_COMPLETED_S = 0.001  # time limit of the wait for a completed work, which returns at once
# gloo's works of these complete only through their owner's wait, which also raises their errors;
# a second wait on a receive would block for another message.
OWNED = frozenset(
    {"send", "recv", "recv_anysource"}
    | {"reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"}
)


def trackable(
    op: str,
    work: dist.Work,
    *,
    on_cpu: bool,
    ended: Ended,
    is_live: Callable[[], bool] | None,
    own: OwnTime | None = None,
) -> dist.Work:
    """Return `work`, or a handle around it if `ended` is given, or if gloo hides its completion or
    might never end it. `is_live`: of the generation; None where nobody leaves a work. `own`:
    measures the waits for it."""
    if on_cpu and op == "recv_anysource":
        return AnySourceWork(work, ended, own)
    if on_cpu and op not in OWNED and is_live is not None:
        return SeverableWork(work, is_live, ended, own)
    is_owned = on_cpu and op in OWNED
    return WaitedWork(work, ended, own) if is_owned or ended is not None else work


class _Pending(NamedTuple):
    op: str
    work: dist.Work
    on_cpu: bool
    outputs: Sequence[torch.Tensor]  # none on a GPU: NCCL's works do not keep them that long

    def unregister(self) -> None:
        """Drop this ended work from torch's registry of functional collectives, which keeps a work
        and its tensors until somebody waits for its outputs. Nobody does in a severed generation.
        """
        for tensor in self.outputs:
            with suppress(RuntimeError):
                torch.ops._c10d_functional.wait_tensor(tensor)  # noqa: SLF001 - no public name

    @property
    def owned(self) -> bool:
        return self.on_cpu and self.op in OWNED

    def ended(self) -> bool:
        if self.work.is_completed() or self.owned or not self.on_cpu:
            return self.work.is_completed()
        # gloo completes a work's future shortly before `is_completed`; DDP waits for the
        # future. (NCCL completes it inside the call, and means only that the call is queued.)
        return self.work.get_future().done()

    def stuck(self) -> bool:
        """Return whether this work is unfinished; an owned work counts only while a thread waits
        in it, because it cannot end before its owner's wait."""
        if self.owned:
            return isinstance(self.work, WaitedWork) and self.work.waiting
        if isinstance(self.work, SeverableWork) and self.work.is_left:
            return False
        return not self.ended()


class PendingWorks:
    """Bounded queue of works; the next collective releases completed works and their memory."""

    def __init__(self, on_failure: Callable[[BaseException], object]) -> None:
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._pending: deque[_Pending] = deque()
        self._failed = 0
        self._on_device = False

    def prune(self) -> None:
        """Release completed works and report failures, before the next collective."""
        with self._lock:
            errors = self._prune_head()
        self._report(errors)

    def add(
        self, op: str, work: dist.Work, outputs: Sequence[torch.Tensor], *, on_cpu: bool
    ) -> None:
        """Add a work. Raises PhaseError if PENDING_MAX operations are in flight."""
        with self._lock:
            if len(self._pending) < PENDING_MAX:
                self._pending.append(_Pending(op, work, on_cpu, outputs if on_cpu else ()))
                return
        raise PhaseError(
            f"{PENDING_MAX} collectives of one phase are in flight; wait for the works that"
            " async_op=True, isend and irecv return"
        )

    def on_device(self) -> None:
        """Record that an operation was queued on the CUDA device; the host runs ahead of it."""
        self._on_device = True

    def give_up(self) -> None:
        """End the any-source receives, which cut connections do not end."""
        for pending in list(self._pending):
            if isinstance(pending.work, AnySourceWork):
                pending.work.give_up()

    def forget_failures(self) -> None:
        """Reset the failure count for a new phase."""
        with self._lock:
            self._failed = 0

    def unfinished(self) -> int:
        """Return the number of works that have not completed or that failed. Synchronizes the
        CUDA device first: errors of queued operations appear only then."""
        if self._on_device:
            self._on_device = False
            torch.cuda.synchronize()
        return self._count()

    def running(self) -> int:
        """Return the number of unfinished works, without waiting, reporting or releasing."""
        with self._lock:
            return sum(not pending.ended() for pending in self._pending)

    def stuck(self) -> int:
        """Return the number of works that depend on other ranks or the network. After the
        connections are cut, these are works that failed to end."""
        with self._lock:
            return sum(pending.stuck() for pending in self._pending)

    def settle(self, deadline_s: float) -> int:
        """Wait for the pending works after the connections are cut, until `deadline_s` on the
        monotonic clock. Return the number of works still running; these were never cut."""
        for pending in list(self._pending):
            left_s = deadline_s - time.monotonic()
            is_completed = pending.work.is_completed()
            if pending.owned if is_completed else left_s <= 0:
                continue
            try:
                pending.work.wait(timedelta(seconds=max(left_s, _COMPLETED_S)))
            except RuntimeError as error:
                # Cut operations end in an error. Owned works report it only by raising; a
                # collective that timed out is still counted below.
                if pending.owned:
                    with self._lock:
                        self._pending = deque(p for p in self._pending if p is not pending)
                elif not pending.work.is_completed():
                    continue
                if not self._on_failure(error):
                    continue  # outside of a run, who waits for the outputs gets torch's error
            pending.unregister()
        return sum(not pending.work.is_completed() for pending in list(self._pending))

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
        while self._pending and self._pending[0].ended():
            pending = self._pending.popleft()
            # The owner's wait has raised any error of an owned work. A wait for an NCCL work would
            # block the stream and report nothing; a severed rank does not vote.
            if pending.owned or not pending.on_cpu:
                continue
            try:
                pending.work.wait()
            except RuntimeError as error:
                self._failed += 1
                errors.append(error)
        return errors

    def _report(self, errors: list[BaseException]) -> None:
        for error in errors:
            self._on_failure(error)


_REAP_S = 1.0
_LEAVE_S = 5.0  # a destructor that hangs longer does not return while the interpreter ends


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
            if self.control is not None:  # it also references an inner group
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
    """Severed generations whose groups wait to be dropped. Main thread only."""

    def __init__(self) -> None:
        self._graves: list[_SeveredGroup] = []
        atexit.register(self.leave)

    def keep(
        self, inners: list[InnerGroup], works: PendingWorks, control: ControlGroup | None
    ) -> None:
        """Keep severed groups until their last work has ended, then close them."""
        self._graves.append(_SeveredGroup(inners, works, control))

    def reap(self) -> int:
        """Drop every generation whose operations have ended; wait at most one second in total.
        Return the number of generations left."""
        deadline_s = time.monotonic() + _REAP_S
        self._graves = [grave for grave in self._graves if not grave.is_gone(deadline_s)]
        return len(self._graves)

    def leave(self) -> None:
        """Wait for running droppers before the interpreter ends."""
        deadline_s = time.monotonic() + _LEAVE_S
        for grave in self._graves:
            if grave.dropper is not None:
                grave.dropper.join(max(0.0, deadline_s - time.monotonic()))
