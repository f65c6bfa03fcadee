"""Groups of a process without a seat: `backend="outlast"` outside of `outlast run`.

They carry collectives as those of a job do, in one generation that meets in the store of
`init_process_group`. Nothing recovers: a lost peer raises torch's own error.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from outlast.config import gloo_interface
from outlast.errors import GroupError
from outlast.worker.groups.backend_registration import list_as_self_recording
from outlast.worker.groups.group_registry import GroupRegistry
from outlast.worker.groups.rendezvous import Mailbox
from outlast.worker.groups.stable_group import StableGroup


class StoreMailbox(Mailbox):
    """Rendezvous values in a store of torch, which is the other ranks' too."""

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
    """Return a connected group for torch's options of a backend. Raises GroupError where a rank
    does not come within their timeout, ConfigError where gloo cannot listen."""
    list_as_self_recording()
    rank, size = options.group_rank, options.group_size
    groups = SeatlessGroups(options.store, rank, size, options.timeout.total_seconds())
    return groups.adopt(str(options.group_id), tuple(range(size)), rank, size)
