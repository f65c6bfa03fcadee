"""An inner group: a C++ ProcessGroup of one generation, with a communicator of each driver.

`is_transport_error` recognizes the errors of a lost peer or connection among all others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d

from outlast import config
from outlast.errors import GroupError, StepRefused, UsageError
from outlast.events import FaultKind
from outlast.transport.connection_errors import is_gloo_failure, is_nccl_failure
from outlast.worker.groups.device_drivers import DeviceDriver
from outlast.worker.groups.rendezvous import BuildGuard, JoinStore, Mailbox

WAIT_TIMED_OUT = "Operation timed out!"


def is_caused_by_transport(error: BaseException) -> bool:
    """Return whether the error is, or results from, a transport error or a refused collective."""
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        if isinstance(cause, StepRefused) or is_transport_error(cause):
            return True
        visited.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


def is_transport_error(error: BaseException) -> bool:
    """Return whether gloo, NCCL or the rendezvous reports a broken or timed-out connection.

    Unknown errors are no transport errors: a programming error must not be retried for ever.
    """
    if isinstance(error, GroupError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    text = str(error)
    if isinstance(error, dist.DistBackendError) and is_nccl_failure(text):
        return True
    return is_gloo_failure(text) or text.strip() == WAIT_TIMED_OUT


LIFE = " @"  # torch's records name a group NAME @GENERATION


class InnerGroup:
    """The group of one generation behind one stable group: a communicator of each driver."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        *,
        generation: int,
        mailbox: Mailbox,
        drivers: Sequence[DeviceDriver],
        guard: BuildGuard,
        timeout_s: float,
    ) -> None:
        """`rank` is this process's place in `ranks`. `guard` bounds the building, `timeout_s` each
        later operation. The last driver is the
        group's default. Raises GroupError when a peer does not connect or is lost, or the
        generation is closed."""
        # torch keeps only the C++ half of a store alive; this reference keeps the Python half.
        size = len(ranks)
        self._store = JoinStore(mailbox, generation, name, ranks, guard.deadline_s)
        guard.building(self._store, rank, size)
        self._opened: list[tuple[DeviceDriver, Any]] = []
        self._aborting: list[threading.Thread] | None = None
        self.group = dist.ProcessGroup(self._store, rank, size)
        try:
            for driver in drivers:
                backend = driver.open(self._store, rank, size, timeout_s)
                self._opened.append((driver, backend))
                self.group._register_backend(driver.device, driver.kind, backend)  # noqa: SLF001
        except RuntimeError as error:
            if not is_transport_error(error):
                raise
            raise GroupError(
                f"group {name!r} of generation {generation} could not connect on rank {rank} of"
                f" {size}: {error}"
            ) from error
        self.group._set_default_backend(drivers[-1].kind)  # noqa: SLF001
        # Only the flight recorder uses this name. It contains the generation, since the recorder
        # keeps entries of earlier ones. (Its type exists in torch's stubs only.)
        self.group._set_group_name(f"{name}{LIFE}{generation}")  # noqa: SLF001 # pyright: ignore[reportArgumentType]
        # torch 2.14 and newer attach it to the stable group, which is not of torch's own class.
        hook: Any = getattr(distributed_c10d, "NanCheckHook", None)
        if hook is not None and config.checks_nan():
            hook.attach(self.group)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of collectives."""
        for _, backend in self._opened:
            backend.set_timeout(timeout)

    def abort(self) -> None:
        """Wake the operations that cut connections do not wake."""
        if self._aborting is None:
            started = [driver.abort(backend) for driver, backend in self._opened]
            self._aborting = [thread for thread in started if thread is not None]

    def ended(self, deadline_s: float) -> bool:
        """Return whether a started abort has ended, after waiting until `deadline_s` at most."""
        for thread in self._aborting or ():
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._aborting or ())


def fault_kind(error: Exception) -> FaultKind:
    """Return the kind of fault that an exception inside an attempt is."""
    if is_transport_error(error):
        return "transport"
    return "contract" if isinstance(error, UsageError) else "raised"
