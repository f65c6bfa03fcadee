"""Values without pickle, and checkpoints that are complete or do not exist.

    from outlast.checkpoint import Checkpointer

Everything here is imported on first use: the keeper's process must start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.checkpoint.checkpointer import Checkpointer as Checkpointer
    from outlast.checkpoint.checkpointer import CheckpointWarning as CheckpointWarning
    from outlast.checkpoint.loading import Restored as Restored
    from outlast.checkpoint.storage import Store as Store
    from outlast.checkpoint.storage import check_name as check_name

_HOMES = {
    "CheckpointWarning": "outlast.checkpoint.checkpointer",
    "Checkpointer": "outlast.checkpoint.checkpointer",
    "Restored": "outlast.checkpoint.loading",
    "Store": "outlast.checkpoint.storage",
    "check_name": "outlast.checkpoint.storage",
}
__all__ = ["CheckpointWarning", "Checkpointer", "Restored", "Store", "check_name"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'outlast.checkpoint' has no attribute {name!r}")
