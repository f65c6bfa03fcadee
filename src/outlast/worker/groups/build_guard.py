"""Guard that ends the building of groups, whatever the peers do.

Most of it waits for values in the mailbox and can be refused at once. But once all addresses are
known, gloo waits for each peer's connection and cannot be told to stop; a peer that was lost or
severed in these milliseconds never connects.
"""

from __future__ import annotations

import struct
import threading
import time

from outlast.worker.groups.gloo_device import GlooDevice
from outlast.worker.groups.rendezvous import JoinStore

_GRACE_S = 0.05  # connections that are on their way arrive within this


class BuildGuard:
    """A context around the building of one or more groups; `deadline_s` is monotonic."""

    def __init__(self, device: GlooDevice, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._device = device
        self._stirred = threading.Event()
        self._done = threading.Event()
        self._current: tuple[JoinStore, int, int] | None = None
        self._thread = threading.Thread(target=self._watch, name="outlast-build", daemon=True)

    def __enter__(self) -> BuildGuard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._stirred.set()
        self._thread.join()

    def building(self, store: JoinStore, rank: int, size: int) -> None:
        """The group that is being built from now on."""
        self._current = (store, rank, size)

    def stir(self) -> None:
        """The generation is closed: the mailbox refuses; free who is past it. Any thread."""
        self._stirred.set()

    def _watch(self) -> None:
        self._stirred.wait(max(0.0, self.deadline_s - time.monotonic()))
        freed: JoinStore | None = None
        while not self._done.wait(_GRACE_S):
            current = self._current
            if current is not None and current[0] is not freed:
                freed = current[0]
                self._device.release(_tickets(*current))


def _tickets(store: JoinStore, rank: int, size: int) -> list[int]:
    """Return the sequence numbers, one a peer, at the end of the address that gloo published for
    this rank."""
    for value in store.published.values():
        if len(value) > 8 * size:
            numbers = struct.unpack(f"={size}q", value[-8 * size :])
            return [number for peer, number in enumerate(numbers) if peer != rank]
    return []
