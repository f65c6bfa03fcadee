"""Outlast keeps large PyTorch training runs alive through hardware failures.

A training script needs four names::

    session = outlast.init()                  # take a seat in the job
    session.protect(model=model, ...)         # what must survive
    for batch in session.batches(loader): ... # data with a position
        session.run(train_step, batch)        # redone until the whole job has it

Everything here is imported on first use, so that the commands which need no torch start fast.
"""

from __future__ import annotations

import gc
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.data.split_dataset import SplitDataset as SplitDataset
    from outlast.errors import OutlastError as OutlastError
    from outlast.worker.session import Replicated as Replicated
    from outlast.worker.session import Session as Session
    from outlast.worker.session import init as init

__version__ = "0.1.0"

_HOMES = {
    "OutlastError": "outlast.errors",
    "Replicated": "outlast.worker.session",
    "Session": "outlast.worker.session",
    "SplitDataset": "outlast.data.split_dataset",
    "init": "outlast.worker.session",
}
__all__ = ["OutlastError", "Replicated", "Session", "SplitDataset", "__version__", "init"]
is_template = False  # this process forks workers: variables that an import reads are not theirs


def begin_worker() -> None:
    """Watch files that the script writes above `init()`; in other processes do nothing."""
    if "OUTLAST_REPEATS_TOP" in os.environ:  # `config` would import msgspec into every script
        import_module("outlast.worker.above_init.start_files").watch_above_init()


def meet_torch() -> None:
    """Follow what the script asks torch for above `init()`; in other processes do nothing."""
    if not is_template and "OUTLAST_WORKER" in os.environ:
        import_module("outlast.worker.above_init.worker_start").meet_torch()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outlast' has no attribute {name!r}")
    collects = gc.isenabled()
    gc.disable()  # an import leaves no garbage, and a look through all of torch's objects is 50 ms
    try:
        return getattr(import_module(_HOMES[name]), name)
    finally:
        if collects:
            gc.enable()


begin_worker()  # a forked worker has this module from its template, which calls it then
