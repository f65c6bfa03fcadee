"""What a scheduler does, attempt by attempt."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outlast.fleet.synth.repairs import Absence
from outlast.fleet.synth.workload import CODE, Job


class Attempt:
    """One time that a job holds nodes."""

    __slots__ = ("by", "end_s", "failing", "job", "nodes", "over", "place", "serial", "start_s",
                 "state", "submit_s")  # fmt: skip

    def __init__(self, serial: int, job: Job, start_s: float, nodes: list[int]) -> None:
        self.serial = serial
        self.job = job
        self.submit_s = job.submit_s
        self.start_s = start_s
        self.nodes = nodes
        self.end_s = start_s
        self.state = CODE["COMPLETED"]
        self.failing = False
        self.by = -1  # serial of the attempt that preempted it
        self.place = -1  # among those that may be preempted
        self.over = False


class Failure(NamedTuple):
    """A node failed under an attempt, by the shape's cause of that number."""

    t_s: float
    node: int
    cause: int
    attempt: int
    state: int


class Ran(NamedTuple):
    """What the scheduler did. `rows`: serial, job, submit, start, end, state, failure (-1: none),
    preempted by (serial; -1: nobody), lanes, its first in `held` and how many nodes. `looping`:
    jobs that crash again and again, by number, and after which failure."""

    jobs: list[Job]
    rows: np.ndarray
    held: np.ndarray
    failures: list[Failure]
    absences: list[Absence]
    looping: list[tuple[int, int]]
