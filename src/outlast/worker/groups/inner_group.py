"""An inner group: a C++ ProcessGroup of one generation, with gloo and, where present, NCCL.

`is_transport_error` recognizes the errors of a lost peer or connection among all others.
"""

from __future__ import annotations

import functools
import threading
import time
from datetime import timedelta

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from outlast.errors import GroupError, StepRefused
from outlast.transport.connection_errors import is_gloo_failure, is_nccl_failure
from outlast.worker.groups.gloo_device import GlooDevice
from outlast.worker.groups.rendezvous import BuildGuard, JoinStore, Mailbox

_WAIT_TIMED_OUT = "Operation timed out!"


def is_caused_by_transport(error: BaseException) -> bool:
    """Return whether the error is, or came of, a transport error or a refused collective."""
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

    Anything unknown is False: a programming error that looked like a lost peer would be retried
    for ever.
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
    return is_gloo_failure(text) or text.strip() == _WAIT_TIMED_OUT


LIFE = " @"  # in what torch records a group is called NAME @GENERATION


@functools.cache
def has_nccl() -> bool:
    """Return whether this torch has NCCL and this process a GPU."""
    return torch.cuda.is_available() and dist.is_nccl_available()


class InnerGroup:
    """The group of one generation behind one stable group. Built connected, never lazily."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        *,
        generation: int,
        mailbox: Mailbox,
        device: GlooDevice,
        guard: BuildGuard,
        timeout_s: float,
    ) -> None:
        """`guard` ends the building, `timeout_s` each operation after it. Raises GroupError when
        a peer does not come, is gone, or the generation is closed."""
        # torch keeps only the C++ half of a store alive; this keeps the Python half.
        self._store = JoinStore(mailbox, generation, name, guard.deadline_s)
        guard.building(self._store, rank, size)
        # torch's only way to share a device; its stubs do not know it
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [device.gloo]  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        try:
            self._gloo = dist.ProcessGroupGloo(self._store, rank, size, options)
        except RuntimeError as error:
            if not is_transport_error(error):
                raise
            raise GroupError(
                f"group {name!r} of generation {generation} could not connect on rank {rank} of"
                f" {size}: {error}"
            ) from error
        self.group = dist.ProcessGroup(self._store, rank, size)
        kind = dist.ProcessGroup.BackendType
        self.group._register_backend(torch.device("cpu"), kind.GLOO, self._gloo)  # noqa: SLF001
        self._nccl = _nccl(self._store, rank, size, timeout_s) if has_nccl() else None
        if self._nccl is not None:
            self._store.extend(timeout_s)
            self.group._register_backend(torch.device("cuda"), kind.NCCL, self._nccl)  # noqa: SLF001
        self.group._set_default_backend(kind.GLOO if self._nccl is None else kind.NCCL)  # noqa: SLF001
        # The flight recorder tells groups by it, as it does torch's own, and nothing else does: a
        # name for each generation, since it keeps what earlier ones did. (A type in stubs only.)
        self.group._set_group_name(f"{name}{LIFE}{generation}")  # noqa: SLF001 # pyright: ignore[reportArgumentType]
        self._aborting: threading.Thread | None = None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of collectives."""
        self._gloo.set_timeout(timeout)
        if self._nccl is not None:
            self._nccl.set_timeout(timeout)

    def abort(self) -> None:
        """Wake NCCL's operations. In a thread of its own, because NCCL's abort may hang; then
        the worker is killed and replaced. (gloo's connections are cut by the device.)"""
        if self._nccl is not None and self._aborting is None:
            self._aborting = threading.Thread(
                target=self._nccl.abort, name="outlast-nccl-abort", daemon=True
            )
            self._aborting.start()

    def ended(self, deadline_s: float) -> bool:
        """Return whether a started abort has ended, after waiting until `deadline_s` at most."""
        if self._aborting is None:
            return True
        self._aborting.join(max(0.0, deadline_s - time.monotonic()))
        return not self._aborting.is_alive()


def _nccl(store: Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroupNCCL:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    return dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
