"""What a launcher does with the files of checkpoints, one after the other."""

from __future__ import annotations

import time
from pathlib import Path

from outlast.checkpoint.catalog import clean, places
from outlast.checkpoint.copying import copy
from outlast.checkpoint.folder import Folder
from outlast.checkpoint.pruning import prune
from outlast.checkpoint.retention import Keep


def work(room: Path) -> None:
    """Clear up in `local`, bring its newest to `durable`, and let the others go."""
    local = Folder(room / "local")
    clean(local)
    copy(local, places(local)[0], Folder(room / "durable"))
    prune(local, Keep(last=1), time.time_ns())
