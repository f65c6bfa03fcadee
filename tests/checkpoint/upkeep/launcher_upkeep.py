"""Upkeep of checkpoint files by a launcher, step by step."""

from __future__ import annotations

import time
from pathlib import Path

from outlast.checkpoint.stores.catalog import checkpoint_places, remove_uncommitted
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.upkeep.checkpoint_copy import copy_checkpoint
from outlast.checkpoint.upkeep.retention_policy import Keep, prune_store


def work(room: Path) -> None:
    """Clear up in `local`, copy its newest checkpoint to `durable`, and prune the others."""
    local = Folder(room / "local")
    remove_uncommitted(local)
    copy_checkpoint(local, checkpoint_places(local)[0], Folder(room / "durable"))
    prune_store(local, Keep(last=1), time.time_ns())
