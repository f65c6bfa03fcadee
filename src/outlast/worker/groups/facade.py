"""What torch may ask about the backend behind a stable group; the same in every generation."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from outlast.worker.groups.stable import StableGroup


class BackendView:
    """Stands for the backend of one device. Nothing runs through it."""

    supports_splitting = False
    supports_shrinking = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, group: StableGroup, device: torch.device) -> None:
        self._group = group
        self.device = torch.device(device)
        self.supports_coalescing = self.device.type == "cuda"

    def name(self) -> str:
        return self._group.name()

    def rank(self) -> int:
        return self._group.place.rank

    def size(self) -> int:
        return self._group.place.size

    def supports_tensor_alloc(self, device: torch.device) -> bool:  # noqa: ARG002
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    _set_default_timeout = set_timeout
