"""Backend "outlast" of torch.distributed, for processes with a seat and without one.

Groups of a process without a seat (`backend="outlast"` outside of `outlast run`) carry collectives
as those of a job do, in one generation that meets in the store of `init_process_group`. There is no
recovery: a lost peer raises torch's own error.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from outlast.config import gloo_interface
from outlast.errors import GroupError, UsageError
from outlast.worker.groups.group_registry import GroupRegistry
from outlast.worker.groups.rendezvous import Mailbox
from outlast.worker.groups.stable_group import BACKEND, StableGroup


def register(groups: GroupRegistry) -> None:
    """Register "outlast" as a torch.distributed backend, served by `groups`. Raises UsageError the
    second time: torch keeps a backend for the life of the process."""
    known = dist.Backend._plugins.get(BACKEND.upper())  # noqa: SLF001 - torch has no public query
    if known is not None and known.creator_fn.__module__ == __name__:
        raise UsageError("the backend 'outlast' is registered already; a process has one seat")

    def create(options: Any, _: Any) -> StableGroup:
        return groups.adopt(
            str(options.group_id),
            tuple(options.global_ranks_in_group),
            options.group_rank,
            options.group_size,
        )

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    list_as_self_recording()


def list_as_self_recording() -> None:
    """Keep torch's flight recorder away from stable groups, which it cannot be attached to.

    torch 2.15 attaches it to groups whose backend is not listed. Inner groups record themselves.
    """
    if (recording := getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)) is not None:
        recording.add(BACKEND)


class StoreMailbox(Mailbox):
    """Rendezvous values in a torch store that all ranks share."""

    def __init__(self, store: Store) -> None:
        self._store: Any = store  # torch's stubs name other parameters than its C++ does
        super().__init__(
            lambda generation, key, value: self._store.set(f"{generation}/{key}", value)
        )

    def peek(self, generation: int, key: str) -> bytes | None:
        """Return a value if any rank has set it, else None."""
        name = f"{generation}/{key}"
        return self._store.get(name) if self._store.check([name]) else None

    def get(self, generation: int, key: str, deadline_s: float) -> bytes:
        """Wait for a value. Raises GroupError at the deadline (monotonic), or without a store."""
        name = f"{generation}/{key}"
        left_s = max(0.001, deadline_s - time.monotonic())
        try:
            self._store.wait([name], timedelta(seconds=left_s))
            return self._store.get(name)
        except RuntimeError as error:
            raise GroupError(f"no rank has set {key!r} in the store: {error}") from error


class SeatlessGroups(GroupRegistry):
    """The registry of one group, which lives until the script destroys the group."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        super().__init__(
            mailbox=StoreMailbox(store),
            on_trouble=lambda _: None,
            on_collective=lambda _: None,
            timeout_s=timeout_s,
            copy_s=timeout_s,
            interface=gloo_interface() or None,
        )
        self._store = store
        self.record.stop()
        self.take_seat(rank, size, dry=False)
        self.connect(1, (), timeout_s)

    def failed(self, error: BaseException) -> bool:  # noqa: ARG002
        """Return False: the caller gets torch's error."""
        return False

    def leave(self, group: StableGroup) -> None:  # noqa: ARG002
        """Drop the connections with the group."""
        self.shutdown()


def open_group(options: Any) -> StableGroup:
    """Return a connected group for torch's options of a backend. Raises GroupError if a rank
    does not connect within their timeout, ConfigError if gloo cannot listen."""
    list_as_self_recording()
    rank, size = options.group_rank, options.group_size
    groups = SeatlessGroups(options.store, rank, size, options.timeout.total_seconds())
    return groups.adopt(str(options.group_id), tuple(range(size)), rank, size)
