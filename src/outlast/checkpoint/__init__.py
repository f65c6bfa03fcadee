"""Checkpoints of a training job: complete on disk or absent, and never a pickle.

    from outlast.checkpoint import Checkpointer

Everything here is imported on first use: the keeper's process must start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.checkpoint.checkpointer import Checkpointer as Checkpointer
    from outlast.checkpoint.checkpointer import CheckpointWarning as CheckpointWarning
    from outlast.checkpoint.load.checkpoint_load import Restored as Restored
    from outlast.checkpoint.stores.store_interfaces import Store as Store
    from outlast.checkpoint.stores.store_interfaces import check_name as check_name

_HOMES = {
    "CheckpointWarning": "outlast.checkpoint.checkpointer",
    "Checkpointer": "outlast.checkpoint.checkpointer",
    "Restored": "outlast.checkpoint.load.checkpoint_load",
    "Store": "outlast.checkpoint.stores.store_interfaces",
    "check_name": "outlast.checkpoint.stores.store_interfaces",
}
__all__ = ["CheckpointWarning", "Checkpointer", "Restored", "Store", "check_name"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'outlast.checkpoint' has no attribute {name!r}")
