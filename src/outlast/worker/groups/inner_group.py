"""An inner group: a C++ ProcessGroup of one generation, with gloo and, where it is, NCCL."""

from __future__ import annotations

import functools
import threading
import time
from datetime import timedelta

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from outlast.errors import GroupError
from outlast.worker.groups.build_guard import BuildGuard
from outlast.worker.groups.gloo_device import GlooDevice
from outlast.worker.groups.rendezvous import JoinStore, Mailbox
from outlast.worker.groups.transport_errors import is_transport_error

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
