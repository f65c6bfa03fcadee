"""Narrator of one replication, failure by failure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from outlast import events
from outlast.config import LIMIT_MAX, Limits
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.errors import UsageError
from outlast.plan.model.answer_values import format_count
from outlast.plan.narrate.controller_peers import TERM, ControllerPeers
from outlast.plan.narrate.incident_recovery import FOREVER_S, IncidentRecovery
from outlast.plan.narrate.narrated_nodes import NarratedNodes
from outlast.plan.narrate.story_progress import (
    EVENTS_MAX,
    SCRIPT,
    EventBook,
    JobProgress,
    StagePosition,
    StageResult,
    Stretch,
    ns,
)
from outlast.plan.simulate.simulated_job import MEMORY, SimulatedJob, check_job, check_seed
from outlast.theory.failures import DAY_S

NODES_MAX = 4096
# As the kernel is: who waits, waits for ever, and nobody gives up.
PATIENT = Limits(
    hello_s=LIMIT_MAX,
    status_s=LIMIT_MAX,
    join_s=LIMIT_MAX,
    connect_s=LIMIT_MAX,
    transfer_s=LIMIT_MAX,
    attempts_max=int(LIMIT_MAX),
    respawns_max=int(LIMIT_MAX),
)


class NarratedRun(NamedTuple):
    """Outcome of one replication, with the reason where it did not end well.

    An `interrupted` run may have met a bound (failures_max, the events of a run directory).
    `rungs`: ladder rungs that the core took, by the number of incidents that ended on them.
    `tallies`: as in a row of the kernel's.
    """

    outcome: str  # done | gave_up | interrupted
    why: str
    ended_s: float
    rungs: dict[str, int]
    tallies: dict[str, float]


def narrate(
    job: SimulatedJob,
    *,
    seed: int = 0,
    replication: int = 0,
    run_dir: Path | None = None,
    limits: Limits = PATIENT,
    stopped: Callable[[], bool] = lambda: False,
) -> NarratedRun:
    """Simulate one replication with the real core; the kernel's meets the same failures.

    With `run_dir`, write a run directory for `outlast explain`. `stopped` is called after each
    failure and ends the narration when true; events so far are complete.

    Raises UsageError naming the field of `job` that is invalid, or that the core has nothing for;
    RunDirError and StorageError where `run_dir` cannot be written.
    """
    check_job(job)
    check_seed(seed)
    if job.pace != 1:
        raise UsageError("overhead: a story's steps take what --step says; leave it out")
    if job.drop:
        raise UsageError("drop: the core has no rung that goes on without replicas; leave it out")
    if job.nodes + job.spares > NODES_MAX:
        raise UsageError(
            f"nodes and spares are {job.nodes + job.spares} together: a story has at most"
            f" {NODES_MAX}; `outlast plan simulate` has no such bound"
        )
    book = EventBook(run_dir, job)
    try:
        return _Narrator(job, NarratedNodes(job, seed, replication), book, limits, stopped).tell()
    finally:
        book.close()


class _Narrator:
    def __init__(
        self,
        job: SimulatedJob,
        world: NarratedNodes,
        book: EventBook,
        limits: Limits,
        stopped: Callable[[], bool],
    ) -> None:
        self._job = job
        self._world = world
        self._book = book
        self._stopped = stopped
        in_memory = job.copies > 0 or job.software_from == MEMORY
        policy = SavePolicy(memory=int(in_memory), disk=job.versions)
        self._cast = ControllerPeers("story", job.nodes, job.spares, limits, policy, book.emit)
        self._progress = JobProgress(job, self._done, self._saved)
        self._recovery = IncidentRecovery(
            job, world, self._cast, self._progress, self._enough, in_memory=in_memory
        )
        self._rungs: Counter[str] = Counter()

    def tell(self) -> NarratedRun:
        cast = self._cast
        progress = self._progress
        world = self._world
        self._begin()
        now_s = 0.0
        why = ""
        while cast.end is None:
            now_s = progress.run(now_s, world.failure_s(), self._enough)
            world.now_s, cast.now_ns = now_s, ns(now_s)
            cast.n = progress.n
            cast.step = progress.step
            if progress.stage == "done":
                cast.finish()
                continue
            if not self._enough():
                now_s = self._incident(now_s)
            if cast.end is None and (why := self._enough()):
                cast.stop(why)
        end = cast.end
        self._book.emit(
            events.RunEnded(
                t_ns=cast.now_ns,
                outcome=end.outcome,
                exit_code=end.exit_code,
                n=end.n,
                step=end.step,
                cause=end.cause,
            )
        )
        if cast.decided is not None and cast.decided.rung == "stop":
            why = cast.decided.reason
        why = why or (end.cause.detail if end.cause is not None else "")
        row = self._row(now_s, end.outcome == "done")
        return NarratedRun(end.outcome, why, now_s, dict(self._rungs), row)

    def _enough(self) -> str:
        """Return why a continuing run is narrated no further; "" where it is."""
        failures = self._world.failures
        now_s = self._world.now_s
        if self._stopped():
            why = "interrupted"
        elif self._book.full:
            why = f"{EVENTS_MAX:,} events are written"
        elif failures >= self._job.failures_max or now_s > FOREVER_S:
            why = "the work is not done"
        else:
            return ""
        return f"{why}: {format_count(failures, 'failure')} in {now_s / DAY_S:,.3g} days"

    def _begin(self) -> None:
        cast = self._cast
        cast.now_ns = ns(0)
        self._book.emit(
            events.RunStarted(
                t_ns=cast.now_ns,
                run="story",
                term=TERM,
                world=self._job.nodes,
                spares=self._job.spares,
                script=SCRIPT,
                args=(),
            )
        )
        cast.begin()

    def _row(self, now_s: float, done: bool) -> dict[str, float]:
        progress = self._progress
        return {
            "wall_s": now_s if done else math.inf,
            "done_s": self._job.work_s if done else progress.stored.cycle * self._job.interval_s,
            "failures": float(self._world.failures),
            "redo_s": progress.redo_s,
            "save_s": progress.save_s,
            "slow_s": 0.0,  # nobody goes on without a replica
            **self._recovery.tallies,
        }

    def _incident(self, now_s: float) -> float:
        cast = self._cast
        progress = self._progress
        seats = cast.state.members.seats
        generation = cast.state.generation
        attempt = progress.break_off()
        end = self._recovery.recover(now_s)
        if cast.decided is not None:
            self._rungs[cast.decided.rung] += 1
        if cast.end is None:
            lost = (*progress.restore(end.source), Stretch(now_s, min(end.closed_s, end.now_s)))
            self._book.refused(attempt._replace(stretches=lost), seats, generation)
        return end.now_s

    def _done(self, what: StageResult) -> None:
        self._book.done(what, self._cast.state.members.seats, self._cast.state.generation)

    def _saved(self, when_s: float, place: StagePosition) -> None:
        step = self._progress.step_at(place)
        self._book.emit(
            events.CheckpointSaved(
                t_ns=ns(when_s),
                n=self._progress.n_at(place),
                step=step,
                path=f"checkpoints/{step}",
                size_bytes=0,
                seconds=self._job.cost_s + self._job.flush_s,
            )
        )
