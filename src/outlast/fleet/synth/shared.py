"""Jobs smaller than a node, filled into the nodes that the scheduler set aside for them.

A shared node has lanes, 8 of one GPU, 4 of two or 2 of four, and in each lane one job follows the
other; so its GPUs are never given twice. Whoever runs when the node goes ends with it; who could
not have run for the protected time before a preemption is not begun. A job that is to begin anew
takes the place of the next one in a lane as wide: what follows it there is its next attempt.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outlast.fleet.synth.ran import Ran
from outlast.fleet.synth.schedule import REQUEUE_S
from outlast.fleet.synth.shapes import GPUS, Shape
from outlast.fleet.synth.workload import CODE, mean_s, outcomes, works_s

_CUT = 1.3  # jobs ask for so much more than they get before their node's turn ends
_FULL = 0.85  # of a lane's time is used
_DEEP = 64  # jobs in a lane at most
_CHUNK = 20_000  # lanes at a time
_WAIT_S = 300.0  # in the queue, the mean
_REQUEUED, _RUNNING, _PREEMPTED = CODE["REQUEUED"], CODE["RUNNING"], CODE["PREEMPTED"]
_NODE_FAIL, _COMPLETED = CODE["NODE_FAIL"], CODE["COMPLETED"]


class Small(NamedTuple):
    """Attempts of small jobs; `job` counts them from 0 on, `row` is the shared node's in Ran."""

    job: np.ndarray
    submit_s: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    state: np.ndarray
    row: np.ndarray
    struck: np.ndarray  # whether the node failed, or was taken, under it
    gpus: np.ndarray


def small_jobs(shape: Shape, ran: Ran, rng: np.random.Generator) -> Small:
    """All of them, by width, then by lane."""
    none = np.zeros(0)
    parts = [Small(none.astype(int), none, none, none, none.astype(int), none.astype(int),
                   none.astype(bool), none.astype(int))]  # fmt: skip
    jobs = 0
    for size in shape.sizes:
        if size.gpus >= GPUS:
            continue
        rows = np.flatnonzero(ran.rows[:, 8] == size.gpus)
        rows = rows[np.argsort(ran.rows[rows, 3], kind="stable")]
        lanes = np.repeat(rows, GPUS // size.gpus)
        mean = mean_s(shape, size)
        chunks = [
            _filled(shape, ran, lanes[first : first + _CHUNK], _CUT * mean, rng)
            for first in range(0, len(lanes), _CHUNK)
        ]
        start_s, end_s, state, row, struck = (
            np.concatenate(columns) for columns in zip(*chunks, strict=True)
        )
        part = _numbered(start_s, end_s, state, row, struck, size.gpus, rng)
        parts.append(part._replace(job=part.job + jobs))
        jobs += len(part.job)
    return Small(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _filled(
    shape: Shape, ran: Ran, lanes: np.ndarray, mean: float, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Start, end, state, row, whether it was struck: of the jobs in these lanes."""
    rows = ran.rows[lanes]
    many = len(lanes) * _DEEP
    works = works_s(shape, mean, many, rng).reshape(-1, _DEEP)
    gaps = rng.exponential(mean * (1 - _FULL) / _FULL, (len(lanes), _DEEP))
    again = rng.random((len(lanes), _DEEP)) < shape.requeued
    works = np.where(again, works * rng.random(works.shape), works)
    works, gaps = np.ceil(works), np.ceil(gaps)
    ends = rows[:, 3:4] + np.cumsum(works + gaps, axis=1)
    starts = ends - works
    states = np.where(again, _REQUEUED, outcomes(shape, many, rng).reshape(-1, _DEEP))
    node_end, node_state = rows[:, 4:5], rows[:, 5:6]
    late = starts > node_end - shape.protected_s
    cut = ends >= node_end
    kept = starts < node_end
    kept &= ~(cut & late & (node_state == _PREEMPTED))
    struck = kept & cut & (node_state != _COMPLETED)
    states = np.where(struck, node_state.astype(int), states)
    rows_of = np.broadcast_to(lanes[:, None], starts.shape)
    ends = np.minimum(ends, node_end)
    return starts[kept], ends[kept], states[kept], rows_of[kept], struck[kept]


def _numbered(
    start_s: np.ndarray, end_s: np.ndarray, state: np.ndarray, row: np.ndarray,
    struck: np.ndarray, gpus: int, rng: np.random.Generator,
) -> Small:  # fmt: skip
    """Attempts of one width, begun ones linked to those that they begin anew."""
    order = np.argsort(start_s, kind="stable")
    start_s, end_s, state, row, struck = (
        each[order] for each in (start_s, end_s, state, row, struck)
    )
    many = len(start_s)
    ended = np.flatnonzero((struck & (state != _RUNNING)) | (state == _REQUEUED))
    ended = ended[np.argsort(end_s[ended], kind="stable")]
    ready_s = end_s[ended] + REQUEUE_S + np.ceil(rng.exponential(_WAIT_S, len(ended)))
    counted = np.arange(len(ended))
    following = np.searchsorted(start_s, ready_s)
    following = np.maximum.accumulate(following - counted) + counted  # each gets one of its own
    ended, following = ended[following < many], following[following < many]
    job = np.arange(many)
    job[following] = ended
    while True:  # until each points at its first attempt
        further = job[job]
        if np.array_equal(further, job):
            break
        job = further
    submit_s = start_s - np.ceil(rng.exponential(_WAIT_S, many))
    submit_s[following] = end_s[ended]
    return Small(job, submit_s, start_s, end_s, state, row, struck, np.full(many, gpus))
