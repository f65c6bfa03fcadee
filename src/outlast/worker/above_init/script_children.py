"""Processes that a training script starts itself, which have no rank of the job.

| process | refused by name |
|---|---|
| child of multiprocessing, `torch.multiprocessing.spawn` | `init()` |
| child by `os.fork` | `init()`, if another process of this worker has called it |
| child of a worker, forked below `init()` | session, collectives, steps of protected optimizers |
| child that a phase forks, and that returns from it | ends there |
| program that `subprocess` starts without descriptors | `init()` |

A program that starts the script and keeps the descriptors (a shell) may stand between: the first
process that calls `init()` is the worker.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

from outlast.config import WorkerSettings
from outlast.errors import UsageError
from outlast.transport.worker_page import Page, is_page

_ADVICE = (
    "it has no rank of the job, and nothing was sent; `outlast run --nproc-per-node N` starts the"
    " ranks: train in the script's own process, without spawn, Process or fork; children may load"
    " data or write logs"
)

REFUSED = (
    "a process that the script has started was refused, and the script has ended without it: the"
    " message is in the log of this rank"
)


def claim_worker(settings: WorkerSettings) -> None:
    """Make this process the worker that the launcher has started. Raises UsageError in a process
    that the script has started itself."""
    has_page = is_page(settings.page_fd)
    page = Page(settings.page_fd) if has_page else None
    if multiprocessing.parent_process() is not None:
        name = multiprocessing.current_process().name
        _refuse(page, f"outlast.init() was called in {name}, a process that the script has started")
    if page is None:
        raise UsageError(
            "outlast.init() was called in a program that has lost the descriptors of its worker, as"
            " subprocess closes them; nothing was sent; start the training script by `outlast run`"
            " itself (--no-python for another program), or with close_fds=False"
        )
    if (owner := page.claim(os.getpid())) != os.getpid():
        _refuse(
            page,
            f"outlast.init() was called in a second process, and process {owner} is the worker",
        )


class RankProcess(Protocol):
    """The process of a rank, as its forked children find it."""

    pid: int
    page: Page


def must_be_own(worker: RankProcess, what: str) -> None:
    """Raise UsageError in a child that the worker has forked."""
    if os.getpid() != worker.pid:
        _refuse(worker.page, f"{what} in a process that the script has forked")


@contextmanager
def children_end(who: str) -> Iterator[None]:
    """End children that are forked inside this context and leave it, otherwise than by SystemExit:
    what follows is the rank's alone."""
    pid = os.getpid()
    try:
        yield
    except Exception:  # the parent's are raised, a child prints its own and ends
        if os.getpid() == pid:
            raise
        traceback.print_exc()
    if os.getpid() != pid:
        sys.stderr.write(f"outlast: {who} has come to its end, and is ended: {_ADVICE}\n")
        sys.stderr.flush()
        os._exit(1)


def _refuse(page: Page | None, what: str) -> NoReturn:
    if page is not None:
        page.put_refusal()  # the worker reports it at its end
    raise UsageError(f"{what}: {_ADVICE}")
