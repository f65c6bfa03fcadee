"""One observation of a worker: its page, and its state in /proc."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from outlast.transport.worker_page import PhasePace, State

# A recovering rank waits for others; the controller has deadlines for each part.
_NEVER = ("waiting", "finished", "healing")


class WorkerObservation(msgspec.Struct, frozen=True, kw_only=True):
    """One worker at one moment: its page, and its state letter in /proc (R S D T t Z)."""

    worker: str
    seat: int  # -1: a spare
    n: int
    state: State
    collectives: int  # since the attempt (or the set-up) began: comparable between ranks
    t_ns: int  # the last change of anything
    t_work_ns: int = 0  # when the process (with its children) was last seen to compute
    t_woken_ns: int = 0  # when its main thread was last seen to be woken again and again
    waits: bool = False  # its main thread is known to wait for other ranks
    key: int = 0  # of the phase under way, or of the newest one
    paces: Mapping[int, PhasePace] = {}  # by key: the phases that this process has completed
    letter: str


def is_judged(look: WorkerObservation) -> bool:
    """Return whether a lack of progress counts for this worker; it does not for a spare, for
    example."""
    return look.seat >= 0 and look.state not in _NEVER


def is_out(look: WorkerObservation) -> bool:
    """Return whether the rank was last observed outside any collective."""
    return look.state != "voting" and not look.waits
