"""Whether an object has changed, without a copy of it."""

from __future__ import annotations

from typing import Any

from outlast.checkpoint import tree
from outlast.worker.audit.digests import digests


class Mark:
    """State of an object with a `state_dict`: its plain values, and digests of its
    tensors, since a version counter misses a write through `.data`. Tensors at the addresses
    `apart_from` (others put those back) do not count."""

    def __init__(self, target: Any, apart_from: set[int]) -> None:
        self._target, self._apart_from = target, apart_from
        self._look = self._now()

    def has_moved(self) -> bool:
        """Return whether the state is another one."""
        return self._now() != self._look

    def _now(self) -> tuple[bytes, list[bytes]]:
        schema, tensors = tree.flatten(self._target.state_dict())
        return schema, digests([t for t in tensors if t.data_ptr() not in self._apart_from])
