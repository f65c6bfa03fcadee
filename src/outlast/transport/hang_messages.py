"""Messages about ranks that hang, and about the records of their collectives."""

from __future__ import annotations

from outlast.events import Fault
from outlast.transport.message_base import Body
from outlast.transport.worker_page import WorkerObservation


class Suspect(Body, frozen=True):
    """Report of a hung or stopped worker, which the controller will order to be killed."""

    worker: str
    fault: Fault


class RanksObserved(Body, frozen=True):
    """Report of an agent on all ranks of its host while one of them makes no progress; without
    `ranks`: all make progress again. Times, and `now_ns`, are CLOCK_MONOTONIC of that host."""

    now_ns: int
    ranks: tuple[WorkerObservation, ...] = ()


class HangFound(Body, frozen=True):
    """Verdict on the ranks of all hosts, to each agent that has ranks. It collects flight recorder
    dumps in `traces/FOLDER` of the run directory. `reports`: this agent then sends Suspect, unless
    the worker has made progress since `moved_ns` (CLOCK_MONOTONIC of its host)."""

    worker: str  # "": none is to blame
    fault: Fault
    folder: str
    reports: bool = False
    moved_ns: int = 0


class Trace(Body, frozen=True):
    """Request to a worker to dump its flight recorder to `traces/FOLDER/rank_SEAT@HOST.json` of the
    run directory, unless `until_ns` (CLOCK_MONOTONIC) has passed."""

    folder: str
    host: str
    until_ns: int


class Traced(Body, frozen=True):
    """Answer to the Trace of `folder`, for the agent; `error`: why the file was not written."""

    folder: str
    error: str = ""
