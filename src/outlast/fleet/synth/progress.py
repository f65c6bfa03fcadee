"""How job runs got on: what they kept of their work, and who crashed again and again."""

from __future__ import annotations

import msgspec
import numpy as np

from outlast.fleet.synth.attempts import Attempts
from outlast.fleet.synth.frames import job_number
from outlast.fleet.synth.ran import Ran
from outlast.fleet.synth.shapes import Shape
from outlast.fleet.synth.workload import CODE, QOS

LONG_S = 86400.0  # job runs that held nodes for less are not told of


class Run(msgspec.Struct, frozen=True):
    """A job over its attempts, under whatever numbers. `wall_s`: since it could first start, as far
    as the table knows; `productive_s`: scheduled time that was kept, which is what was saved before
    each interruption and, in the last attempt, all after its start."""

    jobs: tuple[str, ...]
    gpus: int
    qos: str
    attempts: int
    wall_s: float
    scheduled_s: float
    productive_s: float
    ettr: float


class Loop(msgspec.Struct, frozen=True):
    """A job that crashed again and again after a hardware failure, `attempts` times, and how many
    attempts of others these preempted."""

    job: str
    gpus: int
    attempts: int
    preempted: int


def runs(shape: Shape, made: Attempts) -> list[Run]:
    """Those of whole nodes that held them for a day or longer, in all."""
    (whole,) = np.nonzero(made.large >= 0)
    order = whole[np.lexsort((made.start_s[whole], made.run[whole]))]
    if not len(order):
        return []
    run = made.run[order]
    firsts = np.flatnonzero(np.r_[True, run[1:] != run[:-1]])
    lasts = np.r_[firsts[1:], len(order)] - 1
    held_s = made.end_s[order] - made.start_s[order]
    useful_s = np.maximum(0.0, held_s - shape.restart_s)
    kept_s = useful_s // shape.checkpoint_s * shape.checkpoint_s
    kept_s[lasts] = useful_s[lasts]
    scheduled = np.add.reduceat(held_s, firsts)
    productive = np.add.reduceat(kept_s, firsts)
    wall = made.end_s[order[lasts]] - made.eligible_s[order[firsts]]
    found = []
    for at in np.flatnonzero(scheduled >= LONG_S).tolist():
        rows = order[firsts[at] : lasts[at] + 1]
        jobs = tuple(map(job_number, np.unique(made.job[rows]).tolist()))
        one = Run(
            jobs, int(made.gpus[rows[0]]), QOS[made.qos[rows[0]]], len(rows), float(wall[at]),
            float(scheduled[at]), float(productive[at]), float(productive[at] / wall[at]),
        )  # fmt: skip
        found.append(one)
    return found


def loops(made: Attempts, ran: Ran) -> list[Loop]:
    """Those that crashed in the window, as far as they did there."""
    found = []
    runs_of = np.array([*(job.run for job in ran.jobs), -1])[made.large]
    for number, failure in ran.looping:
        run = ran.jobs[number].run
        crashed = (
            (runs_of == run)
            & (made.start_s >= ran.failures[failure].t_s)
            & (made.state == CODE["FAILED"])
            & (made.failure < 0)
            & (made.end_s - made.start_s <= 3600)
        )
        (rows,) = np.nonzero(crashed)
        if len(rows):
            preempted = int(np.isin(made.by, rows).sum())
            job = job_number(int(made.job[rows[0]]))
            found.append(Loop(job, int(made.gpus[rows[0]]), len(rows), preempted))
    return found
