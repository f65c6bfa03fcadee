"""Work handles that record the wait of their owner, that let go of gloo, or are complete at once.

`WaitedWork` is returned for some of gloo's operations, which complete only in their owner's `wait`:
sends, receives, reduce-scatters. It and `SeverableWork` also tell of the wait: while set-up is
recorded, results are captured in it, so that the order of operations stays the same.

`SeverableWork` is the handle of gloo's other operations. gloo does not wake an operation whose
connection breaks in the middle of a message (gloo's `Pair::signalException` tells neither the
buffer that is being received nor the one that is being sent), so that its caller would wait for
the operation's time-out.

This module also excludes functions and classes from dynamo. While a compiled function runs, dynamo
inspects every new Python frame, also frames that C++ starts: DDP broadcasts its buffers through
`StableGroup`. Dynamo must neither trace nor break there. The exclusion is set on the code object;
nothing is wrapped, and dynamo is not imported for it.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch._C._dynamo import eval_frame
from torch.futures import Future

from outlast.errors import GroupError
from outlast.worker.sentinels.own_time import OwnTime

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
_c: Any = eval_frame  # torch's stubs do not name all of it
_SKIP = _c._FrameExecStrategy(_c._FrameAction.SKIP, _c._FrameAction.SKIP)  # noqa: SLF001 - with callees


def opaque(function: F) -> F:
    """Exclude `function` and its callees from dynamo; a graph that calls it breaks there."""
    code: Any = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        _c.set_code_exec_strategy(code, _SKIP)
        marked: Any = function
        marked._torchdynamo_disable = True  # noqa: SLF001 - checked where dynamo would inline it
    return function


def opaque_class(cls: C) -> C:
    """Exclude all methods that `cls` itself defines from dynamo."""
    for member in vars(cls).values():
        function: Any = member.fget if isinstance(member, property) else member
        opaque(function)
    return cls


@opaque_class
class WaitedWork(dist.Work):
    """Handle that forwards to `work`, and calls `ended` after the first successful wait."""

    def __init__(
        self,
        work: dist.Work,
        ended: Callable[[], None] | None = None,
        own_time: OwnTime | None = None,
    ) -> None:
        super().__init__()
        self._work: Any = work  # torch's stubs of a release lack what others have
        self._ended = ended
        self._own_time = own_time or OwnTime()
        self._has_future = False  # its caller waits in C++
        self._waited = False
        self.waiting = False  # its owner is inside `wait`

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waiting = True
        try:
            with self._measured():
                done = self._work.wait(timeout) if timeout else self._work.wait()
        finally:
            self._waited, self.waiting = True, False
        self._end()
        return done

    def _measured(self) -> AbstractContextManager[None]:
        """Return a context for a wait, which is no own time of this rank."""
        is_short = self._has_future or self._work.is_completed()
        return nullcontext() if is_short else self._own_time.wait()

    def _end(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()

    def is_completed(self) -> bool:
        return self._waited or self._work.is_completed()

    def synchronize(self) -> None:
        self._work.synchronize()

    def get_future(self) -> Any:
        self._has_future = True
        self._own_time.future_taken()
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

    def _get_op_type(self) -> int:
        return self._work._get_op_type()  # noqa: SLF001

    def _get_sequence_number(self) -> int:  # of torch 2.14 and newer
        return self._work._get_sequence_number()  # noqa: SLF001

    def _get_duration(self) -> float:
        return self._work._get_duration()  # noqa: SLF001

    def get_future_result(self) -> Any:
        return self._work.get_future_result()

    @property
    def timeout(self) -> timedelta:
        return self._work.timeout


LOOK_UP = timedelta(seconds=0.25)


def wait_unless_severed(work: dist.Work, is_live: Callable[[], bool]) -> bool:
    """Wait for `work` in intervals. Return False if gloo has not let go of it although its
    generation is over; raises its error."""
    while True:
        live = is_live()
        try:
            work.wait(LOOK_UP)
        except RuntimeError:
            if work.is_completed():
                work.wait()  # completed during this check; a real error is raised again
                return True
            if not live:
                return False
        else:
            return True


@opaque_class
class SeverableWork(WaitedWork):
    """Handle of an operation of gloo that its caller can leave once the generation is over. gloo's
    thread keeps waiting, and its group is not closed before it has ended."""

    def __init__(
        self,
        work: dist.Work,
        is_live: Callable[[], bool],
        ended: Callable[[], None] | None = None,
        own_time: OwnTime | None = None,
    ) -> None:
        super().__init__(work, ended, own_time)
        self._is_live = is_live
        self.is_left = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:
            return super().wait(timeout)
        with self._measured():
            self.is_left = not wait_unless_severed(self._work, self._is_live)
        if self.is_left:
            raise GroupError("an operation was cut in the middle of a message")
        self._end()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


@opaque_class
class AnySourceWork(WaitedWork):
    """Handle of gloo's any-source receive, which cut connections do not wake. A thread waits for
    it, so that `give_up` can end the caller's wait. The thread ends with the operation's time-out;
    no data can arrive in its buffer, since the connections are cut."""

    def __init__(
        self,
        work: dist.Work,
        ended: Callable[[], None] | None = None,
        own_time: OwnTime | None = None,
    ) -> None:
        super().__init__(work, ended, own_time)
        self._settled = threading.Event()
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._waited:
            self._waited = True
            threading.Thread(target=self._wait, name="outlast-any-source", daemon=True).start()
        self.waiting = True
        try:
            with self._own_time.wait():
                settled = self._settled.wait(timeout.total_seconds() if timeout else None)
        finally:
            self.waiting = False
        if not settled:
            raise GroupError(f"no rank has sent anything within {timeout}")
        if self._error is not None:
            raise self._error
        self._end()
        return True

    def is_completed(self) -> bool:
        return self._settled.is_set()

    def give_up(self) -> None:
        """End the wait with GroupError, since the generation is severed."""
        if not self._settled.is_set():
            self._error = GroupError("the generation was severed during a receive from any rank")
            self._settled.set()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = self._error or error
        self._settled.set()


@opaque_class
class FinishedWork(dist.Work):
    """Handle of a collective without an operation; its result is in the caller's tensors."""

    def __init__(self, outputs: Sequence[torch.Tensor], source: int = -1) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        return True

    def get_future(self) -> Any:
        devices: list[Any] = sorted({str(t.device) for t in self._outputs if t.is_cuda})
        future: Future[list[torch.Tensor]] = Future(devices=devices) if devices else Future()
        future.set_result(self._outputs)
        return future

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def synchronize(self) -> None:
        """Do nothing: no operation runs."""

    def block_current_stream(self) -> None:
        """Do nothing: no operation runs."""

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source
